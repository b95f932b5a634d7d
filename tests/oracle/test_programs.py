"""Operations, control flow, traps and random numbers of a step on several devices are those on one.

Several rows are one program, since most of the time goes into compiling; devices that divide the batch and devices that
do not, by turns. With JAXDIST_FULL set, every operation by itself on all of them.
"""

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import draws, flows, moves, operations, traps
from harness.check import check, compare, decorated
from harness.generated import Generated

import jaxdist

FULL = "JAXDIST_FULL" in os.environ
EVEN = [(2, 8), (3, 6), (4, 8), (8, 8), (8, 16)]
ODD = [(2, 7), (3, 7), (4, 5), (8, 13), (8, 5), (4, 9)]  # devices, examples


def groups(names: Iterable[str], size: int) -> list[tuple[str, ...]]:
    names = list(names)
    return [tuple(names[k : k + size]) for k in range(0, len(names), size)]


def operations_by_way() -> Iterator[Any]:
    """Each evenly or unevenly; in slow tests those that move dimensions or reduce on the other one, too."""
    if FULL:
        yield from ((way, (name,)) for name, way in itertools.product(operations.OPERATIONS, EVEN + ODD))
        return
    found: dict[tuple[tuple[int, int], bool], list[str]] = {}
    for name in operations.OPERATIONS:
        i = zlib.crc32(name.encode()) >> 4  # not its place: another row must not send it to other devices
        for k, ways in enumerate((EVEN, ODD)):
            quick = k == (
                1 if name.startswith(("reduce", "other")) else i % 2 if name.startswith("shape") else bool(i % 3)
            )
            if quick or name.startswith(("shape", "reduce")):
                found.setdefault((ways[i % len(ways)], quick), []).append(name)
    for (way, quick), all_names in found.items():
        for names in groups(all_names, 24):
            yield pytest.param(way, names, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("way", "names"), list(operations_by_way()), ids=str)
def test_operations(way: tuple[int, int], names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    devices, rows = way
    run = lambda w, b: {name: operations.OPERATIONS[name](w, b) for name in names}
    check(run, operations.state(), operations.batch(rows), on=devices)
    assert "does not know" not in caplog.text, "no primitive of JAX is without a rule"


@pytest.mark.parametrize("names", groups(flows.FLOWS, 1 if FULL else 12), ids=lambda names: names[0])
def test_control_flow(names: tuple[str, ...]) -> None:
    k = list(flows.FLOWS).index(names[0]) // len(names)
    devices, rows = [(4, 5), (3, 8), (2, 7), (8, 16)][k % 4]
    x = np.random.default_rng(0).normal(size=(rows, 6))
    check(lambda w, x: {name: flows.FLOWS[name](w, x) for name in names}, flows.W, x, on=devices)


@pytest.mark.parametrize("name", ["layers in a branch", "layers, in 32 bits"])
def test_gradients_of_loops_over_layers(name: str) -> None:
    step, args, _ = flows.REDUCED[name]
    check(step, *args, on=8, tolerance=2**-7 if args is flows.HALF else 1e-10)


@pytest.mark.parametrize("name", traps.TRAPS)
def test_traps(name: str) -> None:
    f, w, x, devices = traps.TRAPS[name]
    check(f, w, x, on=devices)


SEEDS = range(1000 if FULL else 45)
"""The fewer ones have each piece."""


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[pytest.mark.slow] * (k > 2)) for k in SEEDS])
def test_random_programs(seed: int) -> None:
    Generated(seed).run()


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [pytest.param(dtype, rows, marks=[pytest.mark.slow] * (i > 1))
     for i, dtype in enumerate(moves.DTYPES) for rows in ((16, 13) if FULL else (13 if i % 2 else 16,))],
)  # fmt: skip
def test_moves_keep_every_bit(dtype: str, rows: int) -> None:
    names = [name for name in moves.MOVES if (dtype, name) != ("bfloat16", "repeat")]  # XLA flushes some to zero
    f, x = moves.every(names), moves.fragile(dtype, rows)
    want = jax.jit(f)(x, x)
    assert moves.changed(jaxdist.unshard(decorated(f)(jaxdist.shard(x), x)), want) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_what_a_callback_returns_keeps_every_bit(dtype: str) -> None:
    x = moves.fragile(dtype, 16)
    step = decorated(lambda x: jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x), 4)
    assert moves.changed(step(x), x) == []


def test_negative_zeros() -> None:
    nothing = np.full((16, 3), -0.0)

    def f(w: Any, x: Any) -> Any:
        added, _ = jax.lax.scan(lambda c, row: (c + row, None), w, x)
        return [added, w + x[0], jnp.where(w == 0, w, x.sum(0)), x.max(0), x.min(0)]

    got, want = decorated(f, 4)(jnp.full(3, -0.0), nothing), jax.jit(f)(jnp.full(3, -0.0), nothing)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


def test_low_precision_sums_are_off_by_one_rounding_at_most() -> None:
    xs = [np.random.default_rng(0).uniform(size=(64, 5)).astype(dtype) for dtype in (jnp.bfloat16, jnp.float16)]
    for got, x in zip(decorated(lambda _, xs: list(map(traps.product, xs)), 4)(0.0, xs), xs, strict=True):
        right = x.astype(np.float64).sum(0)
        assert got.dtype == x.dtype
        assert (np.abs(np.asarray(got, np.float64) - right) <= float(jnp.finfo(x.dtype).eps) * right).all()


# --- random numbers

WAYS = [(2, 8), (3, 7), (4, 8), (8, 13), (8, 16)]
DRAWN = [(names, "threefry2x32") for names in groups(draws.DRAWS, 9)]
DRAWN += [(names, impl) for impl in ("rbg",) for names in groups(draws.DRAWS if FULL else draws.KEYED, 99)]
DRAWN_CASES = [pytest.param(*one, marks=[pytest.mark.slow] * ("rbg" in one[1])) for one in DRAWN]


@pytest.mark.parametrize(("names", "impl"), DRAWN_CASES, ids=lambda x: x if isinstance(x, str) else x[0])
def test_random_numbers(names: tuple[str, ...], impl: str) -> None:
    """Bit for bit, of each implementation; what is computed with them may round in another order."""
    devices, rows = WAYS[DRAWN.index((names, impl)) % len(WAYS)]
    x = np.random.default_rng(rows).normal(size=(rows, 6)) * 3
    draw = lambda k, x: {name: draws.DRAWS[name](k, x) for name in names}
    key = jax.random.key(7, impl=impl)
    got, want = decorated(draw, devices)(key, x), jax.jit(draw)(key, x)
    compare(got, want, 1e-12)
    for name in draws.EXACT & set(names):
        compare(got[name], want[name], 0)


@pytest.mark.parametrize("width", [16, 64])
def test_bits_of_odd_sizes(width: int) -> None:
    """The batch in whichever dimension, which the devices do not divide."""
    shapes, dtype, key = [(13,), (1, 13), (13, 1), (7, 13, 3), (13, 129), (2, 3, 13, 5)], f"uint{width}", draws.KEY

    def f(key: Any, x: Any) -> Any:
        along = lambda shape: x.reshape([-1 if n == 13 else 1 for n in shape])
        return [jax.random.bits(key, shape, dtype) | along(shape) for shape in shapes]

    for got, shape in zip(decorated(f, 8)(key, np.zeros(13, dtype)), shapes, strict=True):
        np.testing.assert_array_equal(got, jax.random.bits(key, shape, dtype))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_in_the_batch(impl: str) -> None:
    """One for each example, as an argument: dropout and its gradient."""

    def step(w: Any, batch: Any) -> Any:
        drop = lambda key, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
        return jax.value_and_grad(lambda w: (jax.vmap(drop)(batch["keys"], batch["x"]) * w).sum(1).mean())(w)

    keys = jax.random.split(jax.random.key(3, impl=impl), 8)
    check(step, jnp.ones(3), {"keys": keys, "x": np.ones((8, 3))}, on=4)


def test_the_generator_is_part_of_what_is_compiled() -> None:
    step, x = decorated(lambda k, x: jax.random.normal(k, x.shape) * x, 8), np.ones((13, 3))
    first = np.asarray(step(draws.KEY, x))
    with jax.threefry_partitionable(False):
        other = np.asarray(step(draws.KEY, x))
        np.testing.assert_allclose(other, jax.random.normal(draws.KEY, x.shape), rtol=1e-12)
    assert (first != other).any()
    np.testing.assert_array_equal(step(draws.KEY, x), first)
