"""The *mean* pass alone: where the reductions of gradients end up, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.step.interpreter import subjaxprs
from jaxdist.step.passes.reductions import Reductions
from jaxdist.step.trace import capture

MESH = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


def in_loops(f: Callable[..., Any], state: Any = (3,), op: Any = "mean") -> list[tuple[str, tuple[int, ...], int]]:
    """(op, shape, loops around it) of each reduction in f(state, batch of 2 x 3 a device) after the pass, in order."""
    avals = [jax.ShapeDtypeStruct(state, jnp.float32), jax.ShapeDtypeStruct((8, 3), jnp.float32)]
    closed = capture(lambda s, x: [f(s, x)], avals, [P(), P("data")], MESH, check=True)
    rules = Reductions(op)
    closed = capture(
        lambda *xs: [rules.finish(x) for x in rules.run(closed, *xs)], avals, [P(), P("data")], MESH, check=True
    )
    found: list[tuple[str, tuple[int, ...], int]] = []

    def visit(jaxpr: Jaxpr, depth: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jaxdist_all_reduce":
                found.append((eqn.params["op"], eqn.outvars[0].aval.shape, depth))  # type: ignore[attr-defined]
            for sub in subjaxprs(eqn):
                visit(sub, depth + (eqn.primitive.name in ("scan", "while")))

    visit(closed.jaxpr, 0)
    return found


def reduced(f: Callable[..., Any], state: Any = (3,), op: Any = "mean") -> list[tuple[str, tuple[int, ...]]]:
    """(op, shape) of each of them."""
    return [(op, shape) for op, shape, _ in in_loops(f, state, op)]


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


# --- loops that add gradients up


def accumulated(loop: str, loss: Callable[[Any, Any], Any], turns: int = 2) -> Callable[[Any, Any], Any]:
    """The mean of the gradients of `turns` microbatches, as users write it."""

    def f(s: Any, x: Any) -> Any:
        parts = x.reshape(turns, -1, x.shape[1])
        zeros = jnp.zeros_like(s)
        if loop == "scan":
            total, _ = lax.scan(lambda acc, part: (acc + jax.grad(loss)(s, part), None), zeros, parts)
        elif loop == "scan of means":
            total, _ = lax.scan(lambda acc, part: (acc + jax.grad(loss)(s, part) / turns, None), zeros, parts)
            return total
        elif loop == "fori_loop":
            total = lax.fori_loop(0, turns, lambda i, acc: acc + jax.grad(loss)(s, parts[i]), zeros)
        elif loop == "while_loop":
            turn = lambda c: (c[0] + 1, c[1] + jax.grad(loss)(s, parts[c[0]]))
            _, total = lax.while_loop(lambda c: c[0] < turns, turn, (0, zeros))
        elif loop == "nested":
            inner = lambda acc, part: lax.scan(lambda a, row: (a + jax.grad(loss)(s, row[None]), None), acc, part)
            total, _ = lax.scan(inner, zeros, parts)
        else:
            total = sum((jax.grad(loss)(s, part) for part in parts), zeros)
        return total / turns

    return f


LOOPS = ["scan", "scan of means", "fori_loop", "while_loop", "nested", "unrolled"]


def plain(s: Any, x: Any) -> Any:
    return jnp.mean(jnp.sin(x * s))


def penalised(s: Any, x: Any) -> Any:
    return plain(s, x) + 0.1 * jnp.sum(s**2)


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("loop", LOOPS[:-1])
def test_accumulated_gradients_are_reduced_once_after_the_loop(loop: str, op: str) -> None:
    assert in_loops(accumulated(loop, plain), op=op) == [(op, (3,), 0)]


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_a_penalty_on_the_weights_does_not_keep_the_reduction_in_the_loop(loop: str) -> None:
    found = in_loops(accumulated(loop, penalised))
    assert [f for f in found if f[1] == (3,)] == [("mean", (3,), 0)]


@pytest.mark.parametrize("loss", [plain, penalised])
@pytest.mark.parametrize("loop", LOOPS)
def test_accumulated_gradients_are_right(loop: str, loss: Any) -> None:
    f = accumulated(loop, loss)
    s, x = jnp.arange(1.0, 4.0), jnp.asarray(np.random.default_rng(0).normal(size=(16, 3)))
    got, _ = jaxdist.data_parallel(lambda s, x: (f(s, x), 0), donate=False)(s, jnp.concatenate([x, x[::-1]]))
    rows = 2 if loop == "nested" else 1  # a sum over rows of means, two rows a turn
    np.testing.assert_allclose(got, rows * jax.grad(lambda s: loss(s, x))(s), rtol=1e-12)


def test_the_sum_starts_where_the_user_says() -> None:
    start = jnp.asarray([1.0, 1e8, -3.0])

    def f(s: Any, x: Any) -> Any:
        return lax.scan(lambda acc, part: (acc + jax.grad(plain)(s, part), None), start, x.reshape(2, -1, 3))[0]

    s, x = jnp.arange(1.0, 4.0), jnp.asarray(np.random.default_rng(0).normal(size=(32, 3)))
    cases: list[tuple[Any, int]] = [("mean", 1), ("sum", 8)]
    for op, scale in cases:
        got, _ = jaxdist.data_parallel(lambda s, x: (f(s, x), 0), donate=False, reduce=op)(s, x)
        want = start + scale * 2 * jax.grad(plain)(s, x)
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_sum_that_is_used_in_each_turn_is_reduced_in_each() -> None:
    def f(s: Any, x: Any) -> Any:  # two steps of training
        return lax.scan(lambda s, part: (s - jax.grad(plain)(s, part), None), s, x.reshape(2, -1, 3))[0]

    assert in_loops(f) == [("mean", (3,), 1)]


def test_a_clipped_sum_is_reduced_in_each_turn() -> None:
    def f(s: Any, x: Any) -> Any:
        body = lambda acc, part: (jnp.clip(acc + jax.grad(plain)(s, part), -1, 1), None)
        return lax.scan(body, jnp.zeros_like(s), x.reshape(2, -1, 3))[0]

    assert in_loops(f) == [("mean", (3,), 1)]


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_the_last_gradient_of_a_loop_is_right(op: Any) -> None:
    """Carried, not added up; `weight` makes it a sum over devices whatever the step's losses are."""

    def last(s: Any, x: Any) -> Any:
        def turn(_: Any, part: Any) -> Any:
            return jaxdist.grad(plain, weight=part[:, 0] > 0)(s, part), None

        return jax.lax.scan(turn, jnp.zeros_like(s), x.reshape(2, -1, 3))[0]

    s, x = jnp.arange(1.0, 4.0), jnp.asarray(np.random.default_rng(0).normal(size=(32, 3)))
    got, _ = jaxdist.data_parallel(lambda s, x: (last(s, x), 0), donate=False, reduce=op)(s, x)
    parts = x.reshape(8, 2, 2, 3)[:, 1]  # of each device its second microbatch
    weights = (parts[..., 0] > 0).sum(1)
    grads = jnp.stack([jax.grad(plain)(s, part) for part in parts])
    np.testing.assert_allclose(got, (grads * weights[:, None]).sum(0) / weights.sum(), rtol=1e-12)
