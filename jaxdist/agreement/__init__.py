"""The same on all ranks, or the same error on all."""
