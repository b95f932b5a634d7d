"""`jax.disable_jit` and `jax_debug_nans`: the plain step, operation by operation, on this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.placements.layouts import Padded, on_device, physical
from jaxdist.runtime.context import Context
from jaxdist.step.batch import is_keys
from jaxdist.step.placer import ELSEWHERE, Placer, spans
from jaxdist.step.signature import NUMBERS, Signature, constants_back


class DebugSettings(NamedTuple):
    """Which of JAX's settings for debugging are on.

    Attributes:
      disable_jit: `jax.disable_jit`.
      nans: `jax_debug_nans`.
      infs: `jax_debug_infs`.
    """

    disable_jit: bool
    nans: bool
    infs: bool


def settings() -> DebugSettings | None:
    """JAX's settings for debugging; None: all are off."""
    config: Any = jax.config
    if not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs):
        return None
    return DebugSettings(config.jax_disable_jit, config.jax_debug_nans, config.jax_debug_infs)


def op_by_op(
    plain: Callable[..., Any], signature: Signature, leaves: list[Any], placer: Placer, context: Context
) -> Any:
    """What a step returns for the whole batch, computed on this process without `jax.jit`.

    Args:
      plain: the step, of all its arguments in order.
      signature: of the call.
      leaves: of its arguments, each rank with its own part of the batch.
      placer: onto the step's mesh.
      context: the job.
    """
    # What the arguments hold is not made here: JAX's check would name the copy.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if is_keys(x)}  # they travel as integers
        leaves = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
        state = [leaves[i] for i in signature.state]
        mine = [leaves[i] for i in signature.batch]
        if context.size > 1:
            away = [i for i, x in enumerate(state) if placer.layout(x) is ELSEWHERE]
            for i, x in zip(away, context.broadcast([np.asarray(state[i]) for i in away]), strict=True):
                state[i] = x
            state = [_whole(x) for x in state]
            spanning = [spans(physical(x)) for x in mine]
            own = [None if s else np.asarray(x) for s, x in zip(spanning, mine, strict=True)]
            parts = context.control.exchange("batch of a step without jit", own, context.timeout)
            first = [ranks[0] for ranks in placer.shared]
            mine = [
                _whole(x) if s else np.concatenate([parts[rank][k] for rank in first])[: getattr(x, "total", None)]
                for k, (s, x) in enumerate(zip(spanning, mine, strict=True))
            ]
        whole: list[Any] = [None] * len(leaves)
        for at, xs in ((signature.state, state), (signature.batch, mine)):
            for i, x in zip(at, xs, strict=True):
                whole[i] = x
        whole = [_local(x) for x in whole]
        for i, kind in keys.items():
            whole[i] = jax.random.wrap_key_data(whole[i], impl=kind)
        args = jax.tree.unflatten(signature.tree, whole)
    try:
        with jax.disable_jit():
            return plain(*constants_back(args))
    except FloatingPointError as error:
        for name, x in zip(signature.names, whole, strict=True):
            if _is_floating(x) and not np.isfinite(x).all():
                error.add_note(f"NaN or infinity is in the argument {name} already")
        raise


def _is_floating(x: Any) -> bool:
    return jax.numpy.issubdtype(jax.dtypes.result_type(x), jax.numpy.inexact)


def _whole(x: Any) -> Any:
    if not spans(physical(x)):
        return x
    full = multihost_utils.process_allgather(physical(x), tiled=True)
    return x.layout.trimmed(full) if type(x) is Padded else full


def _local(x: Any) -> Any:
    """An array of this process on one device, numbers as they are."""
    if isinstance(x, NUMBERS):
        return x
    if isinstance(x, jax.Array) and len(x.devices()) == 1:
        return on_device(x)
    return jax.numpy.asarray(np.asarray(x))
