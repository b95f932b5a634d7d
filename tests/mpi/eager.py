"""Eager collectives between processes, against NumPy. Each rank compares its own results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import collective_cases as cases

import jaxdist
from jaxdist.collectives.engine import Eager

ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size
compared = 0


def same(got: Any, want: Any, what: Any = "", exact: bool = True) -> None:
    global compared
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want), what
    for g, w in zip(got, want, strict=True):
        assert isinstance(g, jax.Array), (what, type(g))
        assert g.devices() == {jax.local_devices()[0]}, what
        w = np.asarray(w)
        assert (g.dtype, g.shape) == (w.dtype, w.shape), (what, g.dtype, g.shape, w.dtype, w.shape)
        if exact:
            g = np.asarray(g)
            assert g.tobytes() == w.tobytes(), (what, g, w)
        else:
            cases.compare(g, w, what)
        compared += 1


def fails(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    global compared
    with pytest.raises(kind) as raised:
        call()
    assert all(word in str(raised.value) for word in words), raised.value
    compared += 1


def acceptance() -> None:
    """The values of the specification."""
    mine = np.full((4, 4), R + 1, np.float32)
    whole = lambda value: np.full((4, 4), value, np.float32)
    ones = range(1, N + 1)
    values: dict[Any, float] = {
        "sum": sum(ones), "prod": math.prod(ones), "min": 1, "max": N, "avg": (N + 1) / 2,
    }  # fmt: skip
    for op, value in values.items():
        same(jaxdist.allreduce(mine, op), whole(value), op)
        same(jaxdist.reduce(mine, 0, op), whole(value) if R == 0 else mine, op)
        same(jaxdist.reduce(mine, N - 1, op), whole(value) if R == N - 1 else mine, op)
    assert (mine == R + 1).all()  # never overwritten
    x = jnp.asarray(mine)
    same(jaxdist.allreduce([x, -x], "sum"), [whole(values["sum"]), whole(-values["sum"])])
    same(jaxdist.allreduce([x, -x], "min"), [whole(1), whole(-N)])
    if N == 4:
        same(jaxdist.allreduce(x, groups=[[1, 2, 3]]), whole(9 if R else 1))
        pair = np.concatenate([whole(3), whole(1)])
        same(jaxdist.allgather(x, groups=[[2, 0]]), pair if R in (0, 2) else whole(R + 1))
        same(jaxdist.broadcast(x, 1, groups=[[3, 2], [0, 1]]), whole(3 if R > 1 else 2))
    rows = np.full((2 * N, 4), R, np.float32)
    same(jaxdist.reduce_scatter(rows, "sum"), np.full((2, 4), sum(range(N)), np.float32))
    fails(lambda: jaxdist.reduce_scatter(np.zeros((5, 4))), ValueError, "dimension 0 has size 5", f"{N} ranks")
    blocks = [np.full((2, 4), R * N + d, np.float32) for d in range(N)]
    got = jaxdist.all_to_all(np.concatenate(blocks, 1), 1, 0)
    same(got, np.concatenate([np.full((2, 4), s * N + R, np.float32) for s in range(N)], 0))
    same(jaxdist.gather(x, 0), np.concatenate([whole(i) for i in ones]) if R == 0 else mine)
    same(jaxdist.scatter(np.arange(2 * N) + 10 * R, 1), np.arange(2 * R, 2 * R + 2) + 10)
    other = R ^ 1
    if other < N:  # both send first: a send does not wait
        jaxdist.send(x, other)
        same(x + jaxdist.recv(x, other), whole(R + other + 2))
        jaxdist.send({"a": x, "b": 2}, other)
        like = {"a": jax.ShapeDtypeStruct((4, 4), "float32"), "b": 0}
        same(jaxdist.recv(like, other), {"a": whole(other + 1), "b": 2})
    jaxdist.send([3.5], R)
    same(jaxdist.recv([0.0], R), [3.5])
    same(jaxdist.permute(x, [(0, 1)]), whole(1 if R == 1 else 0))
    same(jaxdist.allgather([R, R + 0.5, bool(R)]), [np.arange(N), np.arange(N) + 0.5, np.arange(N) > 0])
    replicated = jax.device_put(1.0)
    same(jaxdist.allreduce((replicated, [], None, {})), (np.asarray(float(N)), [], None, {}))
    loss = jaxdist.data_parallel(lambda x: x.mean())(np.ones(2))
    fails(lambda: jaxdist.allreduce({"loss": loss}), ValueError, "is of the whole batch already")
    same(jaxdist.allreduce({"loss": loss}, "avg"), {"loss": np.asarray(1.0)})
    jaxdist.barrier()


def random_calls(examples: int = 150) -> None:
    """The same on every rank; each of a tree whose leaves are of several types and layouts."""
    rng = np.random.default_rng(N)
    for example in range(examples):
        call = cases.random_call(rng, N, eager=True)
        leaves = [call | {"dtype": str(d)} for d in rng.choice(cases.dtypes(call, eager=True), rng.integers(1, 4))]
        everyone = [cases.data(leaf, rng, N) for leaf in leaves]
        mine: list[Any] = [xs[R] for xs in everyone]
        if example % 3 == 0:
            mine = [jnp.asarray(x) for x in mine]
        elif example % 3 == 1:
            mine = [np.asarray(x, order="F") for x in mine]
        got = cases.apply(call, tuple(mine))
        for leaf, out, xs in zip(leaves, got, everyone, strict=True):
            want = np.asarray(cases.expected(leaf, list(xs))[R])
            exact = "op" not in call or not jnp.issubdtype(want.dtype, jnp.inexact)
            same(out, want, (example, leaf), exact=exact)


def details() -> None:
    x = np.full(3, np.nan, np.float32) if R == 1 else np.arange(3, dtype=np.float32)
    for op in ("min", "max", "sum"):
        assert np.isnan(np.asarray(jaxdist.allreduce(x, op))).all()  # MPI's own min and max lose them
    # float16 in float32: 2048 + 1 + 1 + ... is 2048 in float16
    one = np.asarray(2048.0 if R == 0 else 1.0, np.float16)
    same(jaxdist.allreduce(one), np.asarray(2048 + N - 1, np.float16))
    odd = 2**24 + 1  # in a buffer of float32 it would lose its last bit
    whole, half = jaxdist.allreduce([np.int32(odd), np.float32(0.5)])
    same(whole, np.asarray(odd * N, np.int32))
    same(half, np.asarray(0.5 * N, np.float32))
    same(jaxdist.allreduce(np.int8(100)), np.asarray(100 * N).astype(np.int8))  # wraps, as NumPy's does
    same(jaxdist.allreduce(np.int8(100), "avg"), np.asarray(100.0, jnp.mean(jnp.int8([1])).dtype))
    same(jaxdist.allreduce(np.ones(2, jnp.float8_e4m3fn)), np.full(2, N).astype(jnp.float8_e4m3fn))
    fails(lambda: jaxdist.allreduce(1, groups=[[0], [N]]), ValueError, f"rank {N}", "out of range")
    fails(lambda: jaxdist.broadcast(1, N), ValueError, f"root={N}", f"0..{N - 1}")
    fails(lambda: jaxdist.reduce(1, 1, groups=[[0], [1]]), ValueError, "root=1", "every group")
    fails(lambda: jaxdist.all_to_all(np.ones((N, N + 1)), 1), ValueError, "dimension 1", str(N + 1), f"{N} ranks")
    fails(lambda: jaxdist.scatter(np.ones(N + 1)), ValueError, "dimension 0")
    fails(lambda: jaxdist.send(1, N), ValueError, f"dst={N}")
    # an array of all processes, as a step's state is
    mesh = jaxdist.get_context().mesh
    state = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P()), np.arange(3.0))
    same(jaxdist.allreduce(state, "max"), np.arange(3.0))
    batch = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P("data")), np.arange(3.0))
    fails(lambda: jaxdist.allreduce(batch), TypeError, "spread over")
    # results live on when the memory of others is used again
    kept = [(i, jaxdist.allreduce(np.full(100_000, float(i)))) for i in range(20)]
    views = [(i, np.asarray(jaxdist.allreduce(np.full(100_000, -float(i))))) for i in range(20)]
    donated = [jax.jit(lambda x: x + 1, donate_argnums=0)(jaxdist.allreduce(np.full(100_000, 1.0))) for _ in range(20)]
    for i, out in kept:
        assert (np.asarray(out) == i * N).all(), i
    for i, view in views:
        assert (view == -i * N).all(), i
    assert all((np.asarray(d) == N + 1).all() for d in donated)


def gradients() -> None:
    """Of the sum over ranks of a function of each result, against finite differences of that sum."""
    rng = np.random.default_rng(5)
    everyone = rng.normal(size=(N, 2 * N, N))
    weights = rng.normal(size=(N, 64 * N * N))
    ring = [(i, (i + 1) % N) for i in range(N - 1)]
    groups = [[1, 0]]
    calls: dict[str, Callable[[Any], Any]] = {
        "sum": lambda x: jaxdist.allreduce(x),
        "avg": lambda x: jaxdist.allreduce(x, "avg"),
        "sum in groups": lambda x: jaxdist.allreduce(x, groups=groups),
        "allgather": lambda x: jaxdist.allgather(x, 1),
        "allgather of a scalar": lambda x: jaxdist.allgather(x[0, 0]),
        "reduce_scatter": lambda x: jaxdist.reduce_scatter(x, axis=1),
        "reduce_scatter avg in groups": lambda x: jaxdist.reduce_scatter(x, "avg", groups=groups),
        "allgather in groups": lambda x: jaxdist.allgather(x, -1, groups=groups),
        "all_to_all": lambda x: jaxdist.all_to_all(x, 0, 1),
        "all_to_all in groups": lambda x: jaxdist.all_to_all(x, -2, 1, groups=groups),
        "permute": lambda x: jaxdist.permute(x, ring),
        "of a tree": lambda x: jaxdist.allreduce({"a": x, "n": 3})["a"],
    }
    for name, call in calls.items():

        def loss(x: Any, call: Any = call) -> Any:
            out = jnp.sin(call(x))
            return jnp.sum(out.reshape(-1) * weights[R, : out.size])

        mine = jnp.asarray(everyone[R])
        gradient = np.asarray(jax.grad(loss)(mine))
        for owner in (0, N - 1):
            for at in ((0, 0), (N, N - 1)):
                step = np.zeros_like(everyone[0])
                step[at] = 1e-5 * (owner == R)
                change = jaxdist.allreduce(loss(mine + step) - loss(mine - step)) / 2e-5
                if owner == R:
                    np.testing.assert_allclose(gradient[at], change, 1e-6, 1e-8, err_msg=name)
        global compared
        compared += 1
    fails(lambda: jax.grad(lambda x: jaxdist.allreduce(x, "max"))(1.0), TypeError, "jax.grad")


def mismatches() -> None:
    """The calls of rank 1 are others: every rank learns both sides, and the job goes on."""
    odd = R == 1
    where = "0" if N == 2 else "0, " + ", ".join(str(i) for i in range(2, N))
    x = np.ones((4, 3), np.float32)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, ...]]] = {
        "shape": (lambda: jaxdist.allreduce(x), lambda: jaxdist.allreduce(x[:2]),
                  (f"x is float32[4,3] on rank {where}; float32[2,3] on rank 1",)),
        "dtype": (lambda: jaxdist.allreduce({"w": x}), lambda: jaxdist.allreduce({"w": x.astype(int)}),
                  (f"x['w'] is float32[4,3] on rank {where}; int64[4,3] on rank 1",)),
        "op": (lambda: jaxdist.allreduce(x), lambda: jaxdist.allreduce(x, "max"),
               (f"allreduce(op='sum') on rank {where}; allreduce(op='max') on rank 1",)),
        "kind": (lambda: jaxdist.allgather(x), lambda: jaxdist.barrier(),
                 (f"allgather(axis=0) on rank {where}; barrier() on rank 1",)),
        "length": (lambda: jaxdist.allreduce([x, x]), lambda: jaxdist.allreduce([x]),
                   (f"x[1] is float32[4,3] on rank {where}; absent on rank 1",)),
        "groups": (lambda: jaxdist.allreduce(x), lambda: jaxdist.allreduce(x, groups=[[0, 1]]),
                   ("groups=((0, 1),)) on rank 1",)),
        "root": (lambda: jaxdist.broadcast(x, 0), lambda: jaxdist.broadcast(x, 1), ("root=0", "root=1")),
        "a bad call on one rank": (lambda: jaxdist.allreduce(x), lambda: jaxdist.allreduce("text"),
                                   ("x is 'text', not an array",)),
    }  # fmt: skip
    for name, (theirs, mine, words) in pairs.items():
        kind = TypeError if odd and "bad" in name else ValueError
        fails(mine if odd else theirs, kind, "rank 1", *words)
        same(jaxdist.allreduce(1), np.asarray(N), name)
    if R == 0:
        jaxdist.send(x, 1)
        jaxdist.send(x[:2], 1)
        fails(lambda: jaxdist.send(object(), 1), TypeError, "not an array")
        jaxdist.send(x + 1, 1)
    elif R == 1:
        fails(lambda: jaxdist.recv(x.T, 0), ValueError, "float32[3,4]", "float32[4,3]", "rank 0")
        fails(lambda: jaxdist.recv(x, 0), ValueError, "float32[4,3]", "float32[2,3]")
        fails(lambda: jaxdist.recv(x, 0), ValueError, "failed there", "not an array")
        same(jaxdist.recv(x, 0), x + 1)
    same(jaxdist.allreduce(1), np.asarray(N))


def skew(seconds: float) -> None:
    """One rank after the other is late."""
    global compared
    for late in range(2):
        for call in (jaxdist.allreduce, jaxdist.reduce_scatter):
            if late == R:
                time.sleep(seconds)
            assert float(np.asarray(call(np.ones(12 * 2**15)))[0]) == N
            compared += 1


def away(folder: str) -> None:
    """Over MPI a rank waited for ever, in most of such runs, to hear that its last segments had arrived."""
    global compared
    x = jnp.ones(1 << 24, jnp.float32)
    for i in range(40):
        done = Path(folder, f"through {i}")
        jax.block_until_ready(jaxdist.reduce_scatter(x))
        if R:
            done.touch()
        while not done.exists():  # away from MPI until the other rank is through as well
            time.sleep(0.001)
        compared += 1


def missing(how: str) -> None:
    """The last rank comes too late, or makes another call: the last part of a job, as calls no longer fit together."""
    eager: Any = ctx.only(Eager)
    eager.timeout = eager.wire._timeout = 2.0
    start = time.monotonic()
    jaxdist.allreduce(1)
    if N - 1 == R:
        if how == "elsewhere":
            time.sleep(1)
            fails(ctx.barrier, RuntimeError, "the ranks are in different calls")
            return
        time.sleep(4.5)
        fails(lambda: jaxdist.allreduce(2), RuntimeError, "not every rank came")
    else:
        member = ctx.control.members[N - 1]
        late = f"not there: rank {N - 1} ({member.host}, pid {member.pid})"
        there = f"rank {N - 1} at" if how == "elsewhere" else late
        fails(lambda: jaxdist.allreduce(np.ones(3)), RuntimeError, "allreduce(op='sum') of float64[3]", there)
        took = time.monotonic() - start
        assert took < 4, took


def reduce_scatters(loops: int, megabytes: float) -> None:
    """Large ones, exactly (gloo's own gives wrong data now and then, jax#40830)."""
    rows = int(megabytes * 2**20) // 4 // 1024 // N * N
    base = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024) % 1009  # small integers: sums are exact
    x = jnp.asarray(base * (R + 1))
    want = base[R * rows // N : (R + 1) * rows // N] * (N * (N + 1) // 2)
    for loop in range(loops):
        got = np.asarray(jaxdist.reduce_scatter(x))
        assert np.array_equal(got, want), (loop, np.flatnonzero(got != want)[:8])
    global compared
    compared += loops


def run(part: str, *arguments: Any) -> int:
    """One of the functions above; how much it has compared."""
    global compared
    compared = 0
    globals()[part](*arguments)
    return compared
