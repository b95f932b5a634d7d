"""The decorated step: arguments are sorted into state and batch; it is traced once, placed, lowered, and called."""
