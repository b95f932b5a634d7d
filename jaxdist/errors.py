"""Exceptions of jaxdist's own."""

from __future__ import annotations


class StepError(TypeError):
    """A step can't run on several devices as it stands: a result would silently be another one."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class SyncError(RuntimeError):
    """What should be the same on every rank and device is not."""
