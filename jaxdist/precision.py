"""Parameters in 16 bits, updated in 32."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      master: the parameters in full precision.
      inner: the state of the transformation, made for them.
    """

    master: Any
    inner: Any


def master_weights(tx: optax.GradientTransformation, dtype: Any = jnp.float32) -> optax.GradientTransformationExtraArgs:
    """`tx` on a copy of the parameters in full precision, for a model whose own are in bfloat16 or float16.

    Updates too small for 16 bits add up in the copy; the parameters are the copy, rounded. Under
    ``zero(master_weights(tx), level)`` the copy is in shards, as the rest of the state is, and what is gathered is in
    16 bits.

    Args:
      tx: any optax transformation; it sees gradients and parameters in `dtype`.
      dtype: of the copy, of floating leaves that are narrower.

    Returns:
      A transformation whose updates are in `dtype`; `optax.apply_updates` adds them and rounds.

    Example:
      >>> import jax.numpy as jnp, jaxdist, optax
      >>> params = jnp.ones(2, jnp.bfloat16)
      >>> tx = jaxdist.master_weights(optax.sgd(1e-3))
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params[0]), round(float(state.master[0]), 4)
      (0.98828125, 0.99)

    References:
      Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740, section 3.1.
    """
    tx = optax.with_extra_args_support(tx)

    def wide(x: Any) -> Any:
        x = jnp.asarray(x)
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < jnp.dtype(dtype).itemsize
        return x.astype(dtype) if narrow else x

    def init(params: Any) -> MasterWeightsState:
        master = jax.tree.map(wide, params)
        return MasterWeightsState(master, tx.init(master))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, MasterWeightsState]:
        if params is None:
            raise ValueError("master_weights has to round the parameters: tx.update(grads, state, params)")
        updates, inner = tx.update(jax.tree.map(wide, updates), state.inner, state.master, **extra)
        master: Any = optax.apply_updates(state.master, updates)
        difference = jax.tree.map(lambda new, old: new - wide(old), master, params)
        return difference, MasterWeightsState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)
