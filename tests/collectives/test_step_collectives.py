"""The collectives of `jaxdist` in a step's code for each device, on virtual devices, against one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import collective_cases as cases
from harness import parity
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


def test_acceptance_values() -> None:
    """The numbers of the specification, written by hand."""
    n = 4
    value = lambda r: np.full((4, 4), r, np.float32)
    names: list[Any] = ["sum", "prod", "min", "max", "avg"]
    right = {"sum": 10, "prod": 24, "min": 1, "max": 4, "avg": 2.5}

    def run(x: Any) -> Any:
        rows, blocks = jnp.tile(x[:2] - 1, (n, 1)), jnp.concatenate([(x[:2] - 1) * n + d for d in range(n)])
        return {
            **{op: jaxdist.allreduce(x, op) for op in names},
            **{f"{op} on 0": jaxdist.reduce(x, 0, op) for op in names},
            "tree": jnp.stack(jaxdist.allreduce([x, -x], "sum") + jaxdist.allreduce([x, -x], "min")),
            "allgather": jaxdist.allgather(x), "allgather 1": jaxdist.allgather(x, 1), "gather": jaxdist.gather(x, 0),
            "broadcast": jaxdist.broadcast(x, 0), "reduce_scatter": jaxdist.reduce_scatter(rows),
            "all_to_all": jaxdist.all_to_all(blocks, 0, 0),
            "pairs": jaxdist.allreduce(x, groups=[[0, 1], [2, 3]]), "three": jaxdist.allreduce(x, groups=[[1, 2, 3]]),
            "permute": jaxdist.permute(x, [(0, 1), (1, 0)]),
        }  # fmt: skip

    everyone = [value(r + 1) for r in range(n)]
    out = jaxdist.data_parallel(cases.on_each(run), mesh=parity.mesh(n))(np.stack(everyone))
    for d in range(n):
        want = {
            **{op: value(number) for op, number in right.items()},
            **{f"{op} on 0": value(number if d == 0 else d + 1) for op, number in right.items()},
            "tree": np.stack([value(10), value(-10), value(1), value(-4)]),
            "allgather": np.concatenate(everyone), "allgather 1": np.concatenate(everyone, 1),
            "gather": np.concatenate(everyone) * (d == 0), "broadcast": value(1), "reduce_scatter": np.full((2, 4), 6),
            "all_to_all": np.repeat([r * n + d for r in range(n)], 2)[:, None] * np.ones((1, 4)),
            "pairs": value([3, 3, 7, 7][d]), "three": value([1, 9, 9, 9][d]), "permute": value([2, 1, 0, 0][d]),
        }  # fmt: skip
        assert want.keys() == out.keys()
        for name, y in out.items():
            np.testing.assert_array_equal(y.addressable_shards[d].data[0], want[name], err_msg=name)


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


def test_gradients_are_those_of_one_program() -> None:
    n = 4
    rng = np.random.default_rng(3)
    xs = rng.normal(size=(n, 4, 4))
    p = {name: jnp.asarray(rng.normal(size=(4, 4))) for name in DIFFERENTIABLE}

    def local(y: Any, x: Any) -> Any:  # what a device makes of its result: its own weights, and not linear
        return jnp.sum(jnp.sin(y) * x.sum()) + jnp.sum(y**2)

    def one_program(p: Any) -> Any:
        total: Any = 0.0
        for name, call in DIFFERENTIABLE.items():
            ys = cases.expected(call, [jnp.tanh(p[name] * x) for x in xs])
            total += sum(local(y, x) for y, x in zip(ys, xs, strict=True)) / n
        return total

    def on_each(p: Any, x: Any) -> Any:
        ys = [cases.apply(call, jnp.tanh(p[name] * x[0])) for name, call in DIFFERENTIABLE.items()]
        return jnp.stack([local(y, x[0]) for y in ys]).sum(keepdims=True)

    @jaxdist.data_parallel(mesh=parity.mesh(n), donate=False)
    def step(p: Any, x: Any) -> Any:
        each = jaxdist.per_device(on_each, (P(), P("data")), P("data"))
        return jax.grad(lambda p: each(p, x).mean())(p), 0

    got, want = step(p, xs)[0], jax.jit(jax.grad(one_program))(p)
    for name in DIFFERENTIABLE:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-12, err_msg=name)


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


OUTSIDE: list[Any] = [
    jaxdist.allreduce, jaxdist.allgather, jaxdist.broadcast, jaxdist.reduce_scatter,
    lambda x: jaxdist.permute(x, [(0, 1)]), lambda x: jaxdist.all_to_all(x, 0, 0), lambda x: jaxdist.reduce(x, 0),
    lambda x: [jaxdist.barrier(), x][1], lambda x: jax.grad(lambda x: jnp.sum(jaxdist.allreduce(x)))(x),
]  # fmt: skip


@pytest.mark.parametrize("call", OUTSIDE)
def test_outside_of_per_device_they_are_an_error(call: Any) -> None:
    step = jaxdist.data_parallel(lambda s, x: (s, jnp.sum(call(x))))
    with pytest.raises(jaxdist.StepError, match=r"inside a step.*jaxdist\.per_device"):
        step(jnp.zeros(()), np.ones((8, 8)))
