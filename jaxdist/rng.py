"""Randomness that differs between devices, from one key."""

from __future__ import annotations

import jax
from jax import lax

from jaxdist import compat
from jaxdist.mesh import AXIS, MODEL, SEQUENCE


def fold_rank(key: jax.Array) -> jax.Array:
    """A different PRNG key on each device inside `jaxdist.per_device`; the key itself elsewhere.

    A decorated step draws what one device would draw for the whole batch, each device its part: it needs no key of its
    own. Code for each device (`jaxdist.per_device`, `jax.shard_map`) does.

    Args:
      key: a key of ``jax.random.key`` or ``jax.random.PRNGKey``, the same on each device.

    Returns:
      The key folded with the device's index along the axes of the mesh.

    Example:
      >>> import jax, jaxdist
      >>> key = jax.random.key(0)
      >>> bool(jaxdist.fold_rank(key) == key)
      True

    References:
      https://docs.jax.dev/en/latest/jax.random.html#jax.random.fold_in
    """
    axes = compat.manual_axes()
    own = tuple(name for name in (AXIS, MODEL, SEQUENCE) if name in axes)
    return jax.random.fold_in(key, lax.axis_index(own)) if own else key
