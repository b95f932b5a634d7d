"""Placements as values: what a split says, and what becomes of it in a reshape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxdist.placements.values import (
    DEFERRED,
    PARTIAL,
    REPLICATED,
    Partial,
    Replicated,
    Split,
    form,
    reshaped,
)


def held(array: np.ndarray, split: Split, device: int) -> np.ndarray:
    """What a device holds, its padding with -1."""
    blocks = np.moveaxis(array, split.dim, 0).reshape(split.outer, split.size, -1)
    own = np.full((split.outer, split.chunk, blocks.shape[2]), -1, array.dtype)
    real = blocks[:, device * split.chunk : (device + 1) * split.chunk]
    own[:, : real.shape[1]] = real
    rest = tuple(n for d, n in enumerate(array.shape) if d != split.dim)
    return np.moveaxis(own.reshape(split.rows, *rest), 0, split.dim)


def test_forms_are_what_a_device_holds() -> None:
    assert form(Split(1, 8, 2, 1, stored=True, requested=True, whole=True)) == Split(1, 8, 2)
    assert form(Replicated(3)) == form(DEFERRED) == REPLICATED
    assert form(Partial(gradient=True, made=False)) == PARTIAL


@pytest.mark.parametrize(
    ("split", "shape", "new", "expected"),
    [
        (Split(0, 8, 2), (8, 3), (24,), Split(0, 24, 6)),
        (Split(0, 5, 2), (5, 3), (15,), Split(0, 15, 6)),  # 2, 2, 1, 0 rows: 6, 6, 3, 0 and not 4, 4, 4, 3
        (Split(0, 15, 6), (15,), (5, 3), Split(0, 5, 2)),
        (Split(0, 15, 4), (15,), (5, 3), None),
        (Split(1, 4, 1), (3, 4), (12,), Split(0, 4, 1, 3)),  # time-major
        (Split(0, 4, 1, 3), (12,), (3, 4), Split(1, 4, 1)),
        (Split(0, 12, 3), (12,), (3, 4), None),
        (Split(0, 16, 2), (16, 5), (8, 2, 5), Split(0, 8, 1)),
        (Split(0, 16, 4), (16, 5), (2, 8, 5), None),
        (Split(0, 16, 8), (16, 5), (2, 8, 5), Split(0, 2, 1)),
        (Split(1, 6, 3), (2, 6, 4), (2, 24), Split(1, 24, 12)),
        (Split(1, 6, 3), (2, 6, 4), (12, 4), Split(0, 6, 3, 2)),
        (Split(0, 8, 2), (8,), (1, 8, 1), Split(1, 8, 2)),
        (Split(1, 8, 2), (1, 8, 1), (8,), Split(0, 8, 2)),
        (Split(0, 4, 2), (4, 6), (4, 2, 3), Split(0, 4, 2)),
        (Split(1, 6, 2), (4, 6), (4, 2, 3), None),
        (Split(0, 8, 4), (8, 0), (0, 8), None),  # of nothing
        (Split(0, 8, 4), (8, 0), (2, 0, 4), None),
    ],
)
def test_reshapes(split: Split, shape: Sequence[int], new: Sequence[int], expected: Split | None) -> None:
    assert reshaped(split, shape, new) == expected


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(sizes, st.data(), st.integers(2, 5))
def test_a_reshape_of_the_slices_is_the_slices_of_the_reshape(shape: list[int], data: st.DataObject, n: int) -> None:
    total = math.prod(shape)
    new = data.draw(st.sampled_from(_factorings(total)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    blocks = data.draw(st.sampled_from([k for k in range(1, shape[dim] + 1) if shape[dim] % k == 0]))
    size = shape[dim] // blocks
    split = Split(dim, size, -(-size // n), blocks)
    to = reshaped(split, shape, new)
    assume(to is not None)
    assert to is not None
    x = np.arange(total).reshape(shape)
    assert new[to.dim] == to.outer * to.size
    for device in range(n):
        np.testing.assert_array_equal(held(x, split, device).reshape(to.shape(new)), held(x.reshape(new), to, device))
    # And back, where it came from.
    again = reshaped(to, new, shape)
    assert again is None or held(x, again, 0).size == held(x, split, 0).size


def _factorings(total: int, most: int = 3) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(total,)]
    if most > 1:
        for k in range(1, total + 1):
            if total % k == 0:
                found += [(k, *rest) for rest in _factorings(total // k, most - 1)]
    return found
