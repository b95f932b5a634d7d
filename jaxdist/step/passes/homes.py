"""Which leaves of the state a step wants to be kept in shards: those that it hands to `jaxdist.zero`.

`jaxdist.zero` marks what its update is given. A mark on a value that is an input of the step, as it came, says how that
input is to be kept between steps: the optimizer's state in shards from level 1, parameters at level 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdist import compat
from jaxdist.step.interpreter import INLINED, subjaxprs
from jaxdist.step.layouts import Layout, choose
from jaxdist.step.primitives import shard_p

_SAME = {"pvary", "copy", "copy_p", "jaxdist_shard"}


@dataclass(frozen=True)
class _From:
    """A value that is input `index`, exactly or but for its dtype."""

    index: int
    exact: bool = True


@dataclass
class _Found:
    roles: dict[int, str] = field(default_factory=dict)
    sharded: set[int] = field(default_factory=set)
    sliced: set[int] = field(default_factory=set)  # a loop takes slices along the first dimension


def homes(closed: ClosedJaxpr, devices: int) -> list[Layout | None]:
    """For each input of a traced step the layout that it is to be kept in; None: whole on every device."""
    found = _Found()
    inputs = [_From(i) for i in range(len(closed.in_avals))]
    _follow(closed.jaxpr, inputs, found)
    shapes = [aval.shape for aval in closed.in_avals]
    # Leaves of one shape (a parameter and its moments) must agree.
    sliced = {shapes[i] for i in found.sliced}
    return [
        choose(shape, devices, avoid=(0,) if shape in sliced else ()) if i in found.sharded else None
        for i, shape in enumerate(shapes)
    ]


def roles(closed: ClosedJaxpr) -> dict[int, str]:
    """What each input of a traced step is to `jaxdist.zero`, if anything: ``"state"`` or ``"parameter"``."""
    found = _Found()
    _follow(closed.jaxpr, [_From(i) for i in range(len(closed.in_avals))], found)
    return found.roles


def _follow(jaxpr: Jaxpr, inputs: Sequence[_From | None], found: _Found) -> list[_From | None]:
    env: dict[Any, _From | None] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _From | None:
        return None if isinstance(atom, Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(a) for a in eqn.invars], found), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: JaxprEqn, args: list[_From | None], found: _Found) -> Sequence[_From | None]:
    name, nothing = eqn.primitive.name, [None] * len(eqn.outvars)
    if eqn.primitive is shard_p:
        if args[0] is not None and eqn.params["role"] in ("state", "parameter"):
            found.roles.setdefault(args[0].index, eqn.params["role"])
        kept = {"state": 1, "parameter": 3, "asked": 0}.get(eqn.params["role"])
        if args[0] is not None and args[0].exact and kept is not None and eqn.params["level"] >= kept:
            found.sharded.add(args[0].index)
    if name in _SAME:
        return args[:1]
    if name == "convert_element_type":
        return [args[0] and _From(args[0].index, exact=False)]
    if not any(args):
        return nothing
    if name == "optimization_barrier":
        return args
    if name == "scan":
        consts, carries = compat.scan_split(eqn.params)
        xs = args[consts + carries :]
        found.sliced |= {a.index for a in xs if a}
        outs = _follow(eqn.params["jaxpr"].jaxpr, [*args[: consts + carries], *[None] * len(xs)], found)
        return [o if o == a else None for o, a in zip(outs, args[consts:], strict=False)][:carries] + nothing[carries:]
    if name == "while":
        skipped = eqn.params["cond_nconsts"]
        _follow(eqn.params["body_jaxpr"].jaxpr, args[skipped:], found)
        return nothing
    if name == "cond":
        branches = [_follow(b.jaxpr, args[1:], found) for b in eqn.params["branches"]]
        return [outs[0] if len(set(outs)) == 1 else None for outs in zip(*branches, strict=True)]
    bodies = list(subjaxprs(eqn))
    if bodies and (name in INLINED or name in ("checkpoint", "remat", "remat2")):
        return _follow(bodies[0], args, found)
    return nothing
