"""Parameters in 16 bits, updated in 32; for float16 with a loss scale that follows the gradients."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

Precision = Literal["bf16", "fp16"]
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}

_FIRST, _LEAST, _MOST = 2.0**16, 1.0, 2.0**24  # loss scales
_GROWS_AFTER = 2000  # steps without an overflow


class LossScale(NamedTuple):
    """The loss scale of float16."""

    scale: Any  # the factor of the loss, a power of two, float32
    good_steps: Any  # in a row since it last changed, int32


class MixedState(NamedTuple):
    """The state of an optimizer with ``zero(tx, precision=...)``."""

    master: Any  # the parameters in float32
    inner: Any  # the state of the transformation, made for them
    loss_scale: LossScale | None  # only for ``"fp16"``


def loss_scale(opt_state: Any) -> jax.Array:
    """Return the factor for the loss, so that small gradients do not become 0 in float16.

    Args:
      opt_state: a tree that contains the state of one optimizer with ``zero(tx, precision=...)``.

    Returns:
      A float32 scalar: the scale with ``"fp16"``, 1 with ``"bf16"``. ``tx.update`` divides the gradients by it.

    Raises:
      ValueError: `opt_state` does not contain exactly one such state.

    Example:
      >>> import jax.numpy as jnp, jaxdist, optax
      >>> tx = jaxdist.zero(optax.sgd(1e-3), level=0, precision="fp16")
      >>> float(jaxdist.loss_scale(tx.init({"w": jnp.ones(3)})))
      65536.0

    References:
      Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740, section 3.2.
    """
    is_mixed = lambda x: isinstance(x, MixedState)
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_mixed) if is_mixed(x)]
    if len(found) != 1:
        raise ValueError(
            "loss_scale takes the state of one optimizer with jaxdist.zero(tx, precision=...), and here are "
            f"{len(found)}"
        )
    scale = found[0].loss_scale
    return jnp.float32(1) if scale is None else jnp.asarray(scale.scale)


def mixed(tx: optax.GradientTransformation, precision: Precision) -> optax.GradientTransformationExtraArgs:
    """`tx` on a float32 copy of parameters that are in 16 bits; see ``zero(precision=)``."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        master = jax.tree.map(_wide, params)
        scale = LossScale(jnp.float32(_FIRST), jnp.int32(0)) if precision == "fp16" else None
        return MixedState(master, tx.init(master), scale)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _check(params, precision)
        grads, scale = jax.tree.map(_wide, updates), state.loss_scale
        if scale is not None:
            grads = jax.tree.map(lambda g: g / state.loss_scale.scale, grads)
        changes, inner = tx.update(grads, state.inner, state.master, **extra)
        master: Any = optax.apply_updates(state.master, changes)
        if scale is not None:
            finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
            keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
            master, inner, scale = keep(master, state.master), keep(inner, state.inner), _next(scale, finite)
        # A step that is left out changes nothing, to the bit: the parameters are the old copy, rounded.
        difference = jax.tree.map(lambda new, old: new - _wide(old), master, params)
        return difference, MixedState(master, inner, scale)

    return optax.GradientTransformationExtraArgs(init, update)


def _next(scale: LossScale, finite: jax.Array) -> LossScale:
    grows = scale.good_steps + 1 >= _GROWS_AFTER
    good = jnp.where(grows, jnp.minimum(scale.scale * 2, _MOST), scale.scale)
    bad = jnp.maximum(scale.scale / 2, _LEAST)
    return LossScale(jnp.where(finite, good, bad), jnp.where(finite & ~grows, scale.good_steps + 1, 0))


def _wide(x: Any) -> Any:
    x = jnp.asarray(x)
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def _check(params: Any, precision: Precision) -> None:
    name = f"zero(precision={precision!r})"
    if params is None:
        raise ValueError(f"{name} has to round the parameters: tx.update(grads, opt_state, params)")
    wanted = str(jnp.dtype(DTYPES[precision]))
    found = sorted({str(jnp.result_type(x)) for x in jax.tree.leaves(params)})
    if wanted not in found:
        raise ValueError(
            f"{name}: none of the parameters is in {wanted} (they are in {', '.join(found)}). Cast them when tx.init "
            f"has seen them: params = optax.tree.cast(params, jnp.{wanted})"
        )
