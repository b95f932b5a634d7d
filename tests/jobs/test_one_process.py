"""Collectives of one process alone, and in a step over its virtual devices, against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import collectives as calls
from harness.check import compare, mesh
from harness.errors import raises
from jax.sharding import PartitionSpec as P

import jaxdist

X = np.arange(8, dtype=np.float32).reshape(4, 2)
ALONE = {
    "allreduce": lambda x: jaxdist.allreduce(x, "max"), "allgather": lambda x: jaxdist.allgather(x, axis=-1),
    "reduce_scatter": lambda x: jaxdist.reduce_scatter(x, "prod", axis=1), "gather": jaxdist.gather,
    "broadcast": lambda x: jaxdist.broadcast(x, groups=[[0]]), "scatter": jaxdist.scatter,
    "reduce": lambda x: jaxdist.reduce(x, op="min", groups=[]), "all_to_all": lambda x: jaxdist.all_to_all(x, 1, 0),
}  # fmt: skip


def test_one_process_gets_its_own() -> None:
    """No result is a view of the caller's memory; types are those of several processes."""
    for call in ALONE.values():
        x = X.copy()
        out = call({"a": x, "b": [jnp.asarray(x)]})
        x[:] = -1
        compare(out, {"a": jnp.asarray(X), "b": [jnp.asarray(X)]})
    for dtype in ("bool", "int8", "uint32", "bfloat16", "complex64"):
        x = jnp.ones(2, dtype)
        assert jaxdist.allreduce(x, "avg").dtype == jnp.mean(x).dtype
        assert jaxdist.allreduce(x, "sum").dtype == x.dtype
    x = X.copy()
    jaxdist.send({"a": x}, 0)
    x[:] = 0
    compare(jaxdist.recv({"a": x}, 0), {"a": jnp.asarray(X)})


def deleted() -> jax.Array:
    (x := jnp.ones(2)).delete()
    return x


REFUSED: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    (lambda: jaxdist.allreduce(X, "mean"), ValueError, ("'mean'", "sum, prod, min, max, avg")),  # type: ignore[arg-type]
    (lambda: jaxdist.allreduce(X + 1j, "min"), TypeError, ("complex",)),
    (lambda: jaxdist.allreduce(X, groups=[[0, 0]]), ValueError, ("[[0, 0]]", "once")),
    (lambda: jaxdist.allreduce(X, groups=[[1]]), ValueError, ("[[1]]", "0..0")),
    (lambda: jaxdist.allreduce(X, groups=[0]), ValueError, ("lists of ranks",)),  # type: ignore[list-item]
    (lambda: jaxdist.gather(X, root=1), ValueError, ("root=1",)),
    (lambda: jaxdist.allgather([X, 1.0], axis=1), ValueError, ("x[1]", "axis 1")),
    (lambda: jaxdist.scatter(1.0), ValueError, ("dimension",)),
    (lambda: jaxdist.broadcast("text"), TypeError, ("'text'",)),
    (lambda: jaxdist.broadcast(jax.random.key(0)), TypeError, ("key_data",)),
    (lambda: jaxdist.allreduce([1, 2**70]), TypeError, ("rank 0", "x[1]", "int")),
    (lambda: jaxdist.allreduce(np.ma.masked_equal([1, 2], 2)), TypeError, ("mask", "filled")),
    (lambda: jaxdist.broadcast({"w": deleted()}), TypeError, ("x['w']", "deleted")),
    (lambda: jaxdist.broadcast(X.astype(">f4")), TypeError, (">f4",)),
    (lambda: jax.jit(jaxdist.allgather)(X), TypeError, ("jax.jit",)),
    (lambda: jax.grad(jaxdist.allreduce)(1.0), TypeError, ("jax.grad",)),
    (lambda: jaxdist.send(X, 1), ValueError, ("dst=1",)),
    (lambda: jaxdist.recv(X, 0), ValueError, ("nothing was sent",)),
]


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_bad_arguments(row: int) -> None:
    call, kind, tokens = REFUSED[row]
    with raises(kind, *tokens):
        call()


# --- in a step, over virtual devices


def on_each(f: Any, n: int, *stacked: Any) -> list[Any]:
    """What `f` makes of each device's own of the stacked values, by device."""
    step = jaxdist.data_parallel(calls.on_own(f), mesh=mesh(n))
    out = jax.tree.map(np.asarray, step(*stacked))
    return [jax.tree.map(lambda y, d=d: y[d], out) for d in range(n)]


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_in_a_step(seed: int) -> None:
    n, rng = 8, np.random.default_rng(seed)
    chosen = [calls.random_call(rng, n) for _ in range(14)]
    xs = [calls.data(call, rng, n) for call in chosen]
    got = on_each(lambda xs: [calls.apply(call, x) for call, x in zip(chosen, xs, strict=True)], n, xs)
    wants = jax.jit(lambda xs: [calls.expected(call, list(x)) for call, x in zip(chosen, xs, strict=True)])(xs)
    for device, outs in enumerate(got):
        for out, want in zip(outs, wants, strict=True):
            compare(out, np.asarray(want[device]), 1e-6 if out.dtype.itemsize > 2 else 0.02)


IN_GROUPS: dict[str, calls.Call] = {
    "allreduce prod": {"kind": "allreduce", "op": "prod"},
    "avg in groups": {"kind": "allreduce", "op": "avg", "groups": [[0, 2], [1, 3]]},
    "allgather in groups": {"kind": "allgather", "groups": [[3, 0], [1, 2]]},
    "reduce_scatter avg": {"kind": "reduce_scatter", "op": "avg", "groups": [[3, 0], [1, 2]]},
    "all_to_all": {"kind": "all_to_all", "split_axis": 0, "concat_axis": 1},
    "broadcast": {"kind": "broadcast", "root": 2},
    "reduce": {"kind": "reduce", "root": 1},
    "scatter": {"kind": "scatter", "root": 3},
}


def test_gradients_are_those_of_one_program() -> None:
    n, rng = 4, np.random.default_rng(3)
    xs = rng.normal(size=(n, 4, 4))
    p = {name: jnp.asarray(rng.normal(size=(4, 4))) for name in IN_GROUPS}
    local = lambda y, x: jnp.sum(jnp.sin(y) * x.sum()) + jnp.sum(y**2)

    def one_program(p: Any) -> Any:
        every = {name: calls.expected(call, [jnp.tanh(p[name] * x) for x in xs]) for name, call in IN_GROUPS.items()}
        return sum(local(y, x) for ys in every.values() for y, x in zip(ys, xs, strict=True)) / n

    def one(p: Any, x: Any) -> Any:
        ys = [calls.apply(call, jnp.tanh(p[name] * x[0])) for name, call in IN_GROUPS.items()]
        return jnp.stack([local(y, x[0]) for y in ys]).sum(keepdims=True)

    each = jaxdist.per_device(one, (P(), P("data")), P("data"))
    step = jaxdist.data_parallel(
        lambda p, x: (jax.grad(lambda p: each(p, x).mean())(p), 0), mesh=mesh(n), batch_argnums="x"
    )
    compare(jax.tree.map(jnp.asarray, jaxdist.unshard(step(p, xs)[0])), jax.jit(jax.grad(one_program))(p))


IN_A_STEP: list[tuple[Any, tuple[str, ...]]] = [
    (lambda x: jaxdist.allreduce(x, "mean"), ("'mean'",)),  # type: ignore[arg-type]
    (lambda x: jaxdist.broadcast(x, 8), ("root=8",)),
    (lambda x: jaxdist.allreduce(x, groups=[[0, 1], [1, 2]]), ("once",)),
    (lambda x: jaxdist.reduce_scatter(x[0]), ("size 3", "8")),
    (lambda x: jaxdist.allgather(x, groups=[[0, 1], [2]]), ("one size",)),
    (lambda x: jaxdist.allreduce(x, groups=[[0, 1], [2, 3]]), ("every device",)),
    (lambda x: jaxdist.send(x, 1), ("ppermute",)),
]


def test_bad_arguments_in_a_step() -> None:
    for call, tokens in IN_A_STEP:
        with raises((ValueError, TypeError, RuntimeError), *tokens):
            jaxdist.data_parallel(jaxdist.per_device(call, P("data"), P("data")))(np.ones((8, 3)))
    outside: list[Any] = [*ALONE.values(), lambda x: [jaxdist.barrier(), x][1]]
    for call in outside:
        with raises(jaxdist.StepError, "jaxdist.per_device"):
            jaxdist.data_parallel(lambda s, x, call=call: (s, jnp.sum(call(x))))(jnp.zeros(()), np.ones((8, 8)))
