"""`jax.disable_jit` and `jax_debug_nans`: the plain step, operation by operation, in a job of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.placements.layouts import on_device
from jaxdist.step.batch import is_keys
from jaxdist.step.signature import NUMBERS, Signature, constants_back


class DebugSettings(NamedTuple):
    """Which of JAX's settings for debugging are on."""

    disable_jit: bool  # `jax.disable_jit`
    nans: bool  # `jax_debug_nans`
    infs: bool  # `jax_debug_infs`


def settings() -> DebugSettings | None:
    """JAX's settings for debugging; None: all are off."""
    config: Any = jax.config
    if not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs):
        return None
    return DebugSettings(config.jax_disable_jit, config.jax_debug_nans, config.jax_debug_infs)


def op_by_op(plain: Callable[..., Any], signature: Signature, leaves: Sequence[Any]) -> Any:
    """What a step returns, computed without `jax.jit`."""
    # What the arguments hold is not made here: JAX's check would name the copy.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        whole = [_local(x) for x in leaves]
        args = jax.tree.unflatten(signature.tree, whole)
    try:
        with jax.disable_jit():
            return plain(*constants_back(args))
    except FloatingPointError as error:
        for name, x in zip(signature.names, whole, strict=True):
            if jax.numpy.issubdtype(jax.dtypes.result_type(x), jax.numpy.inexact) and not np.isfinite(x).all():
                error.add_note(f"NaN or infinity is in the argument {name} already")
        raise


def _local(x: Any) -> Any:
    """An array on one device, numbers as they are."""
    if isinstance(x, NUMBERS):
        return x
    if is_keys(x):
        return jax.random.wrap_key_data(_local(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and len(x.devices()) == 1:
        return on_device(x)
    return jax.numpy.asarray(np.asarray(x))
