"""Collectives in a decorated step: each rank compares its own part. Functions return the number of comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import collective_cases as cases
from jax import lax

import jaxdist
from jaxdist.communicators import mpi

ctx = jaxdist.get_context()
N = ctx.size
FLOATS, INTS = [*cases.FLOATS, *cases.COMPLEX], cases.INTS


def ring(x: Any) -> Any:
    return lax.ppermute(x, "data", [(i, (i + 1) % N) for i in range(N)])


def to_second(x: Any) -> Any:
    return lax.ppermute(x, "data", [(0, 1)])


def in_scan(x: Any) -> Any:
    """Collectives before, inside and after loops, all of which must keep one order on every rank."""
    before = lax.pmax(x, "data")

    def body(carry: Any, i: Any) -> Any:
        carry = carry + lax.psum(x * i, "data")
        return carry, lax.all_gather(carry, "data").sum(0)

    carry, ys = lax.scan(jax.checkpoint(body), jnp.zeros_like(x), jnp.arange(3, dtype=x.dtype))
    after = lax.pmin(x, "data")
    return before + carry + ys.sum(0) + after


def in_while(x: Any) -> Any:
    total = lax.psum(jnp.abs(x).sum(), "data")

    def more(state: Any) -> Any:
        return lax.psum(jnp.ones(()), "data") * state[0] < 5 * N

    def body(state: Any) -> Any:
        i, y = state
        return i + 1, ring(y) + lax.psum(y, "data") / total

    _, y = lax.while_loop(more, body, (jnp.zeros(()), x))
    return y


def in_cond(x: Any) -> Any:
    largest = lax.pmax(x.max(), "data")
    y = lax.cond(largest > 0, lambda x: lax.psum(x, "data") + x, lambda x: ring(x), x)
    return lax.switch(
        jnp.asarray(2), [lambda y: y, lambda y: ring(y), lambda y: y * lax.psum_scatter(y, "data", tiled=True).sum()], y
    )


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "psum": (lambda x: lax.psum(x, "data"), FLOATS + INTS),
    "pmean": (lambda x: lax.pmean(x, "data"), FLOATS),
    "pmax": (lambda x: lax.pmax(x, "data"), FLOATS[:4] + INTS),
    "pmin": (lambda x: lax.pmin(x, "data"), FLOATS[:4] + INTS),
    "psum of a scalar": (lambda x: lax.psum(x[0, 0], "data"), ["float32"]),
    "psum of nothing": (lambda x: lax.psum(x[:0], "data"), ["float32"]),
    "psum of a tree": (lambda x: sum(lax.psum((x, 2 * x, 3), "data")), ["float64"]),
    "all_gather": (lambda x: lax.all_gather(x, "data"), [*FLOATS, *INTS, "bool"]),
    "all_gather, axis 1": (lambda x: lax.all_gather(x, "data", axis=1), ["float32"]),
    "all_gather, tiled": (lambda x: lax.all_gather(x, "data", axis=1, tiled=True), ["float32", "bool"]),
    "all_to_all 0 0": (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), [*FLOATS, *INTS, "bool"]),
    "all_to_all 0 1": (lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True), ["float32"]),
    "all_to_all 1 0": (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), ["float32"]),
    "all_to_all 1 1": (lambda x: lax.all_to_all(x, "data", 1, 1, tiled=True), ["float32"]),
    "all_to_all, not tiled": (lambda x: lax.all_to_all(x.reshape(N, 2, -1), "data", 0, 1), ["float32"]),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "data", tiled=True), FLOATS + INTS),
    "psum_scatter, dim 1": (lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), ["float32"]),
    "psum_scatter, not tiled": (lambda x: lax.psum_scatter(x.reshape(N, 2, -1), "data"), ["float32"]),
    "ppermute": (ring, [*FLOATS, *INTS, "bool"]),
    "ppermute of some": (to_second, ["float32"]),
    "axis_index": (lambda x: x + lax.axis_index("data").astype(x.dtype), ["float32"]),
    "in scan and checkpoint": (in_scan, ["float64"]),
    "in while": (in_while, ["float64"]),
    "in cond and switch": (in_cond, ["float64"]),
    "a gradient through them": (
        jax.grad(lambda x: jnp.sum(jnp.sin(ring(x)) * lax.psum_scatter(lax.all_gather(x, "data"), "data").sum())),
        ["float64"],
    ),
}


def data(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.integers(0, 2 if dtype == "bool" else 6, (N, 2 * N, 3 * N))
    return x.astype(jnp.dtype(dtype))


def of_lax() -> int:
    """JAX's own, against `jax.vmap` with a named axis."""
    compared = 0
    for name, (f, dtypes) in FUNCTIONS.items():
        # All types in one program: most of the time goes into compiling.
        xs = {dtype: data(dtype) for dtype in dtypes}
        if f is to_second:  # vmap knows whole permutations only
            expected = {dtype: np.zeros_like(x) for dtype, x in xs.items()}
            for dtype, x in xs.items():
                expected[dtype][1] = x[0]
        else:
            every = jax.vmap(f, axis_name="data")
            expected = jax.jit(lambda xs, every=every: {dtype: every(x) for dtype, x in xs.items()})(xs)
        step = jaxdist.data_parallel(cases.on_each(lambda xs, f=f: {dtype: f(x) for dtype, x in xs.items()}))
        outs = step({dtype: x[ctx.rank : ctx.rank + 1] for dtype, x in xs.items()})
        for dtype in dtypes:
            got = np.asarray(outs[dtype].addressable_data(0))
            want = np.asarray(expected[dtype])[ctx.rank][None]
            assert got.dtype == want.dtype, (name, dtype, got.dtype, want.dtype)
            got = got[:1] if not got.size else got  # XLA does not shard what is empty
            np.testing.assert_allclose(
                got.astype(complex), want.astype(complex), rtol=1e-6, atol=1e-6, err_msg=f"{name} {dtype}"
            )
            compared += 1
    return compared


def of_jaxdist(programs: int = 2) -> int:
    """Ours, random calls, against one device."""
    rng = np.random.default_rng(N)
    compared = 0
    for _ in range(programs):
        calls = [cases.random_call(rng, N) for _ in range(25)]
        compared += cases.check(calls, [cases.data(c, rng, N) for c in calls], ctx.rank, 1)
    return compared


def of_scatter(turns: int, mib: int = 35) -> int:
    """Gloo's own reduce-scatter is wrong in a few of 200 such turns (jax#40830)."""
    rows = (mib << 18) // 1024 // N * N

    @jaxdist.data_parallel
    @cases.on_each
    def step(x: Any) -> Any:
        def turn(i: Any, wrong: Any) -> Any:
            mine = lax.psum_scatter(x + i.astype(x.dtype), "data", tiled=True)
            first = lax.axis_index("data") * mine.shape[0]
            line = (first + jnp.arange(mine.shape[0], dtype=x.dtype))[:, None] + jnp.arange(x.shape[1], dtype=x.dtype)
            return wrong + jnp.sum(mine != N * (line + i) + N * (N - 1) / 2, dtype=jnp.int32)

        wrong = lax.pcast(jnp.zeros((), jnp.int32), "data", to="varying")
        return lax.psum(lax.fori_loop(0, turns, turn, wrong), "data")

    line = np.arange(rows, dtype=np.float32)[:, None] + np.arange(1024, dtype=np.float32)
    wrong = int(np.asarray(step((line + ctx.rank)[None]).addressable_data(0))[0])
    assert wrong == 0, f"{wrong} wrong values"
    return turns


def of_nan() -> int:
    """The extremes of infinities, zeros and NaN, as NumPy has them."""
    compared = 0
    for dtype in FLOATS[:4]:
        x = np.array([[1, -2, 0.0, np.inf, -np.inf, np.nan, -3, 5]] * N).astype(jnp.dtype(dtype))
        x[:, 6] = np.where(np.arange(N) == N - 1, np.nan, -np.inf)
        x[:, 7] = np.arange(N) - 1
        x[:, 3] *= np.where(np.arange(N) == 0, 1, -1)
        step = jaxdist.data_parallel(cases.on_each(lambda x: [lax.pmax(x, "data"), lax.pmin(x, "data")]))
        got = step(x[ctx.rank : ctx.rank + 1])
        for y, f in zip(got, (np.max, np.min), strict=True):
            mine = np.asarray(y.addressable_data(0))[0]
            np.testing.assert_array_equal(mine.astype(float), f(x.astype(float), 0), err_msg=dtype)
            compared += 1
    return compared


def of_pieces() -> int:
    """Messages that are too long for one MPI call: all of them are, if a call may carry seven elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi, "MOST", 7)
        return of_jaxdist()
