"""What a step would take on devices that are not here."""
