"""The checksum of an array adds up over its parts, and any one bit changes it."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.checkpoint.checksum import MODULUS, checksum

DTYPES = ["bool", "uint8", "int16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def some(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    kind = jnp.dtype(dtype)
    raw = rng.integers(0, 256, (int(np.prod(shape)) * kind.itemsize,), np.uint8)
    return (raw % 2 == 0 if dtype == "bool" else raw.view(kind)).reshape(shape)


def in_parts(x: np.ndarray, rng: np.random.Generator) -> int:
    """The sum over slices that cut each axis at two random places."""
    cuts = [sorted({0, n, *map(int, rng.integers(0, n + 1, 2))}) for n in x.shape]
    total = 0
    for bounds in itertools.product(*(itertools.pairwise(c) for c in cuts)):
        total += checksum(x[tuple(slice(a, b) for a, b in bounds)], [a for a, _ in bounds])
    return total % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for shape in [(), (1,), (37,), (5, 7), (3, 4, 6), (70001,), (3, 40000), (20000, 3), (0, 4)]:
        x = some(shape, dtype, rng)
        assert in_parts(x, rng) == checksum(x, (0,) * x.ndim), shape


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_any_bit_counts(dtype: str) -> None:
    rng = np.random.default_rng(1)
    x = some((3, 5), dtype, rng)
    raw = x.reshape(-1).view(np.uint8)
    seen = {checksum(x, (0, 0))}
    for byte, bit in itertools.product(range(raw.size), range(8)):
        raw[byte] ^= 1 << bit
        seen.add(checksum(x, (0, 0)))
        raw[byte] ^= 1 << bit
    assert len(seen) == 1 + raw.size * 8


@pytest.mark.parametrize(
    "change",
    [
        lambda x: -x,
        lambda x: np.roll(x, 1, 0),
        lambda x: np.roll(x, 1, 1),
        lambda x: x[::-1],
        lambda x: np.zeros_like(x),
        lambda x: x.T,
    ],
    ids=["signs", "rows", "columns", "order", "zeros", "transposed"],
)
def test_other_damage(change: Any) -> None:
    """Such as the same bit in an even number of places, which a plain sum modulo 2^64 takes for nothing."""
    x = np.random.default_rng(2).normal(size=(64, 64)).astype(np.float32)
    assert checksum(change(x), (0, 0)) != checksum(x, (0, 0))


def test_it_is_the_same_for_ever() -> None:
    """Else no checkpoint of today could be read tomorrow."""
    assert checksum(np.arange(100000, dtype=np.int32).reshape(-1, 10), (0, 0)) == 659154927252530754
