"""What a step takes on devices that need not be here, and on which mesh it takes least. Nothing is sent or compiled."""
