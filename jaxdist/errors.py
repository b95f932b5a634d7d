"""Exceptions of jaxdist's own."""

from __future__ import annotations


class StepError(TypeError):
    """A step can't run on several devices as it stands: a result would silently be another one.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda total, batch: total + jnp.sum(batch, axis=0))
      >>> step(jnp.zeros(3), jnp.ones((8, 3)))
      Traceback (most recent call last):
        ...
      jaxdist.errors.StepError: the new value of state leaf total ... would differ between devices: ...
    """


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.zeros(3)}, step=1)
      >>> jaxdist.restore(path, {"w": jnp.zeros(4)})
      Traceback (most recent call last):
        ...
      jaxdist.errors.CheckpointError: ...
    """


class SyncError(RuntimeError):
    """What should be the same on every rank and device is not; from `jaxdist.check_sync` and ``check_every``."""
