"""The *accumulation* pass: what a loop stacks up only to be added to a sum is added in that loop, a slice at a time.

The gradients of a model that is a `lax.scan` over its layers come out of the backward loop as one stack. In a loop over
microbatches it is added to the sum of those before; so a device would hold both. Here the sum goes through the layers'
loop, whose turns each add to one slice of it, in place: the same additions, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, primitives

from jaxdist.ir.control_flow import bodies
from jaxdist.ir.interpreter import contains, has_effect, inlined, renamed, subjaxprs, with_bodies
from jaxdist.ir.operations import ADDITION
from jaxdist.mesh import Axis


class _Sum(NamedTuple):
    """An addition of what a loop stacks up."""

    stack: int  # which of the loop's results
    to: Any  # what it is added to
    addition: int  # the operation, by its place


def in_place(closed: ClosedJaxpr, axes: Sequence[Axis]) -> ClosedJaxpr:
    """A device's program, with such additions in its loops' inner loops."""
    return _in_loops(closed, axes, looped=False)


def _in_loops(closed: ClosedJaxpr, axes: Sequence[Axis], looped: bool) -> ClosedJaxpr:
    jaxpr = closed.jaxpr
    eqns = [_with_bodies(eqn, axes, looped) for eqn in jaxpr.eqns]
    found = _sums(jaxpr, eqns) if looped else {}
    if not found and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return closed
    names: dict[Any, Any] = {}
    out: list[JaxprEqn] = []
    gone = set[int]()
    for n, eqn in enumerate(eqns):
        sums = found.get(n, [])
        operands = renamed([*eqn.invars, *(one.to for one in sums)], names)
        made, results, held = inlined(_summing(eqn, sums), operands, axes) if sums else ([], [], {})
        if sums and not held:  # the arrays of a body of its own would have no place here
            out += [one.replace(source_info=eqn.source_info) for one in made]
            stacks = {one.stack for one in sums}
            left = [v for k, v in enumerate(eqn.outvars) if k not in stacks]
            names.update(zip([*left, *(eqns[one.addition].outvars[0] for one in sums)], results, strict=True))
            gone.update(one.addition for one in sums)
        elif n not in gone:
            out.append(eqn.replace(invars=renamed(eqn.invars, names)))
    return ClosedJaxpr(jaxpr.replace(eqns=out, outvars=renamed(jaxpr.outvars, names)), closed.consts)


def _with_bodies(eqn: JaxprEqn, axes: Sequence[Axis], looped: bool) -> JaxprEqn:
    bodies = list(subjaxprs(eqn))
    if not any(contains(body.jaxpr, {primitives.scan_p}) for body in bodies):
        return eqn
    looped = looped or eqn.primitive.name in ("scan", "while")
    changed = eqn.replace(params=with_bodies(eqn, lambda body: _in_loops(body, axes, looped)))
    return eqn if all(a is b for a, b in zip(bodies, subjaxprs(changed), strict=True)) else changed


def _sums(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn]) -> dict[int, list[_Sum]]:
    """By the place of a loop: stacks that are only added to something that is there before, and not needed after."""
    atoms = [*jaxpr.outvars, *(v for eqn in eqns for v in eqn.invars)]
    uses = Counter(v for v in atoms if not isinstance(v, Literal))
    reader = {v: n for n, eqn in enumerate(eqns) for v in eqn.invars if not isinstance(v, Literal)}
    maker = {v: n for n, eqn in enumerate(eqns) for v in eqn.outvars}
    found: dict[int, list[_Sum]] = {}
    for n, eqn in enumerate(eqns):
        if eqn.primitive.name != "scan" or has_effect(eqn):
            continue
        for k in range(len(bodies(eqn)[0].carry), len(eqn.outvars)):
            stack: Any = eqn.outvars[k]
            aval = stack.aval
            if uses[stack] != 1 or stack not in reader:
                continue
            addition = eqns[reader[stack]]
            if addition.primitive.name not in ADDITION or addition.outvars[0].aval != aval:
                continue
            (to,) = (v for v in addition.invars if v is not stack)
            if not isinstance(to, Literal) and uses[to] == 1 and to.aval == aval and maker.get(to, -1) < n:
                found.setdefault(n, []).append(_Sum(k, to, reader[stack]))
    return found


def _summing(eqn: JaxprEqn, sums: Sequence[_Sum]) -> Callable[..., list[Any]]:
    """The loop, given its operands and the sums: its results but for the stacks, and the new sums."""
    params: dict[str, Any] = eqn.params
    scan, body = bodies(eqn)[0], jaxpr_as_fun(params["jaxpr"])
    stacks = [one.stack for one in sums]

    def added(total: Any, i: Any, x: Any) -> Any:
        return lax.dynamic_update_index_in_dim(total, lax.dynamic_index_in_dim(total, i, 0, keepdims=False) + x, i, 0)

    def run(*operands: Any) -> list[Any]:
        consts, carry, xs = scan.split(operands[: len(eqn.invars)])

        def turn(carries: Any, slices: Any) -> Any:
            (carry, sums), (i, xs) = carries, slices
            outs = body(*consts, *carry, *xs)
            rest = [y for k, y in enumerate(outs) if k in scan.ys and k not in stacks]
            return (outs[: len(carry)], [added(s, i, outs[k]) for s, k in zip(sums, stacks, strict=True)]), rest

        start = list(carry), list(operands[len(eqn.invars) :])
        turns = jnp.arange(params["length"], dtype=jnp.int32)
        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        (carry, after), ys = lax.scan(turn, start, (turns, list(xs)), **settings)
        return [*carry, *ys, *after]

    return run
