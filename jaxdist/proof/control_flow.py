"""Loops and branches, evaluated as `jaxdist.proof.rules` evaluates operations."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxdist import compat
from jaxdist.placements.model.values import aval_of
from jaxdist.proof.evaluate import Evaluator, is_float

# Turns of a loop that ends by floats, and of others, whose number may have been made of floats: in the field that might
# be any.
_LONGEST = 32, 1 << 16


def cond(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    index, *operands = xs
    branches = [lambda *xs, branch=branch: e.run(branch, xs) for branch in eqn.params["branches"]]
    return lax.switch(index.astype(jnp.int32), branches, *operands)


def scan(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    params, (consts, carries) = eqn.params, compat.scan_split(eqn.params)
    constant, carry, rest = xs[:consts], list(xs[consts : consts + carries]), list(xs[consts + carries :])

    def turn(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = e.run(params["jaxpr"], [*constant, *carry, *x])
        return out[:carries], out[carries:]

    carry, made = lax.scan(turn, carry, rest, length=params["length"], reverse=params["reverse"])
    return [*carry, *made]


def while_(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    tested, constant, start = xs[:first], xs[first : first + second], list(xs[first + second :])
    longest = _LONGEST[0 if _ends_by_floats(params, len(start)) else 1]

    def goes_on(state: tuple[Any, list[Any]]) -> Any:
        goes_on = jnp.any(e.run(params["cond_jaxpr"], [*tested, *state[1]])[0])
        return goes_on & (state[0] < longest)

    def turn(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        done, new = state[1], e.run(params["body_jaxpr"], [*constant, *state[1]])
        if (runs := e.run(params["cond_jaxpr"], [*tested, *done])[0]).ndim:  # of `jax.vmap`: some examples are done
            among = lambda x: runs.reshape(*runs.shape, *(1,) * (x.ndim - runs.ndim))
            new = jax.tree.map(lambda x, y: jnp.where(among(x), x, y), new, done)
        return state[0] + 1, new

    return lax.while_loop(goes_on, turn, (jnp.int32(0), start))[1]


def _ends_by_floats(params: Mapping[str, Any], carries: int) -> bool:
    """Check whether the condition of a loop depends on floats, perhaps from an earlier turn."""
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    from_floats, before = [False] * carries, None
    while before != from_floats:
        before = from_floats
        from_floats = _follow(body, [False] * params["body_nconsts"] + before)
    return _follow(condition, [False] * params["cond_nconsts"] + from_floats)[0]


def _follow(closed: ClosedJaxpr, from_floats: Sequence[bool]) -> list[bool]:
    """Return which results of a program depend on floats, or on inputs that do."""
    depend = {v for v, is_one in zip(closed.jaxpr.invars, from_floats, strict=True) if is_one}
    is_one = lambda v: is_float(aval_of(v)) or (isinstance(v, Var) and v in depend)
    for eqn in closed.jaxpr.eqns:
        depend |= set(eqn.outvars) if any(map(is_one, eqn.invars)) else set()
    return [*map(is_one, closed.jaxpr.outvars)]
