"""The pass applied once for each axis: as on one device, whatever each axis cuts."""

from __future__ import annotations

import os
import random
from typing import Any

import idioms
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import over_axes
import pytest

from jaxdist.mesh import Axis

NAMES = list(idioms.IDIOMS)


def flat(name: str, rows: int) -> tuple[Any, list[Any], list[bool]]:
    """An idiom as a function of arrays; its arguments; which of them are of the batch."""
    case = oracle.idiom(name, rows)
    batch = case.batch(0)
    leaves, tree = jax.tree.flatten((*case.state, batch))
    arrays = [i for i, x in enumerate(leaves) if hasattr(x, "dtype") or isinstance(x, (int, float, bool))]
    state = len(leaves) - len(jax.tree.leaves(batch))

    def step(*xs: Any) -> list[Any]:
        given = dict(zip(arrays, xs, strict=True))
        result = case.step(*jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)]))
        return [x for x in jax.tree.leaves(result) if hasattr(x, "dtype")]

    args = [jnp.asarray(leaves[i]) for i in arrays]
    of_batch = [i >= state and x.ndim > 0 and x.shape[0] == rows for i, x in zip(arrays, args, strict=True)]
    return step, args, of_batch


def numbers(x: Any) -> np.ndarray:
    x = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def gap(want: Any, got: Any) -> float:
    """The largest difference of two results, over the size of what they hold and what their dtypes round."""

    def of(a: Any, b: Any) -> float:
        digits = 1.0 if a.dtype in ("float64", "complex128") else 1e4  # float32 metrics
        a, b = numbers(a), numbers(b)
        return float(np.nanmax(np.abs(a - b)) / (1 + np.nanmax(np.abs(a)))) / digits

    return max((of(a, b) for a, b in zip(want, got, strict=True) if a.size), default=0.0)


def layouts(args: list[Any], of_batch: list[bool], seed: str, size: int, uneven: bool) -> list[int | None]:
    """A dimension of each leaf of the state, or None."""
    rng = random.Random(seed)

    def dim(x: Any) -> int | None:
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return None
        return rng.choice(
            [None, *(d for d in range(x.ndim) if x.shape[d] >= size and (uneven or not x.shape[d] % size))]
        )

    return [None if batch else dim(x) for x, batch in zip(args, of_batch, strict=True)]


def check(name: str, way: str, rows: int) -> None:
    step, args, of_batch = flat(name, rows)
    split: list[int | None] = [0 if batch else None for batch in of_batch]
    model, data, inner = Axis("model", 2), Axis("data", 2), Axis("inner", 2)
    state = layouts(args, of_batch, f"{name}{way}{rows}", 2, rows % 2 == 1)
    axes = {
        "model": {Axis("model", 4): layouts(args, of_batch, name, 4, rows % 2 == 1)},
        "model data": {model: state, data: split},
        "data inner": {data: split, inner: split},
    }[way]
    closed = over_axes.jaxpr(step, args)
    want = jax.jit(lambda *xs: step(*xs))(*args)
    got = over_axes.run(closed, args, axes, [not batch for batch in of_batch])
    assert gap(want, got) < 1e-10


WAYS = ["model", "model data", "data inner"]
CASES = (
    [(name, way, rows) for name in NAMES for way in WAYS for rows in (24, 20 if name in idioms.DIVISIBLE else 21)]
    if "JAXDIST_FULL" in os.environ
    else [(name, WAYS[i % 3], 24) for i, name in enumerate(NAMES[::10])]
)


@pytest.mark.parametrize(("name", "way", "rows"), CASES)
def test_idioms(name: str, way: str, rows: int) -> None:
    """With random layouts; all of them through `parallel`: tests/step/test_parallel.py."""
    check(name, way, rows)
