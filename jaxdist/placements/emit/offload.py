"""The *offload* pass: bring state from host memory to its device in stages.

XLA starts copies as soon as it can: all state would arrive when a step begins. So each stage waits for the gradients
of its parameters and the update of the stage before.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxdist.errors import StepError
from jaxdist.ir.interpreter import Interpreter, called, inlined, live, renamed
from jaxdist.ir.primitives import shard_p
from jaxdist.mesh import Axis
from jaxdist.placements.model.values import aval_of

_STAGES = 16  # approximate number of stages, given enough leaves. Two or three are on the device at a time


class _Origin(NamedTuple):
    """The origin of a variable."""

    away: frozenset[int] = frozenset()  # the arguments in host memory that it depends on
    when: int = -1  # the time of
    gradient: Var | None = None  # the gradient, or number made of gradients, that is computed last


class _Stage(NamedTuple):
    arguments: list[int]
    gradient: Var | None  # to wait for


def staged(closed: ClosedJaxpr, offloaded: Mapping[int, int | None], axes: Sequence[Axis]) -> ClosedJaxpr:
    """Return a device's program that fetches host state, its operations in order of stages."""
    if not offloaded:
        return closed
    if any("Ordered" in type(effect).__name__ for effect in closed.effects):
        raise StepError(
            "zero(offload=True) is not possible in a step that has a callback with ordered=True: JAX can't compile "
            "ordered effects together with arrays in the host's memory. Leave ordered=True away"
        )
    if not axes:  # unchanged from tracing: the update may be a call
        closed = jax.make_jaxpr(functools.partial(_Flat({}).run, closed))(*closed.in_avals)
    jaxpr, eqns = closed.jaxpr, live(closed.jaxpr)
    origins = _origins(jaxpr, eqns, offloaded)
    stages = _stages(jaxpr, offloaded, origins)
    stage_of: dict[Var, int] = {jaxpr.invars[i]: s for s, stage in enumerate(stages, 1) for i in stage.arguments}
    parts: list[list[JaxprEqn]] = [[] for _ in range(len(stages) + 1)]  # the first needs none
    for eqn in eqns:
        # In the last stage of what it takes, so that nothing waits for state that it does without.
        s = max((stage_of.get(v, 0) for v in _variables(eqn.invars)), default=0)
        parts[s].append(eqn)
        stage_of.update(dict.fromkeys(eqn.outvars, s))

    out, names, updated = parts[0], dict[Var, Var](), list[Var]()
    done = {v for eqn in out for v in eqn.outvars}
    for stage, part in zip(stages, parts[1:], strict=True):
        causes = [*updated, *([stage.gradient] if stage.gradient in done else [])]
        out += _fetch([jaxpr.invars[i] for i in stage.arguments], causes, names, axes)
        out += [eqn.replace(invars=renamed(eqn.invars, names)) for eqn in part]
        done.update(v for eqn in part for v in eqn.outvars)
        results = [jaxpr.outvars[k] for i in stage.arguments if (k := offloaded[i]) is not None]
        updated = [v for v in _variables(results) if v in done]
    return ClosedJaxpr(jaxpr.replace(eqns=out, outvars=renamed(jaxpr.outvars, names)), closed.consts)


class _Flat(Interpreter):
    """Evaluate operations one by one, with calls inlined."""

    worth_a_call = math.inf

    def touches(self, eqn: JaxprEqn) -> bool:
        return called(eqn) is not None


def _origins(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], offloaded: Mapping[int, int | None]) -> dict[Var, _Origin]:
    """Find the origin of each variable."""
    origins = {jaxpr.invars[i]: _Origin(frozenset({i})) for i in offloaded}
    times: dict[Var, int] = {}  # when each variable is computed
    for n, eqn in enumerate(eqns):
        operands = [origins[v] for v in _variables(eqn.invars) if v in origins]
        away = frozenset[int]().union(*(origin.away for origin in operands))
        last = max(operands, key=lambda origin: origin.when, default=_Origin())
        result = eqn.outvars[0] if eqn.outvars else None
        if eqn.primitive is shard_p and eqn.params["role"] == "gradient":
            # Marks are where the optimizer is called; the gradient is ready when its value is.
            last = _Origin(away, next((times[v] for v in _variables(eqn.invars) if v in times), 0), result)
        elif last.when >= 0 and not away and result and aval_of(result).size == 1:  # a norm of all, for example
            last = _Origin(away, n, result)
        origins.update((v, last._replace(away=away)) for v in eqn.outvars)
        times.update(dict.fromkeys(eqn.outvars, n))
    return origins


def _stages(jaxpr: Jaxpr, offloaded: Mapping[int, int | None], origins: Mapping[Var, _Origin]) -> list[_Stage]:
    """Divide the offloaded arguments into parts to update in the order of their gradients."""
    # Those that share a result (one parameter's moments, or values gathered in one bucket) share a stage.
    together: list[_Origin] = []
    for v in (*_variables(jaxpr.outvars), *(jaxpr.invars[i] for i in offloaded)):
        group = origins.get(v, _Origin())
        if group.away:
            for other in [other for other in together if other.away & group.away]:
                together.remove(other)
                group = max(group, other, key=lambda origin: origin.when)._replace(away=group.away | other.away)
            together.append(group)
    avals = {i: aval_of(jaxpr.invars[i]) for i in offloaded}
    sizes = {i: aval.size * aval.dtype.itemsize for i, aval in avals.items()}
    full = sum(sizes.values()) / _STAGES
    stages, held = list[_Stage](), full
    for group in sorted(together, key=lambda group: (group.when, min(group.away))):
        arguments = sorted(group.away)
        if held >= full:
            stages.append(_Stage([], None))
            held = 0
        stages[-1] = _Stage(stages[-1].arguments + arguments, group.gradient)
        held += sum(sizes[i] for i in arguments)
    return stages


def _fetch(away: Sequence[Var], causes: Sequence[Var], names: dict[Var, Var], axes: Sequence[Axis]) -> list[JaxprEqn]:
    """Return operations that fetch arguments once `causes` are known; add the new names to `names`."""

    def fetch(*operands: jax.Array) -> list[jax.Array]:
        # The barrier is an operand's only tie to the causes: XLA would else start the copy at once.
        xs = lax.optimization_barrier(operands) if causes else operands
        return [jax.device_put(x, jax.memory.Space.Device) for x in xs[: len(away)]]

    eqns, fetched, _ = inlined(fetch, renamed([*away, *causes], names), axes)
    names.update(zip(away, fetched, strict=True))
    return eqns


def _variables(atoms: Sequence[Var | Literal]) -> Iterator[Var]:
    return (atom for atom in atoms if not isinstance(atom, Literal))
