"""The *levels* pass: marks of `jaxdist.zero` at another level, wherever they are, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.step.interpreter import subjaxprs
from jaxdist.step.passes.levels import at_level, levels
from jaxdist.step.primitives import mark, shard_p


def marks(jaxpr: Any) -> list[tuple[str, int]]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is shard_p:
            found.append((eqn.params["role"], eqn.params["level"]))
        for sub in subjaxprs(eqn):
            found += marks(sub)
    return sorted(found)


def step(w: Any, x: Any) -> Any:
    mark(w, "parameter", 2)  # no result follows from it
    carry, _ = lax.scan(lambda c, y: (c + mark(y, "gradient", 2), None), w[0], x)
    return jax.jit(lambda s: mark(s, "state", 2) * 2)(w) + mark(carry, "asked", 3)


ARGS = jnp.arange(6.0).reshape(2, 3), jnp.ones((4, 3))


@pytest.mark.parametrize("level", [None, 0, 1, 3])
def test_marks(level: int | None) -> None:
    closed = jax.make_jaxpr(step)(*ARGS)
    assert levels(closed.jaxpr) == {2}
    again = jax.make_jaxpr(at_level(closed, level))(*ARGS)
    roles = ["gradient", "parameter", "state"] if level != 0 else []
    assert marks(again.jaxpr) == sorted([("asked", 3), *((role, 2 if level is None else level) for role in roles)])
    assert levels(again.jaxpr) == ({2 if level is None else level} if level != 0 else set())
    (out,) = jax.jit(at_level(closed, level))(*ARGS)
    assert (out == jax.jit(step)(*ARGS)).all()
