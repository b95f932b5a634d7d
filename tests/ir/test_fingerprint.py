"""What a program says on the wire: collectives in order, nested ones, and no dead ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdist
from jaxdist.ir.dataflow import operations


def of(f: Any, *shapes: tuple[int, ...]) -> tuple[str, ...]:
    avals = [jax.ShapeDtypeStruct(s, np.float32) for s in shapes]
    return sent(jax.make_jaxpr(f, axis_env=[("data", 8)])(*avals))


def sent(closed: Any) -> tuple[str, ...]:
    return tuple(one.text for one in operations(closed) if one.sent)


def test_order_types_and_parameters() -> None:
    def f(x: Any, y: Any) -> Any:
        lax.psum(y, "data")  # dead code does not count
        total = lax.pmax(x, "data") + lax.psum(x.sum().astype(jnp.float16), "data")
        return total + lax.ppermute(y, "data", [(0, 1), (1, 0)]).sum() + lax.axis_index("data")

    assert of(f, (2,), (3, 4)) == (
        "pmax float32[2] axes=(data)",
        "psum float16[] axes=(data)",
        "ppermute float32[3,4] axis_name=(data) perm=((0, 1), (1, 0))",
    )


def test_nested_ones_and_where_they_are() -> None:
    def body(c: Any, x: Any) -> Any:
        return c + lax.psum(x, "data"), None

    def f(x: Any) -> Any:
        total, _ = lax.scan(jax.checkpoint(body), 0.0, x)
        return lax.cond(total > 0, lambda: total, lambda: lax.pmax(x.sum(), "data") + total)

    assert of(f, (5,)) == (
        "in a scan of 5: psum float32[] axes=(data)",
        "in branch 0 of a cond: pmax float32[] axes=(data)",
    )


def test_groups_and_shapes_tell_programs_apart() -> None:
    def gather(groups: Any) -> Any:
        return lambda x: lax.all_gather(x, "data", axis_index_groups=groups)

    halves, pairs = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len({of(gather(g), s) for g in (halves, pairs) for s in ((2,), (3,))}) == 4


def test_a_step_that_is_called_or_lowered_is_told_of_once_traced() -> None:
    told: list[tuple[str, ...]] = []
    step: Any = jaxdist.data_parallel(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), donate=False)
    step._traced = lambda _, closed, __: told.append(sent(closed))
    w, x = jnp.ones(3, jnp.float32), np.ones((8, 3), np.float32)
    step(step(w, x), x)
    assert told == [("all_reduce float32[3] axes=(data)",)]
    step.lower(w, np.ones((16, 3), np.float32))
    assert len(told) == 2
