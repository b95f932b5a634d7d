"""Collectives between processes, in a step and outside of one: each rank compares its own result with NumPy's."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import collectives as calls
from catalogue import moves as ways
from harness.check import compare
from harness.errors import raises
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist

ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size
EPS = 1e-6  # of sums in other orders


def tolerance(dtype: Any) -> float:
    return float(4 * jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def same(got: Any, want: Any, within: float = 0.0) -> None:
    """Results of an eager collective: on this process's device, of these types, to the bit unless it is said."""
    assert {x.devices() == {jax.local_devices()[0]} for x in jax.tree.leaves(got)} == {True}
    compare(got, jax.tree.map(np.asarray, want), within)


# --- eager


def numbers() -> None:
    """What each call gives, written by hand."""
    mine, ones = np.full((4, 4), R + 1, np.float32), range(1, N + 1)
    whole = lambda value: np.full((4, 4), value, np.float32)
    for op, value in {"sum": sum(ones), "prod": math.prod(ones), "min": 1, "max": N, "avg": (N + 1) / 2}.items():
        given: Any = op
        same(jaxdist.allreduce(mine, given), whole(value))
        same(jaxdist.reduce(mine, N - 1, given), whole(value) if R == N - 1 else mine)
    assert (mine == R + 1).all()  # never overwritten
    x, other = jnp.asarray(mine), R ^ 1
    same(jaxdist.allreduce([x, -x], "min"), [whole(1), whole(-N)])
    same(jaxdist.allreduce((jax.device_put(1.0), [], None)), (np.asarray(float(N)), [], None))
    if N == 4:
        same(jaxdist.allreduce(x, groups=[[1, 2, 3]]), whole(9 if R else 1))
        same(jaxdist.allreduce(x, "avg", groups=[[0, 1], [2, 3]]), whole(1.5 if R < 2 else 3.5))
        same(jaxdist.broadcast(x, 1, groups=[[3, 2], [0, 1]]), whole(3 if R > 1 else 2))
        pair = np.concatenate([whole(3), whole(1)])
        same(jaxdist.allgather(x, groups=[[2, 0]]), pair if R in (0, 2) else whole(R + 1))
    same(jaxdist.reduce_scatter(np.arange(2.0 * N) + R), np.arange(2.0 * R, 2 * R + 2) * N + sum(range(N)))
    blocks = [np.full((2, 4), R * N + to, np.float32) for to in range(N)]
    came = [np.full((2, 4), source * N + R, np.float32) for source in range(N)]
    same(jaxdist.all_to_all(np.concatenate(blocks, 1), 1, 0), np.concatenate(came, 0))
    same(jaxdist.gather(x, 0), np.concatenate([whole(i) for i in ones]) if R == 0 else mine)
    same(jaxdist.allgather([R, bool(R)]), [np.arange(N), np.arange(N) > 0])
    same(jaxdist.allgather(R, groups=[list(range(N))[::-1]]), np.arange(N)[::-1])
    same(jaxdist.scatter(np.arange(2 * N) + 10 * R, 1), np.arange(2 * R, 2 * R + 2) + 10)
    if other < N:  # both send first: a send does not wait
        jaxdist.send({"a": x, "b": 2}, other)
        like = {"a": jax.ShapeDtypeStruct((4, 4), "float32"), "b": 0}
        same(jaxdist.recv(like, other), {"a": whole(other + 1), "b": 2})
    jaxdist.send([3.5], R)
    same(jaxdist.recv([0.0], R), [3.5])
    jaxdist.barrier()


def random_calls(examples: int) -> None:
    """The same on every rank; each of a tree whose leaves are of several types and layouts."""
    rng = np.random.default_rng(N)
    layouts: list[Callable[[Any], Any]] = [jnp.asarray, lambda x: np.asarray(x, order="F"), lambda x: x]
    for example in range(examples):
        call = calls.random_call(rng, N, eager=True)
        leaves = [call | {"dtype": str(d)} for d in rng.choice(calls.dtypes(call), rng.integers(1, 4))]
        everyone = [calls.data(leaf, rng, N) for leaf in leaves]
        got = calls.apply(call, tuple(layouts[example % 3](xs[R]) for xs in everyone))
        for leaf, out, xs in zip(leaves, got, everyone, strict=True):
            same(out, calls.expected(leaf, list(xs))[R], tolerance(out.dtype) if "op" in call else 0.0)


def details() -> None:
    """NaN, narrow types, state of a step, and memory that is used again."""
    x = np.full(3, np.nan, np.float32) if R == 1 else np.arange(3, dtype=np.float32)
    for large in (x, np.resize(x, 1_200_000)):
        for op in ("min", "max", "sum"):
            assert np.isnan(np.asarray(jaxdist.allreduce(large, op))).all()
    sixteen = np.asarray(2048.0 if R == 0 else 1.0, np.float16)  # in float16, 2048 + 1 is 2048
    same(jaxdist.allreduce(sixteen), np.asarray(2048 + N - 1, np.float16))
    odd = 2**24 + 1  # in a buffer of float32 it would lose its last bit
    same(jaxdist.allreduce([np.int32(odd), np.float32(0.5)]), [np.int32(odd * N), np.float32(0.5 * N)])
    same(jaxdist.allreduce(np.int8(100)), np.asarray(100 * N).astype(np.int8))  # wraps, as NumPy's does
    assert np.signbit(jaxdist.broadcast(np.float32(-0.0 if R == 1 else 1.0), 1))
    for dtype, bits in (("bfloat16", "uint16"), ("float8_e5m2", "uint8")):
        every = np.arange(-N * 64, 0).astype(bits)  # NaN
        got = jaxdist.gather(np.split(every, N)[R].view(jnp.dtype(dtype)))
        np.testing.assert_array_equal(np.asarray(got).view(bits), np.split(every, N)[R] if R else every)
    state = jax.make_array_from_process_local_data(jax.NamedSharding(ctx.mesh, P()), np.arange(3.0))
    same(jaxdist.allreduce(state, "max"), np.arange(3.0))
    kept = [(i, jaxdist.allreduce(np.full(100_000, float(i)))) for i in range(20)]
    views = [(i, np.asarray(jaxdist.allreduce(np.full(100_000, -float(i))))) for i in range(20)]
    donated = [jax.jit(lambda x: x + 1, donate_argnums=0)(jaxdist.allreduce(np.full(100_000, 1.0))) for _ in range(9)]
    assert all((np.asarray(out) == i * N).all() for i, out in kept)
    assert all((view == -i * N).all() for i, view in views)
    assert all((np.asarray(d) == N + 1).all() for d in donated)


def moves(*dtypes: str) -> None:
    """Every bit arrives: in steps, on each device, and between processes."""
    kinds = ("broadcast", "allgather", "all_to_all", "scatter")
    called: list[calls.Call] = [{"kind": kind, **MOVED_ALONG.get(kind, {})} for kind in kinds]
    gather, trade = (lambda x: lax.all_gather(x, "data")), (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True))
    xs = {dtype: ways.fragile(dtype, 12 * N) for dtype in dtypes}
    parts, way = {dtype: x.reshape(N, -1, 4) for dtype, x in xs.items()}, ways.every(ways.SENT)
    step = lambda w, b: {dtype: way(w[dtype], b[dtype]) for dtype in dtypes}
    own = {dtype: x[R] for dtype, x in parts.items()}
    got = jaxdist.unshard(jaxdist.data_parallel(step, batch_argnums=1)(jaxdist.shard(xs), own))
    assert ways.changed(got, jax.jit(step)(xs, xs)) == []
    want = {dtype: [calls.expected(call, list(x))[R] for call in called] for dtype, x in parts.items()}
    assert ways.changed({dtype: [calls.apply(call, x) for call in called] for dtype, x in own.items()}, want) == []
    each = lambda x: [*(calls.apply(c, x) for c in called), *(way(x) for way in (gather, trade, ring))]
    jaxs = {d: [x, want[d][kinds.index("all_to_all")], x[R - 1]] for d, x in parts.items()}
    assert ways.changed(on_each(lambda xs: {d: each(xs[d]) for d in dtypes}, parts), {
        dtype: [*want[dtype], *jaxs[dtype]] for dtype in dtypes
    }) == []  # fmt: skip


MOVED_ALONG = {"broadcast": {"root": 1}, "all_to_all": {"split_axis": 0, "concat_axis": 0}, "scatter": {"root": 1}}


def reductions(length: int) -> None:
    """What each dtype does with overflow, infinities and NaN, as one device does; long arrays take other paths."""
    dtypes = [*calls.INTS[:6], *calls.FLOATS, *calls.COMPLEX, "bool"]
    xs = {dtype: calls.extremes(dtype, N, length) for dtype in dtypes}
    taken = {d: [op for op in calls.REDUCTIONS if d not in calls.COMPLEX or op in ("sum", "prod")] for d in dtypes}
    step = lambda xs: {d: {op: calls.REDUCTIONS[op](xs[d]) for op in ops} for d, ops in taken.items()}
    want, own = jax.jit(step)(xs), {d: x[R : R + 1] for d, x in xs.items()}
    compare(jaxdist.unshard(jaxdist.data_parallel(step, batch_argnums=0)(own)), want, EPS)
    reduced: Any = jaxdist.allreduce
    for d, ops in taken.items():
        compare({op: reduced(xs[d][R], op) for op in ops if op in calls.OPS},
                {op: want[d][op] for op in ops if op in calls.OPS}, EPS)  # fmt: skip
    inner = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
    jaxs = lambda d: [op for op in inner if op in taken[d] and d != "bool"]
    got = on_each(lambda xs: {d: {op: inner[op](xs[d], "data") for op in jaxs(d)} for d in dtypes}, xs)
    compare(got, {d: {op: want[d][op] for op in jaxs(d)} for d in dtypes}, EPS)


def guarded() -> None:
    """Nothing is moved implicitly: not on the way to the mesh, not in connecting to others."""
    w, b = jnp.ones((7, 3)), jnp.full((2, 7), R + 1.0)
    with jax.transfer_guard("disallow"):
        got = jaxdist.unshard(jaxdist.data_parallel(lambda w, b: (w, b @ w))(jaxdist.shard(w), b))
        back = jaxdist.allgather(jaxdist.broadcast(b, 0))
    compare(got, (w, jnp.repeat(jnp.arange(1.0, N + 1) * 7, 6).reshape(-1, 3)))
    compare(back, jnp.ones((2 * N, 7)))


def refused() -> None:
    """The calls of rank 1 are others, or all are wrong: every rank is told, nothing is sent, and the job goes on."""
    x = np.ones((4, 3), np.float32)
    batch = jax.make_array_from_process_local_data(jax.NamedSharding(ctx.mesh, P("data")), np.arange(3.0))
    loss = jaxdist.data_parallel(lambda x: x.mean())(np.ones(2) + R)
    theirs: Any = lambda: jaxdist.allreduce(x)
    rows: list[tuple[Any, Any, type[Exception], tuple[str, ...]]] = [
        (theirs, lambda: jaxdist.allreduce(x[:2]), ValueError, ("float32[4,3]", "float32[2,3]", "rank 1")),
        (theirs, lambda: jaxdist.allreduce(x.astype(int)), ValueError, ("float32[4,3]", "int64[4,3]", "rank 1")),
        (theirs, lambda: jaxdist.allreduce(x, "max"), ValueError, ("sum", "max", "rank 1")),
        (theirs, jaxdist.barrier, ValueError, ("allreduce", "barrier", "rank 1")),
        (theirs, lambda: jaxdist.allreduce(x, groups=[[0, 1]]), ValueError, ("((0, 1),)", "rank 1")),
        (lambda: jaxdist.allreduce([x, x]), lambda: jaxdist.allreduce([x]), ValueError, ("x[1]", "absent", "rank 1")),
        (lambda: jaxdist.broadcast(x, 0), lambda: jaxdist.broadcast(x, 1), ValueError, ("root=0", "root=1", "rank 1")),
        (theirs, lambda: jaxdist.allreduce("text"), (TypeError if R == 1 else ValueError), ("'text'", "rank 1")),
        (lambda: jaxdist.allreduce(1, groups=[[0], [N]]), None, ValueError, (f"[[0], [{N}]]",)),
        (lambda: jaxdist.broadcast(1, N), None, ValueError, (f"root={N}",)),
        (lambda: jaxdist.reduce(1, 1, groups=[[0], [1]]), None, ValueError, ("root=1",)),
        (lambda: jaxdist.reduce_scatter(np.zeros((5, 4))), None, ValueError, ("5", f"by shard_count {N}")),
        (lambda: jaxdist.all_to_all(np.ones((N, N + 1)), 1), None, ValueError, (f"({N + 1})", f"({N})")),
        (lambda: jaxdist.send(1, N), None, ValueError, (f"dst={N}",)),
        (lambda: jaxdist.allreduce(batch), None, TypeError, ("x",)),
        (lambda: jaxdist.allreduce({"loss": loss}), None, ValueError, ("allreduce", "whole batch")),
    ]  # fmt: skip
    if ctx.communicator == "mpi":
        some = jnp.ones(N, jnp.int32)
        ragged = lambda x: lax.ragged_all_to_all(x, x * 0, some, some, some, some, axis_name="data")
        rows.append(
            (lambda: on_each(ragged, np.arange(4.0 * N).reshape(N, 4)), None, NotImplementedError, ("ragged", "'xla'"))
        )
    for call, mine, kind, tokens in rows:
        with raises(kind, *tokens):
            (mine if mine and R == 1 else call)()
        same(jaxdist.allreduce(1), np.asarray(N))
    if R == 0:
        with raises(TypeError, "not an array"):
            jaxdist.send(object(), 1)
        jaxdist.send(x, 1)
        jaxdist.send(x + 1, 1)
    elif R == 1:
        with raises(ValueError, "float32[3,4]", "float32[4,3]", "rank 0"):
            jaxdist.recv(x.T, 0)
        same(jaxdist.recv(x, 0), x + 1)


def large(loops: int, megabytes: float) -> None:
    """Sums in slices, exactly (gloo's own gives wrong data now and then, jax#40830); one rank after the other late."""
    rows = int(megabytes * 2**20) // 4 // 1024 // N * N
    base = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024) % 1009  # small integers: sums are exact
    x = jnp.asarray(base * (R + 1))
    want = base[R * rows // N : (R + 1) * rows // N] * (N * (N + 1) // 2)
    for loop in range(loops):
        time.sleep(0.3 * (loop == R))
        np.testing.assert_array_equal(jaxdist.reduce_scatter(x), want)


def away(folder: str) -> None:
    """Over MPI a rank once waited for ever to hear that its last segments had arrived."""
    x = jnp.ones(1 << 24, jnp.float32)
    for i in range(20):
        done = Path(folder, f"through {i}")
        jax.block_until_ready(jaxdist.reduce_scatter(x))
        if R:
            done.touch()
        while not done.exists():  # away from MPI until the other rank is through as well
            time.sleep(0.001)


def threads() -> None:
    """Two that train in turns, and collectives between their calls."""
    descend = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))(w)
    step = jaxdist.data_parallel(descend)
    batches = np.random.default_rng(0).normal(size=(20, 12, 300))
    ws = [jnp.full(300, 0.01), jnp.full(300, -0.01)]
    want, turns = list(ws), [threading.Semaphore(1), threading.Semaphore(0)]
    for x in batches:
        want = [descend(w, x) for w in want]

    def train(k: int) -> None:
        for i, x in enumerate(batches):
            turns[k].acquire()
            ws[k] = step(ws[k], x[R::N])
            if i % 7 == 3:
                jaxdist.allreduce(np.ones(3))
            turns[1 - k].release()

    running = [threading.Thread(target=train, args=(k,)) for k in (0, 1)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    jaxdist.check_sync(ws)
    compare(jaxdist.unshard(ws), want)


# --- in a step


def on_each(f: Any, *stacked: Any) -> Any:
    """This device's part of what a step returns, which calls `f` with each device's own of the stacked values."""
    step = jaxdist.data_parallel(calls.on_own(f))
    outs = step(*jax.tree.map(lambda x: x[R : R + 1], stacked))
    # XLA does not shard what is empty.
    return jax.tree.map(lambda y: np.asarray(y.addressable_data(0))[0] if y.size else np.empty(y.shape[1:]), outs)


def ring(x: Any) -> Any:
    return lax.ppermute(x, "data", [(i, (i + 1) % N) for i in range(N)])


def in_scan(x: Any) -> Any:
    """Before, inside and after a loop: one order on every rank."""

    def body(carry: Any, i: Any) -> Any:
        carry = carry + lax.psum(x * i, "data")
        return carry, lax.all_gather(carry, "data").sum(0)

    before = lax.pmax(x, "data")
    carry, ys = lax.scan(jax.checkpoint(body), jnp.zeros_like(x), jnp.arange(3, dtype=x.dtype))
    return before + carry + ys.sum(0) + lax.pmin(x, "data")


def in_while(x: Any) -> Any:
    total = lax.psum(jnp.abs(x).sum(), "data")
    more = lambda state: lax.psum(jnp.ones(()), "data") * state[0] < 5 * N
    return lax.while_loop(more, lambda s: (s[0] + 1, ring(s[1]) + lax.psum(s[1], "data") / total), (0.0, x))[1]


def in_cond(x: Any) -> Any:
    y = lax.cond(lax.pmax(x.max(), "data") > 0, lambda x: lax.psum(x, "data") + x, ring, x)
    scattered = lambda y: y * lax.psum_scatter(y, "data", tiled=True).sum()
    return lax.switch(jnp.asarray(2), [lambda y: y, ring, scattered], y)


FLOATS, INTS, FEW = [*calls.FLOATS, *calls.COMPLEX], calls.INTS, ["float32"]
EVERY = [*FLOATS, *calls.SMALL, *INTS, "bool"]
REAL = [d for d in EVERY if d not in (*calls.COMPLEX, "float8_e8m0fnu", "bool")]  # which has no zero to sum from
JAXS_OWN: list[tuple[Callable[[Any], Any], list[str]]] = [
    (lambda x: lax.psum(x, "data"), REAL + calls.COMPLEX),
    (lambda x: lax.pmean(x, "data"), FLOATS),
    (lambda x: lax.pmax(x, "data"), [*REAL, "bool"]),
    (lambda x: lax.pmin(x, "data"), REAL),
    (lambda x: sum(lax.psum((x, 2 * x, 3), "data")), ["float64"]),
    (lambda x: lax.all_gather(x, "data"), EVERY),
    (lambda x: lax.all_gather(x, "data", axis=1, tiled=True), ["float32", "bool"]),
    (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), EVERY),
    (lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True), FEW),
    (lambda x: lax.all_to_all(x.reshape(N, 2, -1), "data", 0, 1), FEW),
    (lambda x: lax.psum_scatter(x, "data", tiled=True), REAL + calls.COMPLEX),
    (lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), FEW),
    (lambda x: lax.psum_scatter(x.reshape(N, 2, -1), "data"), FEW),
    (ring, EVERY),
    (lambda x: x + lax.axis_index("data").astype(x.dtype), ["float64"]),
]  # fmt: skip
IN_CONTROL_FLOW: list[Callable[[Any], Any]] = [
    in_scan, in_while, in_cond, lambda x: (x + lax.axis_index("data").astype(x.dtype), in_while(x)),
    jax.grad(lambda x: jnp.sum(jnp.sin(ring(x)) * lax.psum_scatter(lax.all_gather(x, "data"), "data").sum())),
]  # fmt: skip


def of_jax(quick: bool = False) -> None:
    """Against `jax.vmap` with a named axis; all in one program, as most of the time goes into compiling."""
    rows = [(f, dtypes[:1] + dtypes[1:4:2] if quick else dtypes) for f, dtypes in JAXS_OWN]
    rng = np.random.default_rng(7)
    kinds = sorted({"float64"} | {dtype for _, dtypes in rows for dtype in dtypes})
    made = {d: rng.integers(0, 2 if d == "bool" else 6, (N, 2 * N, 3 * N)).astype(jnp.dtype(d)) for d in kinds}
    every = lambda xs: [{d: f(xs[d]) for d in dtypes} for f, dtypes in rows]
    for f in (every, *(lambda xs, f=f: f(xs["float64"]) for f in IN_CONTROL_FLOW)):
        want = jax.tree.map(lambda y: np.asarray(y)[R], jax.jit(jax.vmap(f, axis_name="data"))(made))
        compare(on_each(f, made), want, EPS)
    two = on_each(lambda x: lax.ppermute(x, "data", [(0, 1)]), made["float32"])  # vmap knows whole permutations only
    compare(two, made["float32"][0] if R == 1 else np.zeros_like(two))


def of_jaxdist(programs: int) -> None:
    """Random calls, against one device."""
    rng = np.random.default_rng(N)
    for _ in range(programs):
        chosen = [calls.random_call(rng, N) for _ in range(25)]
        xs = [calls.data(call, rng, N) for call in chosen]
        got = on_each(lambda xs, chosen=chosen: [calls.apply(c, x) for c, x in zip(chosen, xs, strict=True)], xs)
        wants = jax.jit(lambda xs, chosen=chosen: [calls.expected(c, list(x)) for c, x in zip(chosen, xs, strict=True)])
        for out, want in zip(got, wants(xs), strict=True):
            if out.size:
                compare(out, np.asarray(want[R]), tolerance(out.dtype))
            assert out.shape == want[R].shape


def of_every_dtype() -> None:
    """A step that sends numbers of every dtype."""
    w, b = calls.numbers(2 * N + 1), calls.numbers(2 * N)
    part = {d: x[2 * R : 2 * R + 2] for d, x in b.items()}
    got = jaxdist.data_parallel(calls.moved, batch_argnums=1)(jaxdist.shard(w), part)
    compare(jaxdist.unshard(got), jax.jit(calls.moved)(w, b))


def nan_in_a_step() -> None:
    """The extremes of infinities, zeros and NaN, as NumPy has them."""
    x = np.array([[1, -2, 0.0, np.inf, -np.inf, np.nan, -3, 5]] * N)
    x[:, 6] = np.where(np.arange(N) == N - 1, np.nan, -np.inf)
    x[:, 7] = np.arange(N) - 1
    x[:, 3] *= np.where(np.arange(N) == 0, 1, -1)
    xs = [x.astype(jnp.dtype(dtype)) for dtype in FLOATS[:4]]
    got = on_each(lambda xs: [[lax.pmax(x, "data"), lax.pmin(x, "data")] for x in xs], xs)
    with np.errstate(invalid="ignore"):
        compare(got, [[np.max(x, 0), np.min(x, 0)] for x in xs])


def too_long() -> None:
    """A message that is too long for an MPI call: all are, if a call may carry seven elements."""
    from jaxdist.communicators import mpi  # private: else it takes messages of 2 GiB

    with pytest.MonkeyPatch.context() as patch, raises(NotImplementedError, "8 elements", "communicator 'xla'"):
        patch.setattr(mpi, "MOST", 7)
        on_each(ring, np.arange(N * 8.0).reshape(N, 8))
