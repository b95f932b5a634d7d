"""The *offload* pass: state in the host's memory is brought to its device a part at a time, each when it is needed.

XLA starts a copy as soon as it may: all of the state would come when a step begins, and lie on the device beside the
activations. So it comes in stages: the leaves of some parameters when their gradients are there, and the stage before
has been updated. Leaves from which one result follows (the moments of one parameter, say) are in one stage, and so are
those whose new parameters are gathered together, in a bucket, which on GPUs they are not.

Reference: Ren et al., *ZeRO-Offload*, USENIX ATC 2021 (there the host computes the update as well).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdist.errors import StepError
from jaxdist.ir.interpreter import Interpreter, called, inlined, live, renamed, retrace
from jaxdist.ir.primitives import fetch_p, shard_p
from jaxdist.mesh import Axis

_STAGES = 16
"""About so many, if there are leaves enough. Two or three of them are on the device at a time."""


class _Origin(NamedTuple):
    """What a variable follows from: arguments in the host's memory; and of gradients, or of numbers made of
    them, the one that is computed last: when, and its name."""

    away: frozenset[int] = frozenset()
    when: int = -1
    gradient: Any = None


class _Stage(NamedTuple):
    arguments: list[int]
    gradient: Any


def staged(closed: ClosedJaxpr, offloaded: Mapping[int, int | None], axes: Sequence[Axis]) -> ClosedJaxpr:
    """A device's program that brings what is in the host's memory, its operations in the order of the stages."""
    if not offloaded:
        return closed
    if any("Ordered" in type(effect).__name__ for effect in closed.effects):
        raise StepError(
            "zero(offload=True) is not possible in a step that has a callback with ordered=True: JAX can't compile "
            "ordered effects together with arrays in the host's memory. Leave ordered=True away"
        )
    if not axes:  # as it was traced: the update may be a call
        closed = retrace(functools.partial(_Flat({}).run, closed), closed.in_avals)
    jaxpr, eqns = closed.jaxpr, live(closed.jaxpr)
    origins = _origins(jaxpr, eqns, offloaded)
    stages = _stages(jaxpr, offloaded, origins)
    stage_of: dict[Any, int] = {jaxpr.invars[i]: s for s, stage in enumerate(stages, 1) for i in stage.arguments}
    parts: list[list[JaxprEqn]] = [[] for _ in range(len(stages) + 1)]  # first what needs none of it
    for eqn in eqns:
        s = max((stage_of.get(v, 0) for v in _variables(eqn.invars)), default=0)
        parts[s].append(eqn)
        stage_of.update(dict.fromkeys(eqn.outvars, s))

    out, names, updated = parts[0], dict[Any, Any](), list[Any]()
    done = {v for eqn in out for v in eqn.outvars}
    for stage, part in zip(stages, parts[1:], strict=True):
        after = [*updated, *([stage.gradient] if stage.gradient in done else [])]
        out += _fetching([jaxpr.invars[i] for i in stage.arguments], after, names, axes)
        out += [eqn.replace(invars=renamed(eqn.invars, names)) for eqn in part]
        done.update(v for eqn in part for v in eqn.outvars)
        results = [jaxpr.outvars[k] for i in stage.arguments if (k := offloaded[i]) is not None]
        updated = [v for v in _variables(results) if v in done]
    return ClosedJaxpr(jaxpr.replace(eqns=out, outvars=renamed(jaxpr.outvars, names)), closed.consts)


class _Flat(Interpreter):
    """Evaluates operations one by one, calls in place."""

    def touches(self, eqn: JaxprEqn) -> bool:
        return called(eqn) is not None

    def _stretches(self, eqns: Sequence[JaxprEqn]) -> Iterator[tuple[int, int]]:
        return ((i, i + 1) for i in range(len(eqns)))


def _origins(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], offloaded: Mapping[int, int | None]) -> dict[Any, _Origin]:
    """Of each variable."""
    found = {jaxpr.invars[i]: _Origin(frozenset({i})) for i in offloaded}
    made: dict[Any, int] = {}
    for n, eqn in enumerate(eqns):
        before = [found[v] for v in _variables(eqn.invars) if v in found]
        away = frozenset[int]().union(*(one.away for one in before))
        last = max(before, key=lambda one: one.when, default=_Origin())
        result: Any = eqn.outvars[0] if eqn.outvars else None
        if eqn.primitive is shard_p and eqn.params["role"] == "gradient":
            # All of the marks are where the optimizer is called: the gradient is there when what it marks is made.
            last = _Origin(away, next((made[v] for v in _variables(eqn.invars) if v in made), 0), result)
        elif last.when >= 0 and not away and result.aval.size == 1:  # a norm of all, say
            last = _Origin(away, n, result)
        found.update((v, last._replace(away=away)) for v in eqn.outvars)
        made.update(dict.fromkeys(eqn.outvars, n))
    return found


def _stages(jaxpr: Jaxpr, offloaded: Mapping[int, int | None], origins: Mapping[Any, _Origin]) -> list[_Stage]:
    """Parts of the offloaded arguments that can be updated one after another, as their gradients come."""
    together: list[_Origin] = []
    for v in (*_variables(jaxpr.outvars), *(jaxpr.invars[i] for i in offloaded)):
        one = origins.get(v, _Origin())
        if one.away:
            for other in [other for other in together if other.away & one.away]:
                together.remove(other)
                one = max(one, other, key=lambda each: each.when)._replace(away=one.away | other.away)
            together.append(one)
    avals: dict[int, Any] = {i: jaxpr.invars[i].aval for i in offloaded}
    full = sum(a.size * a.dtype.itemsize for a in avals.values()) / _STAGES
    stages, held = list[_Stage](), full
    for one in sorted(together, key=lambda one: (one.when, min(one.away))):
        arguments = sorted(one.away)
        if held >= full:
            stages.append(_Stage([], None))
            held = 0
        stages[-1] = _Stage(stages[-1].arguments + arguments, one.gradient)
        held += sum(avals[i].size * avals[i].dtype.itemsize for i in arguments)
    return stages


def _fetching(own: Sequence[Any], after: Sequence[Any], names: dict[Any, Any], axes: Sequence[Axis]) -> list[JaxprEqn]:
    """The operations that bring variables when others have been computed; `names` learns what they are called then."""

    def fetch(*operands: Any) -> list[Any]:
        return fetch_p.bind(*operands, count=len(own))

    eqns, fetched, _ = inlined(fetch, renamed([*own, *after], names), axes)
    names.update(zip(own, fetched, strict=True))
    return eqns


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))
