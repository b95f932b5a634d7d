"""Collectives on the user's own arrays."""
