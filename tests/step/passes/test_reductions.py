"""The *mean* pass alone: where the reductions of gradients end up, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType

from jaxdist.step.interpreter import subjaxprs
from jaxdist.step.passes.reductions import Reductions
from jaxdist.step.trace import capture

MESH = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


def reduced(f: Callable[..., Any], state: Any = (3,), op: Any = "mean") -> list[tuple[str, tuple[int, ...]]]:
    """(op, shape) of each reduction in f(state, batch of 2 x 3 a device) after the pass, in program order."""
    avals = [jax.ShapeDtypeStruct(state, jnp.float32), jax.ShapeDtypeStruct((8, 3), jnp.float32)]
    closed = capture(lambda s, x: [f(s, x)], avals, [False, True], MESH, check=True)
    rules = Reductions(op)
    closed = capture(
        lambda *xs: [rules.finish(x) for x in rules.run(closed, *xs)], avals, [False, True], MESH, check=True
    )
    found: list[tuple[str, tuple[int, ...]]] = []

    def visit(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jaxdist_all_reduce":
                found.append((eqn.params["op"], eqn.outvars[0].aval.shape))  # type: ignore[attr-defined]
            for sub in subjaxprs(eqn):
                visit(sub)

    visit(closed.jaxpr)
    return found


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_gradient_is_reduced_once_as_told(op: str) -> None:
    assert reduced(lambda s, x: jax.grad(lambda s: jnp.mean(x * s))(s), op=op) == [(op, (3,))]


def test_the_reduction_waits_for_the_sum_over_a_broadcast() -> None:
    assert reduced(lambda s, x: jax.grad(lambda s: jnp.sum(jnp.where(x > 0, x, s)))(s), ()) == [("mean", ())]


def test_uses_of_one_parameter_are_added_before_they_travel() -> None:
    assert reduced(lambda s, x: jax.grad(lambda s: jnp.sum(jnp.sin(x * s) @ s))(s)) == [("mean", (3,))]


def test_a_replicated_factor_is_no_reason_to_reduce_early() -> None:
    f = lambda s, x: jax.grad(lambda s: jnp.sum(x * (jnp.ones((x.shape[0], 1)) * s * 2)))(s)
    assert reduced(f) == [("mean", (3,))]


def test_a_gradient_used_twice_is_reduced_once() -> None:
    def f(s: Any, x: Any) -> Any:
        g = jax.grad(lambda s: jnp.mean(x * s))(s)
        return g / jnp.sqrt(jnp.sum(g**2))

    assert reduced(f) == [("mean", (3,))]


def test_a_gradient_that_nothing_needs_is_not_reduced() -> None:
    def f(s: Any, x: Any) -> Any:
        grads = jax.grad(lambda s, t: jnp.mean(x * s * t), argnums=(0, 1))(s, s)
        return grads[0]

    assert reduced(f) == [("mean", (3,))]


def test_weight_decay_in_the_loss_moves_nothing() -> None:
    assert reduced(lambda s, x: jax.grad(lambda s: jnp.sum(s**2) + 0 * jnp.sum(lax.stop_gradient(x)))(s)) == []


def test_reductions_inside_loops_stay_there() -> None:
    def f(s: Any, x: Any) -> Any:
        def body(total: Any, row: Any) -> Any:
            return total + jax.grad(lambda s: jnp.sum(row * s))(s), None

        return lax.scan(body, jnp.zeros(3), x)[0]

    assert reduced(f) == [("mean", (3,))]


def test_the_users_own_reduction_is_left_alone() -> None:
    assert reduced(lambda s, x: lax.psum(x, "data")) == []


def test_float16_gradients_do_not_overflow_on_the_way() -> None:
    import jaxdist

    step = jaxdist.data_parallel(lambda s, x: s - jax.grad(lambda s: jnp.mean(x * s))(s), donate=False)
    x = jnp.full((8, 1), 30000, jnp.float16)  # 8 devices: their sum is beyond float16
    assert float(step(jnp.zeros(1, jnp.float16), x)[0]) == pytest.approx(-30000, rel=1e-3)
