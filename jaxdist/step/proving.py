"""Compare a program with its step on every rank (`jaxdist.verify`)."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.compilation.placed import PlacedStep
from jaxdist.compilation.signature import Leaf, is_keys
from jaxdist.errors import StepError
from jaxdist.proof.compare import Verified, verified
from jaxdist.proof.evaluate import is_float
from jaxdist.step import batch
from jaxdist.step.placer import Placer
from jaxdist.text import say_once

Exact = Any  # a leaf that is not a float, or None for a float, which is drawn


# A guard that the user has set is for the step: this moves whole leaves to the host and back.
@jax.transfer_guard("allow")
def verified_on_all(
    name: str, placer: Placer, placed: PlacedStep, data: Sequence[Leaf], points: int, strict: bool
) -> Verified:
    """Compare a program with its step. A difference on any rank is one on all. Every rank calls it."""
    call, context = f"verify step {name!r}", placer.context
    context.control.used = True

    def on_all(differing: list[int]) -> list[int]:
        _, told = on_every_rank(context, call, lambda: Part(None, told=differing), patient=True)
        return sorted({k for of_rank in told for k in of_rank})

    with context.watchdog.call(call) as active:
        exact = _exact(placer, placed, data)  # gathers shards: a rank that fails here leaves the call, and is named
        _, told = on_every_rank(context, call, lambda: Part(None, told=exact))
        whole = _joined(placed, told, placer)
        for k, aval in enumerate(placed.avals):
            whole[k] = jax.random.wrap_key_data(whole[k], impl=_implementation(aval)) if is_keys(aval) else whole[k]
        result = verified(placed, whole, points, strict, on_all)
    active.finish(None)
    return result


def require_equal(name: str, placer: Placer, placed: PlacedStep, data: Sequence[Leaf]) -> None:
    """Raise an error on every rank if a program is not the step (``verify=True``)."""
    found = verified_on_all(name, placer, placed, data, points=2, strict=False)
    if found.equal is None:
        say_once(f"step {name!r}: {found}")
    elif not found:
        raise StepError(f"step {name!r}: {found}. Please report it")


def _exact(placer: Placer, placed: PlacedStep, data: Sequence[Leaf]) -> list[Exact]:
    """Return this process's part of the leaves that are not floats: labels, counters, keys."""

    def exact(x: Leaf, aval: jax.ShapeDtypeStruct) -> Exact:
        if is_float(aval):
            return None
        x = x.array if type(x) is batch.Part else x
        if isinstance(x, jax.ShapeDtypeStruct):
            shape = jax.eval_shape(jax.random.key_data, aval) if is_keys(aval) else aval
            return np.zeros(shape.shape, shape.dtype)
        whole = np.asarray(placer.whole(jax.random.key_data(x) if is_keys(x) else x))
        return whole if is_keys(x) else whole.astype(aval.dtype)

    return [exact(x, aval) for x, aval in zip(data, placed.avals, strict=True)]


def _implementation(aval: jax.ShapeDtypeStruct) -> Any:
    """Return the implementation of random keys of a type, which only keys can tell."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), aval)
    return found[0]


def _joined(placed: PlacedStep, told: Sequence[Sequence[Exact]], placer: Placer) -> list[Exact]:
    """Return whole leaves: of the batch the rows of all ranks, in their order, if a rank does not have all of them."""
    first = [ranks[0] for ranks in placer.device_map.sharers] if len(told) > 1 else [0]

    def joined(k: int, aval: jax.ShapeDtypeStruct) -> Exact:
        parts = [told[rank][k] for rank in first]
        is_whole = parts[0] is None or parts[0].shape[: len(aval.shape)] == aval.shape
        return parts[0] if is_whole else np.concatenate(parts)

    return [joined(k, aval) for k, aval in enumerate(placed.avals)]
