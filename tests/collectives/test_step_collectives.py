"""The collectives of `jaxdist` in a step's code for each device, on virtual devices, against one device."""

from __future__ import annotations

from typing import Any

import collective_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxdist

N = 8


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_calls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    calls = [cases.random_call(rng, N) for _ in range(12)]
    assert cases.check(calls, [cases.data(c, rng, N) for c in calls], 0, N) == 12


def value(r: int) -> np.ndarray:
    return np.full((4, 4), r, np.float32)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_acceptance_values(n: int) -> None:
    mesh = parity.mesh(n)

    def run(x: Any) -> Any:
        rows, blocks = jnp.tile(x[:2] - 1, (n, 1)), jnp.concatenate([(x[:2] - 1) * n + d for d in range(n)])
        names: list[Any] = ["sum", "prod", "min", "max", "avg"]
        ops = {op: jaxdist.allreduce(x, op) for op in names}
        roots = {op: jaxdist.reduce(x, 0, op) for op in ops}
        pair = jaxdist.allreduce([x, -x], "sum") + jaxdist.allreduce([x, -x], "min")
        gathered = jaxdist.allgather(x), jaxdist.allgather(x, 1), jaxdist.gather(x, 0)
        rest = jaxdist.broadcast(x, 0), jaxdist.reduce_scatter(rows), jaxdist.all_to_all(blocks, 0, 0)
        grouped = (
            jaxdist.allreduce(x, groups=[[0, 1], [2, 3]] if n == 4 else None),
            jaxdist.allreduce(x, groups=[[1, 2, 3]] if n == 4 else [[0]]),
        )
        swapped = jaxdist.permute(x, [(0, 1), (1, 0)])
        return ops, roots, pair, gathered, rest, grouped, swapped

    step = jaxdist.data_parallel(cases.on_each(run), mesh=mesh)
    out = step(np.stack([value(r + 1) for r in range(n)]))

    def on(d: int) -> Any:
        return jax.tree.map(lambda y: np.asarray(y.addressable_shards[d].data)[0], out)

    for d in range(n):
        ops, roots, pair, gathered, rest, grouped, swapped = on(d)
        right = {"sum": sum(range(n + 1)), "prod": np.prod(range(1, n + 1)), "min": 1, "max": n, "avg": (n + 1) / 2}
        for op, number in right.items():
            np.testing.assert_array_equal(ops[op], value(number))
            np.testing.assert_array_equal(roots[op], value(number if d == 0 else d + 1))
        for got, number in zip(pair, [right["sum"], -right["sum"], 1, -n], strict=True):
            np.testing.assert_array_equal(got, value(number))
        everyone = [value(r + 1) for r in range(n)]
        np.testing.assert_array_equal(gathered[0], np.concatenate(everyone))
        np.testing.assert_array_equal(gathered[1], np.concatenate(everyone, 1))
        np.testing.assert_array_equal(gathered[2], np.concatenate(everyone) * (d == 0))
        np.testing.assert_array_equal(rest[0], value(1))
        np.testing.assert_array_equal(rest[1], np.full((2, 4), sum(range(n))))
        np.testing.assert_array_equal(rest[2], np.repeat([r * n + d for r in range(n)], 2)[:, None] * np.ones((1, 4)))
        np.testing.assert_array_equal(grouped[0], value(([3, 3, 7, 7] if n == 4 else [right["sum"]] * n)[d]))
        np.testing.assert_array_equal(grouped[1], value(([1, 9, 9, 9] if n == 4 else range(1, n + 1))[d]))
        np.testing.assert_array_equal(swapped, value([2, 1, 0, 0][d]))


DIFFERENTIABLE = {
    "allreduce sum": {"kind": "allreduce"},
    "allreduce avg": {"kind": "allreduce", "op": "avg"},
    "allreduce prod": {"kind": "allreduce", "op": "prod"},
    "allreduce in groups": {"kind": "allreduce", "groups": [[0, 2, 1], [3]]},
    "avg in groups": {"kind": "allreduce", "op": "avg", "groups": [[0, 2, 1]]},
    "allgather": {"kind": "allgather", "axis": 1},
    "allgather in groups": {"kind": "allgather", "groups": [[3, 0], [1, 2]]},
    "reduce_scatter": {"kind": "reduce_scatter", "axis": 1},
    "reduce_scatter avg": {"kind": "reduce_scatter", "op": "avg", "groups": [[3, 0], [1, 2]]},
    "all_to_all": {"kind": "all_to_all", "split_axis": 0, "concat_axis": 1},
    "broadcast": {"kind": "broadcast", "root": 2},
    "reduce": {"kind": "reduce", "root": 1},
    "gather": {"kind": "gather", "root": 1},
    "scatter": {"kind": "scatter", "root": 3},
    "permute": {"kind": "permute", "perm": [(0, 1), (1, 3), (2, 2)]},
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_one_program(name: str) -> None:
    n, call = 4, DIFFERENTIABLE[name]
    rng = np.random.default_rng(3)
    xs, p = rng.normal(size=(n, 4, 4)), jnp.asarray(rng.normal(size=(4, 4)))
    mesh = parity.mesh(n)

    def local(y: Any, x: Any) -> Any:  # what a device makes of its result: its own weights, and not linear
        return jnp.sum(jnp.sin(y) * x.sum()) + jnp.sum(y**2)

    def one_program(p: Any) -> Any:
        inputs = [jnp.tanh(p * x) for x in xs]
        return sum(local(y, x) for y, x in zip(cases.expected(call, inputs), xs, strict=True)) / n

    @jaxdist.data_parallel(mesh=mesh, donate=False)
    def step(p: Any, x: Any) -> Any:
        each = jaxdist.per_device(
            lambda p, x: local(cases.apply(call, jnp.tanh(p * x[0])), x[0])[None], (P(), P("data")), P("data")
        )
        return jax.grad(lambda p: each(p, x).mean())(p), 0

    got, _ = step(p, xs)
    np.testing.assert_allclose(got, jax.grad(one_program)(p), rtol=1e-12, atol=1e-12)
    direction = rng.normal(size=p.shape)
    h = 1e-6
    slope = (one_program(p + h * direction) - one_program(p - h * direction)) / (2 * h)
    np.testing.assert_allclose(np.sum(np.asarray(got) * direction), slope, rtol=1e-7)


BAD = {
    "unknown op": (lambda x: jaxdist.allreduce(x, "mean"), "op"),  # type: ignore[arg-type]
    "root out of range": (lambda x: jaxdist.broadcast(x, 8), "root"),
    "duplicate rank": (lambda x: jaxdist.allreduce(x, groups=[[0, 1], [1, 2]]), "1"),
    "rank out of range": (lambda x: jaxdist.allreduce(x, groups=[[0, 8]]), "8"),
    "indivisible": (lambda x: jaxdist.reduce_scatter(x[0]), "dimension 0"),
    "min of complex": (lambda x: jaxdist.allreduce(x * 1j, "min"), "complex"),
    "groups of two sizes": (lambda x: jaxdist.allgather(x, groups=[[0, 1], [2]]), "one size"),
    "send": (lambda x: jaxdist.send(x, 1), "permute"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, word = BAD[name]
    step = jaxdist.data_parallel(jaxdist.per_device(call, P("data"), P("data")))
    with pytest.raises((ValueError, TypeError, RuntimeError), match=word):
        step(np.ones((8, 3)))


@pytest.mark.parametrize(
    "call",
    [
        jaxdist.allreduce, jaxdist.allgather, jaxdist.broadcast, jaxdist.reduce_scatter,
        lambda x: [jaxdist.barrier(), x][1],
        lambda x: jaxdist.permute(x, [(0, 1)]), lambda x: jaxdist.all_to_all(x, 0, 0), lambda x: jaxdist.reduce(x, 0),
        lambda x: jax.grad(lambda x: jnp.sum(jaxdist.allreduce(x)))(x),
    ],
)  # fmt: skip
def test_outside_of_per_device_they_are_an_error(call: Any) -> None:
    step = jaxdist.data_parallel(lambda s, x: (s, jnp.sum(call(x))))
    with pytest.raises(jaxdist.StepError, match=r"inside a step.*jaxdist\.per_device"):
        step(jnp.zeros(()), np.ones((8, 8)))


def test_a_barrier_in_a_step_is_nothing() -> None:
    def run(x: Any) -> Any:
        jaxdist.barrier()
        return x + 1

    out = jaxdist.data_parallel(jaxdist.per_device(run, P("data"), P("data")))(np.zeros(8))
    assert (np.asarray(out) == 1).all()
