"""Exceptions of jaxdist's own."""

from __future__ import annotations


class StepError(TypeError):
    """A step can't run on several devices as it stands.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda w, batch: w + jax.lax.ppermute(batch.mean(0), "data", [(0, 1)]))
      >>> step(jnp.zeros(3), jnp.ones((8, 3)))
      Traceback (most recent call last):
        ...
      jaxdist.errors.StepError: ppermute at ... names the permutation ((0, 1),), but inside a step the axis has ...
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
