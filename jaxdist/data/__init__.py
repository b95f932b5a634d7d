"""Batches: each rank's part of each, for an epoch."""
