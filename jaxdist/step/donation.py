"""State whose memory its next value takes: an array given twice, and one that is gone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxdist.errors import message_of
from jaxdist.placements.layouts import HOST, Padded, copied, physical
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
    """What the latest call of a step took: the arrays are gone, and tell who has them.

    Args:
      step: its name.
    """

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
                return f"call {one.call} of step {one.step!r}"
        return "an earlier call of a step"


def name_deleted(
    step: str, calling: Calling, args: tuple[Any, ...], keywords: tuple[str, ...], error: BaseException
) -> None:
    """XLA's error for an array whose memory another call has taken says neither which nor why."""
    leaves = jax.tree_util.tree_leaves_with_path(args)
    gone = [(path, x) for path, x in leaves if isinstance(x, (jax.Array, Padded)) and x.is_deleted()]
    said = message_of(error) if issubclass(type(error), (RuntimeError, ValueError)) else ""
    if not gone or not ("deleted" in said or "donated" in said):
        return
    path, array = gone[0]
    name = leaf_name(calling.of(len(args), keywords), path)
    raise RuntimeError(
        f"step {step!r}: {name} was deleted: {Taken.by(physical(array))}, which returned its next value, took its "
        "memory. Go on with what that call returned, or pass it a copy (jax.numpy.copy), or decorate that step with "
        "donate=False"
    ) from error
