"""The *levels* pass: a traced step at another ZeRO level than the one it was written with.

`jaxdist.zero` says its level in the marks that it leaves; what they hold is the same at every level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxdist.step.interpreter import Interpreter, subjaxprs
from jaxdist.step.primitives import shard_p

_ZERO = ("gradient", "state", "parameter")


def levels(jaxpr: Jaxpr) -> frozenset[int]:
    """Those of the uses of `jaxdist.zero` in a traced step."""
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive is shard_p and eqn.params["role"] in _ZERO:
            found.add(eqn.params["level"])
        found.update(*map(levels, subjaxprs(eqn)))
    return frozenset(found)


def at_level(closed: ClosedJaxpr, level: int | None) -> Callable[..., list[Any]]:
    """A traced step as a function, with the marks of `jaxdist.zero` at another level; at level 0 it has none.

    Args:
      closed: the step.
      level: for all marks; None: each keeps its own.
    """

    def mark(_: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        role, own = eqn.params["role"], eqn.params["level"]
        wanted = own if level is None or role not in _ZERO else level
        return shard_p.bind(x, role=role, level=wanted) if wanted else x

    interpreter = _Whole({shard_p: mark})
    return lambda *args: interpreter.run(closed, *args)


class _Whole(Interpreter):
    """Keeps what no result follows from: marks of parameters that the optimizer does not look at."""

    def equations(self, jaxpr: Jaxpr) -> Sequence[JaxprEqn]:
        return jaxpr.eqns
