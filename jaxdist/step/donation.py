"""State whose memory its next value takes: an array given twice, and one that is gone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxdist.errors import DonatedError
from jaxdist.placements.layouts import HOST, copied, physical
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


class Taken:
    """What the latest call of a step took: the arrays are gone, and tell who has them."""

    _all: ClassVar[weakref.WeakSet[Taken]] = weakref.WeakSet()

    def __init__(self, step: str):
        self.step, self.call = step, 0
        self.state: Sequence[Any] = ()
        self._all.add(self)

    @classmethod
    def by(cls, array: Any) -> str:
        """Who took an array."""
        for one in list(cls._all):
            if any(x is array for x in one.state):
                return f"call {one.call} of step {one.step!r} took its memory (donate=)"
        return "an earlier call of a step, or of jax.jit, that donates took its memory, or it was deleted"


def check_there(
    step: str, calling: Calling, args: tuple[Any, ...], keywords: tuple[str, ...], leaves: Sequence[Any]
) -> None:
    """Refuse an array whose memory another call has taken."""
    if not any(map(is_gone, leaves)):
        return
    path, array = next((path, x) for path, x in jax.tree_util.tree_leaves_with_path(args) if is_gone(x))
    name = leaf_name(calling.of(len(args), keywords), path)
    raise DonatedError(
        f"step {step!r}: {name} is gone: {Taken.by(physical(array))}. Go on with what that call returned, pass it a "
        "copy (jax.numpy.copy), or leave donate= out where it was given"
    )


def is_gone(x: Any) -> bool:
    """Whether the memory of a leaf was taken, or given up."""
    deleted = getattr(x, "is_deleted", None)
    return deleted is not None and deleted()
