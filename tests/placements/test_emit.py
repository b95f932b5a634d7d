"""Emitted programs: the ways in which a placement can make a result wrong, or slow, each with its test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import parity
from harness.steps import train_step
from jax import lax

import jaxdist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6))
W = jnp.asarray(RNG.normal(size=(6, 6)))
WAYS = [(4, 5), (8, 16)]
"""Devices, examples."""


def total(x: Any) -> Any:
    """A sum over the batch in its own dtype."""
    return lax.reduce(x, x.dtype.type(0), lax.add, (0,))


def product(x: Any) -> Any:
    """The same as a contraction."""
    return lax.dot_general(x, jnp.ones(x.shape[:1], x.dtype), (((0,), (0,)), ((), ())))


# --- what summands may pass

PASSES: dict[str, Callable[[Any, Any], Any]] = {
    "neg": lambda w, x: -x.sum(0),
    "sums of sums": lambda w, x: x.sum(0) + x[:, ::-1].sum(0) - (2 * x).sum(0),
    "a whole value counts once": lambda w, x: x.sum(0) + w[0] - w[1],
    "concatenated": lambda w, x: jnp.concatenate([x.sum(0), w[0], (x * x).sum(0)]),
    "updated": lambda w, x: jnp.zeros(6).at[2:4].set(x.sum(0)[:2]),
    "selected by a whole value": lambda w, x: jnp.where(w[0] > 0, x.sum(0), (x * x).sum(0)),
    "selected by the batch": lambda w, x: jnp.where(x.max() > 0, x.sum(0), w[0]),
    "selected by itself": lambda w, x: jnp.where(x.sum(0) > 0, x.sum(0), 0.0),
    "padded": lambda w, x: [jnp.pad(x.sum(0), 2), jnp.pad(x.sum(0), 2, constant_values=1.0)],
    "times a whole value": lambda w, x: x.sum(0) * w[0],
    "times a number": lambda w, x: [x.sum(0) * 0.3, x.sum(0) / 3.0, 3.0 / x.sum(0)],
    "by a whole value": lambda w, x: x.sum(0) / w[0],
    "times itself": lambda w, x: [x.sum(0) * x.sum(0), x.sum(0) ** 2, jnp.vdot(x.sum(0), x.sum(0))],
    "times the batch": lambda w, x: x * x.sum(0),
    "by zero": lambda w, x: [x.sum(0) / 0.0, x.sum(0) / (w[0] * 0), -x.sum(0) / (w[0] * 0)],
    "by infinity": lambda w, x: [x.sum(0) * jnp.inf, x.sum(0) * (jnp.inf * w[0]), x.sum(0) / jnp.inf],
    "contracted": lambda w, x: [x.sum(0) @ w, (x.T @ x) @ w, (x.T @ x) @ (x.T @ x)],
    "of several uses": lambda w, x: (lambda g: [g + 1, g @ w, jnp.sin(g), g.reshape(2, 3), g.sum()])(x.sum(0)),
    "reshaped": lambda w, x: jnp.broadcast_to((x.T @ x).T.reshape(4, 9)[None, :, ::-1], (2, 4, 9)),
    "not linear": lambda w, x: [jnp.abs(x.sum(0)), jnp.maximum(x.sum(0), 0), jnp.sort(x.sum(0)), jnp.exp(x.mean(0))],
    "rounded": lambda w, x: lax.reduce_precision(x.sum(0), 8, 7),
    "widened": lambda w, x: total(x.astype(jnp.float32)).astype(jnp.float64).round(3),
    "of complex numbers": lambda w, x: (lambda s: [s, s * 2, s.real, s * 1j, jnp.abs(s), s.conj()])(
        (x + 1j * x**2).sum(0)
    ),
}


INTEGERS: dict[str, Callable[[Any], Any]] = {
    "divided": lambda s: lax.div(s, jnp.full_like(s, 7)),
    "divided down": lambda s: s // 7,
    "remainder": lambda s: s % 7,
    "widened": lambda s: s.astype(jnp.int64),
    "to floats": lambda s: s.astype(jnp.float32),
    "narrowed": lambda s: s.astype(jnp.uint8),
    "times, minus": lambda s: s * 3 - 7,
    "negated": lambda s: -s,
    "squared": lambda s: s * s,
    "shifted": lambda s: s >> 1,
    "compared": lambda s: s > 40,
}


def integers(rows: int, *dtypes: str) -> list[Any]:
    return [np.random.default_rng(rows).integers(0, 120, (rows, 6)).astype(dtype) for dtype in dtypes]


HALVES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda s: s,
    "widened": lambda s: s.astype(jnp.float32),
    "scaled": lambda s: s * s.dtype.type(0.01),
    "divided": lambda s: s / s.dtype.type(100),
    "finite": lambda s: jnp.isfinite(s),
    "a branch": lambda s: lax.cond(jnp.isfinite(s).all(), lambda: 1, lambda: 2),
    "added": lambda s: (s + s) - s,
    "negated": lambda s: (-s).astype(jnp.float32),
    "with whole values": lambda s: jnp.concatenate([s, jnp.arange(3).astype(s.dtype)]) + jnp.ones(6, s.dtype),
}


def of_opposites(w: Any, batch: Any) -> Any:
    """Summands overflow; the sum is small, and so is what it is multiplied by on one device."""
    x, y = batch["half"], batch["single"].sum(0)
    return [x.sum(0), x.mean(0), product(x), y * w, y / w, y * 1e20, y / 1e-20]


def opposite(value: float, dtype: Any) -> Any:
    return np.repeat([value, -value], 8)[:, None].repeat(3, 1).astype(dtype)


def of_the_batch(_: Any, batch: Any) -> Any:
    x, y = batch
    return {
        "extremes": [f(x, axis=a) for f in (jnp.max, jnp.min, jnp.argmax, jnp.argmin) for a in (0, 1, None)],
        "cumulative": [lax.cummax(x, 0), lax.cummin(x, 0)],
        "sums": [x.sum(0), x.mean(), x.var(0)],
        "sorted": [jnp.sort(x, 0), jnp.argsort(x, 0), jnp.median(x, 0), jnp.nanmax(x, 0)],
        "products": [x.T @ y, y.T @ x, y @ y.T, x.prod(0)],
        "choices": [jnp.any(jnp.isnan(x)), jnp.all(x > 0, 0), jnp.isfinite(x).sum(0)],
        "norms": [jnp.linalg.norm(x, jnp.inf, 0), jnp.linalg.norm(x)],
    }


def with_value(value: float, rows: int) -> Any:
    """In the first example, one in the middle, and the last: of which padding is a copy."""
    x, y = RNG.normal(size=(rows, 3)), RNG.normal(size=(rows, 2))
    x[0, 0] = x[rows // 2, 1] = x[-1, 2] = value
    y[-1] = value, 0
    return x, y


def extremes(_: Any, xs: Any) -> Any:
    """No extremes of complex numbers in JAX's gradients of norms either: the derivative of one."""
    of_one = lambda x: [x.max(0), x.min(0), x.max(), x.argmax(0), jnp.any(x, 0), jnp.all(x, 0)]
    return list(map(of_one, xs)), jax.grad(lambda x: jnp.abs(x + 1j * x**2).max())(xs[-1])


NARROW = (np.int8, np.uint32, np.int64, np.float16, jnp.bfloat16, np.float32, np.float64)


def empty(w: Any, x: Any) -> Any:
    return [x[:0].sum(0), x[:, :0].sum(1), x[:, :0] @ w[:0], (x[:, :0]).T @ x, x[:0], w[:0].sum(0) + x.sum(0)]


def alike(w: Any, x: Any) -> Any:
    """Dimensions of the batch's size that are not the batch, and the other way round."""
    return [x @ w, w @ x, x + w, x * w[0], (x @ w).T @ w, w[:, 0] * x[:, 0], x.T + w, x.T + x, w.sum(0) + x.sum(0),
            jnp.stack([x, x.T]), w[x.argmax(0)], jnp.where(w > 0, x, w)]  # fmt: skip


def counted(_: Any, xs: Any) -> Any:
    return [x * jnp.arange(len(x), dtype=x.dtype)[:, None] for x in xs]


def made_of_nothing(w: Any, x: Any) -> Any:
    n = x.shape[0]
    grid = jnp.arange(n)[:, None] * jnp.ones(6)
    return [
        grid * x, grid.T @ x, grid.sum() * x, (x * jnp.eye(n, 6)).sum(0), jnp.tri(n) @ x,
        jnp.full((n, 6), w[0, 0]) * x,
        jnp.zeros_like(x).at[3].set(x[0]), jnp.flip(jnp.arange(n)) * x[:, 0], jnp.arange(n).reshape(-1, 1) + x,
        jnp.arange(6 * n).reshape(n, 6) * x, jnp.arange(6 * n).reshape(6, n).T * x, jnp.ones((n, n)), jnp.arange(n),
        jnp.broadcast_to(w[0], (n, 6)) * x, jnp.squeeze(jnp.arange(n)[:, None, None]) * x[:, 1],
    ]  # fmt: skip


TABLE, COLUMN, NUMBER = np.arange(12.0).reshape(2, 6), jnp.asarray(X[:, 0]), np.float32(0.3)


def closed_over(w: Any, x: Any) -> Any:
    noise = jax.random.normal(jax.random.key(3), x.shape)
    return [x @ (w * TABLE[0]), x[:, 0] * COLUMN, noise * x, x * NUMBER, TABLE]


passes = lambda w, x: {name: f(w, x) for name, f in PASSES.items()}
on_integers = lambda _, xs: [{name: [f(total(x)), f(product(x))] for name, f in INTEGERS.items()} for x in xs]
on_halves = lambda _, x: {name: f(product(x)) for name, f in HALVES.items()}
TRAPS: dict[str, tuple[Callable[[Any, Any], Any], Any, Any, int]] = {
    **{f"what summands pass, {rows}": (passes, W, RNG.normal(size=(rows, 6)), devices) for devices, rows in WAYS},
    "integers wrap": (on_integers, 0.0, integers(5, "uint8", "int32"), 4),
    "integers wrap, evenly": (on_integers, 0.0, integers(16, "int8", "uint16"), 8),
    # Whatever follows: a loss scaler must take the same branch.
    "a sum that overflows 16 bits": (on_halves, 0.0, np.full((96, 3), 1000, np.float16), 8),
    "a summand that overflows": (of_opposites, jnp.full(3, 1e20, jnp.float32), {
        "half": opposite(30000, np.float16), "single": opposite(2.0**99, np.float32)  # adds up exactly
    }, 2),
    "NaN, devices without any example": (of_the_batch, 0.0, with_value(np.nan, 9), 8),
    "infinity": (of_the_batch, 0.0, with_value(np.inf, 5), 4),
    "minus infinity": (of_the_batch, 0.0, with_value(-np.inf, 8), 2),
    "one example": (of_the_batch, 0.0, with_value(1.0, 1), 8),
    "extremes": (extremes, 0.0, [RNG.integers(0, 2, (13, 4)) > 0, *(
        RNG.integers(0, 100, (13, 4)).astype(dtype) for dtype in NARROW
    )], 8),
    "empty arrays on the way": (empty, W, X, 4),
    "sizes that look alike": (alike, jnp.asarray(RNG.normal(size=(16, 16))), RNG.normal(size=(16, 16)), 8),
    "counting in small floats": (counted, 0.0, [np.ones((4101, 2), jnp.dtype(d)) for d in ("float16", "bfloat16")], 4),
    **{f"made of nothing, {rows}": (made_of_nothing, W, RNG.normal(size=(rows, 6)), devices) for devices, rows in WAYS},
    "closed over": (closed_over, W, X, 8),
}  # fmt: skip
"""Functions of state and a batch, these, and devices."""


@pytest.mark.parametrize("name", TRAPS)
def test_as_on_one_device(name: str) -> None:
    f, w, x, devices = TRAPS[name]
    parity.check(f, w, x, devices=devices)


def test_low_precision_sums_are_as_good() -> None:
    """In 32 bits until they are added up: off by one rounding at most, as on one device."""
    xs = [RNG.uniform(size=(64, 5)).astype(dtype) for dtype in (jnp.bfloat16, jnp.float16)]
    sums = parity.decorated(lambda xs: list(map(product, xs)), 4, batch_argnums=0)(xs)
    for got, x in zip(sums, xs, strict=True):
        right = x.astype(np.float64).sum(0)
        assert got.dtype == x.dtype
        assert (np.abs(np.asarray(got, np.float64) - right) <= float(jnp.finfo(x.dtype).eps) * right).all()


def test_negative_zeros() -> None:
    nothing = np.full((16, 3), -0.0)

    def f(w: Any, x: Any) -> Any:
        added, _ = lax.scan(lambda c, row: (c + row, None), w, x)
        return [added, w + x[0], jnp.where(w == 0, w, x.sum(0)), x.max(0), x.min(0)]

    want = jax.jit(f)(jnp.full(3, -0.0), nothing)
    got = parity.decorated(f, 4)(jnp.full(3, -0.0), nothing)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b), err_msg=str(i))


def test_debug_nans_does_not_fire_on_padding() -> None:
    x = np.abs(RNG.normal(size=(5, 3))) + 0.1
    f = lambda x: [jnp.log(x).sum(0), (1 / x).mean(0), (x / x.sum(0)).max(), jnp.sqrt(x.min(0)), x.T @ jnp.log(x)]
    with jax.debug_nans(True):
        parity.check(f, x, devices=4, batch_argnums=0)


def test_weak_types_and_python_numbers() -> None:
    def f(state: Any, x: Any) -> Any:
        n = state["n"] + 1
        aux = {"n": n, "mean": x.mean() * state["lr"], "two": 2, "where": jnp.where(x[:, 0] > 0, 1, 2), "half": 0.5}
        return {"lr": state["lr"] * 0.5, "n": n, "w": state["w"] * state["lr"]}, aux | {"scaled": state["lr"] * 3}

    state = {"lr": 0.1, "n": 0, "w": jnp.ones(3, jnp.float32)}
    parity.check(f, state, X.astype(np.float32), devices=8, tolerance=1e-6)
    step = parity.decorated(f, 8)
    for i in range(1, 4):
        state, aux = step(state, X.astype(np.float32))
        assert state["n"].weak_type
        assert int(aux["n"]) == i
    assert len(step._cache.programs) == 1


def test_what_is_random_or_impure_is_the_same_on_each_device() -> None:
    calls: list[int] = []

    def now(x: Any) -> Any:
        calls.append(x.shape[0])
        return np.float64(len(calls))

    def f(w: Any, x: Any) -> Any:
        drawn = lax.rng_uniform(jnp.float32(0), jnp.float32(1), (3,))
        counted = jax.experimental.io_callback(now, jax.ShapeDtypeStruct((), np.float64), x)  # type: ignore[attr-defined]
        pure = jax.pure_callback(lambda x: x.max(0), jax.ShapeDtypeStruct((6,), np.float64), x)
        return w, {"drawn": drawn, "counted": counted, "pure": pure}

    w, aux = jax.block_until_ready(parity.decorated(f, 4)(W, X))
    assert calls == [16], "once, with all of it"
    assert aux["counted"] == 1
    np.testing.assert_array_equal(aux["pure"], X.max(0))
    for x in jax.tree.leaves((w, aux)):
        shards = [np.asarray(s.data) for s in x.addressable_shards]
        assert len(shards) == 4
        assert all((s == shards[0]).all() for s in shards)


def test_prints_are_of_whole_values_and_come_once(capfd: pytest.CaptureFixture[str]) -> None:
    def f(w: Any, x: Any) -> Any:
        jax.debug.print("sum {s:.3f} rows {n}", s=x.sum(), n=x[:, 0].shape[0])
        jax.debug.callback(lambda x: print("shape", x.shape), x)

        return lax.scan(lambda c, _: (jax.debug.print("turn {c}", c=c) or c + 1, None), 0, jnp.arange(3))[0]

    step = parity.decorated(f, 4)
    jax.block_until_ready(step(W, X))
    jax.effects_barrier()
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == ["shape (16, 6)", f"sum {X.sum():.3f} rows 16", "turn 0", "turn 1", "turn 2"]


# --- what comes back


def test_what_is_split_stays_split_where_the_devices_divide_it() -> None:
    f = lambda w, x: {
        "rows": x @ w, "columns": x.T, "gram": x @ x.T, "mean": x.mean(0), "more": jnp.concatenate([x, x]),
    }  # fmt: skip
    even = parity.decorated(f, 4)(W, X)
    assert {k: v.sharding.is_fully_replicated for k, v in even.items()} == {
        "rows": False, "columns": False, "gram": False, "mean": True, "more": True,
    }  # fmt: skip
    assert {s.data.shape for s in even["rows"].addressable_shards} == {(4, 6)}
    odd = parity.decorated(f, 4)(W, X[:13])
    assert all(isinstance(x, jax.Array) and x.sharding.is_fully_replicated for x in odd.values())


# --- what is slow


ROWS = 88  # a size that nothing else has


def _info_nce(w: Any, x: Any) -> Any:
    z = jnp.tanh(jnp.concatenate([x, 1.1 * x]) @ w)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, 1))


def _accumulated(w: Any, x: Any, k: int) -> Any:
    add = lambda c, part: (c + jax.grad(lambda w: jnp.mean((part @ w) ** 2))(w), None)
    return lax.scan(add, jnp.zeros_like(w), x.reshape(k, -1, x.shape[1]))[0].sum()


CUT: dict[str, Callable[[Any, Any], Any]] = {
    "shuffled": lambda w, x: jnp.mean((x[jax.random.permutation(jax.random.key(0), len(x))] @ w) ** 2),
    "two views": _info_nce,
    "halves": lambda w, x: jnp.mean((x[: len(x) // 2] @ w) * (x[len(x) // 2 :] @ w)),
    "time-major": lambda w, x: jnp.mean(
        jnp.tanh(jnp.swapaxes(jnp.stack([x, 2 * x, 3 * x], 1), 0, 1).reshape(-1, 6) @ w) ** 2
    ),
    "sorted": lambda w, x: jnp.mean((jnp.sort(x, 0) @ w) ** 2),
    "reversed": lambda w, x: jnp.mean((x[::-1] @ w) * (x @ w)),
    "rolled": lambda w, x: jnp.mean((jnp.roll(x, 1, 0) @ w) * (x @ w)),
    "repeated": lambda w, x: jnp.mean((jnp.repeat(x, 2, 0) @ w) ** 2),
    "tiled": lambda w, x: jnp.mean((jnp.tile(x, (2, 1)) @ w) ** 2),
    "accumulated over 8": functools.partial(_accumulated, k=8),
    "accumulated over 2": functools.partial(_accumulated, k=2),
}


@pytest.mark.parametrize("name", CUT)
def test_one_gather_does_not_make_what_follows_n_fold(name: str) -> None:
    x = np.zeros((ROWS, 6))
    f = lambda w, x: jax.value_and_grad(CUT[name])(w, x)
    own, all_of_it = parity.flops(parity.program(f, W, x)), parity.flops(jax.make_jaxpr(f)(W, x).jaxpr)
    assert own <= 0.2 * all_of_it  # an eighth, and padding


OPTIMIZERS: dict[str, Any] = {
    "adam": optax.adam(0.1), "lion": optax.lion(0.1), "lamb": optax.lamb(0.1),
    "two averages": optax.chain(optax.trace(0.9), optax.trace(0.99)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_with_several_uses_is_reduced_once(name: str) -> None:
    tx = OPTIMIZERS[name]
    params = {"a": W, "b": jnp.ones(6)}

    step = train_step(lambda p, x: jnp.mean(jnp.tanh(x @ p["a"] + p["b"]) ** 2), tx)
    found = parity.collectives(parity.program(step, params, tx.init(params), X, bucket_bytes=0))
    assert sorted(found) == [("all-reduce", (), ""), ("all-reduce", (6,), ""), ("all-reduce", (6, 6), "")]


def own_lion(w: Any, m: Any, x: Any) -> Any:
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * jnp.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g


def tied_and_penalised(w: Any, x: Any) -> Any:
    return w - jax.grad(lambda w: jnp.mean((x @ w @ w.T @ w) ** 2) + 0.1 * jnp.sum(w**2))(w)


@pytest.mark.parametrize(("step", "args"), [(own_lion, (W, W, X)), (tied_and_penalised, (W, X))])
def test_one_of_ones_own_as_well(step: Any, args: Any) -> None:
    assert parity.collectives(parity.program(step, *args)) == [("all-reduce", (6, 6), "")]


@pytest.mark.parametrize("equation", ["bd,dh->bh", "dh,bd->bh", "dh,bd->hb", "bd,dh->hb"])
def test_what_is_stored_moves_and_the_batch_does_not(equation: str) -> None:
    w, x = jaxdist.shard(jnp.ones((64, 48))), np.zeros((ROWS, 64))
    operands = (lambda w, x: (x, w)) if equation.startswith("bd") else (lambda w, x: (w, x))
    program = parity.program(lambda w, x: jnp.sum(jnp.einsum(equation, *operands(w, x)) ** 2), w, x)
    assert parity.collectives(program) == [("all-gather", (64, 48), ""), ("all-reduce", (), "")]


def test_between_two_splits_there_is_an_exchange() -> None:
    """A batch that is wanted in another dimension: all-to-all rather than gather."""
    recurrent = lambda w, x: lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), jnp.zeros(x.shape[1:]), x)[0]
    x = RNG.normal(size=(16, 8, 6))
    assert parity.collectives(parity.program(lambda w, x: recurrent(w, jnp.swapaxes(x, 0, 1)), W, x)) == []
    assert parity.collectives(parity.program(recurrent, W, x))[0][0] == "all-to-all"
    parity.check(recurrent, W, x, devices=8)


def test_an_examples_own_place_moves_nothing() -> None:
    """``logits[arange(B), labels]`` and its gradient: each device has the rows that it asks for."""

    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            logits = jax.nn.log_softmax(batch["x"] @ w)
            return -logits[jnp.arange(len(logits)), batch["y"]].mean()

        return jax.value_and_grad(loss)(w)

    for rows in (16, 13):
        batch = {"x": RNG.normal(size=(rows, 6)), "y": RNG.integers(0, 6, rows)}
        moved = [shape for _, shape, _ in parity.collectives(parity.program(step, W, batch))]
        assert sum(map(np.prod, moved)) == W.size + 1
    parity.check(step, W, batch, devices=8)
