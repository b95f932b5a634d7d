"""A traced step, as data: its operations, how to run them, what they send."""
