"""How much a program holds at once: an estimate, before a compiler has fused and ordered it."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, Literal

from jaxdist.ir.interpreter import live, subjaxprs

# They are made where they are used.
_FUSED = {"broadcast_in_dim", "iota"}


def held_at_once(jaxpr: Jaxpr) -> int:
    """Bytes of the values that a program makes and holds at once, in the order in which it names them; at most.

    Its arguments do not count, and of a loop only one turn.
    """
    eqns = list(live(jaxpr))
    last: dict[Any, int] = {}
    for k, eqn in enumerate(eqns):
        last.update((v, k) for v in eqn.invars if not isinstance(v, Literal))
    last.update((v, len(eqns)) for v in jaxpr.outvars if not isinstance(v, Literal))
    sizes: dict[Any, int] = {}
    now = most = 0
    for k, eqn in enumerate(eqns):
        for v in eqn.outvars:
            if v in last:
                sizes[v] = 0 if eqn.primitive.name in _FUSED else _bytes(v.aval)
                now += sizes[v]
        most = max(most, now + max((held_at_once(sub.jaxpr) for sub in subjaxprs(eqn)), default=0))
        for v in {v for v in eqn.invars if not isinstance(v, Literal)}:
            if last[v] == k:
                now -= sizes.get(v, 0)
    return most


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize if hasattr(aval, "dtype") else 0
