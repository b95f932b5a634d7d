"""State whose memory its next value takes: an array given twice, and one that is gone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.errors import message_of
from jaxdist.placements.layouts import HOST, Padded, copied
from jaxdist.step.calling import Calling
from jaxdist.step.signature import leaf_name


def without_aliases(state: list[Any]) -> list[Any]:
    """Donating one buffer twice is an error: the second reference (an average that starts as the weights) is copied."""
    seen: set[int] = set()
    out = []
    for x in state:
        twin = isinstance(x, jax.Array) and id(x) in seen
        seen.add(id(x))
        out.append(copied(x, x.sharding) if twin and x.sharding.memory_kind == HOST else jnp.copy(x) if twin else x)
    return out


def name_deleted(
    step: str, calling: Calling, args: tuple[Any, ...], keywords: tuple[str, ...], error: BaseException
) -> None:
    """XLA's error for an array whose memory another call has taken says neither which nor why."""
    leaves = jax.tree_util.tree_leaves_with_path(args)
    gone = [path for path, x in leaves if isinstance(x, (jax.Array, Padded)) and x.is_deleted()]
    said = message_of(error) if issubclass(type(error), (RuntimeError, ValueError)) else ""
    if not gone or not ("deleted" in said or "donated" in said):
        return
    name = leaf_name(calling.of(len(args), keywords), gone[0])
    raise RuntimeError(
        f"step {step!r}: {name} was deleted: an earlier call of a step, which returned its next value, took "
        "its memory. Go on with what that call returned, or decorate with donate=False"
    ) from error
