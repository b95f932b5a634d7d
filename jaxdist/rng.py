"""Randomness that differs between devices (dropout), from one key."""

from __future__ import annotations

import jax
from jax import lax

from jaxdist.step.primitives import AXIS
from jaxdist.step.trace import inside_step


def fold_rank(key: jax.Array) -> jax.Array:
    """A different PRNG key on each device inside a decorated step; the key itself elsewhere.

    Without it every device draws the same dropout mask for its part of the batch.

    Args:
      key: a key of ``jax.random.key`` or ``jax.random.PRNGKey``, the same on each device.

    Returns:
      The key folded with the device's index along the mesh axis ``"data"``.

    Example:
      >>> import jax, jaxdist
      >>> key = jax.random.key(0)
      >>> bool(jaxdist.fold_rank(key) == key)
      True

    References:
      https://docs.jax.dev/en/latest/jax.random.html#jax.random.fold_in
    """
    return jax.random.fold_in(key, lax.axis_index(AXIS)) if inside_step() else key
