"""Rows looked up and changed in an array that the devices have in slices of rows: as on one device, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import meshes

import jaxdist
from jaxdist.ir.wire import transfers
from jaxdist.mesh import axes_of_mesh

SIZES = [{"data": 1, "model": 4}, {"data": 2, "model": 3}]
WIDTH = 6


def compare(step: Any, state: Any, batch: Any, sizes: dict[str, int], layouts: dict[str, int]) -> None:
    want = jax.jit(step)(state, batch)
    got = jaxdist.unshard(jaxdist.parallel(step, mesh=meshes.mesh(sizes), layouts=layouts)(state, batch))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-10)  # and no number in the same places


@pytest.mark.parametrize(
    ("mode", "dtype", "rows", "sizes"),
    [("clip", "uint8", 37, SIZES[0]), ("fill", "int8", 37, SIZES[1]), ("promise_in_bounds", "int64", 48, SIZES[1])],
)  # fmt: skip
def test_a_vocabulary(mode: str, dtype: str, rows: int, sizes: dict[str, int]) -> None:
    """An embedding, logits, and those at the labels; of some tokens there are no rows."""
    rng = np.random.default_rng(rows)
    low, high = (0, rows) if mode == "promise_in_bounds" else (-3 if np.dtype(dtype).kind == "i" else 0, rows + 4)
    tokens = rng.integers(low, high, (12, 5)).astype(dtype)

    def step(params: Any, tokens: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            hidden = params["table"].at[tokens].get(mode=mode, wrap_negative_indices=False)
            filled = jnp.sum(jnp.isnan(hidden))
            logits = jnp.tanh(jnp.where(jnp.isnan(hidden), 7, hidden)) @ params["out"]
            labels = jnp.clip(tokens, 0, rows - 1)[..., None].astype(jnp.int32)
            own = jnp.take_along_axis(logits, labels, -1, mode=mode)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - own), (filled, own)

        found, grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), found

    params = {"table": jnp.asarray(rng.normal(size=(rows, WIDTH))), "out": jnp.asarray(rng.normal(size=(WIDTH, rows)))}
    compare(step, params, tokens, sizes, {"table": 0, "out": 1})


@pytest.mark.parametrize(
    ("mode", "rows", "dim", "sizes"), [("clip", 37, 0, SIZES[0]), ("drop", 48, 0, SIZES[1]), ("clip", 48, 1, SIZES[1])]
)
def test_rows_that_change(mode: str, rows: int, dim: int, sizes: dict[str, int]) -> None:
    """Each kind of change, of stored rows and of zeros; rows that are not there and those that come twice."""
    rng = np.random.default_rng(rows)

    def step(table: Any, x: Any) -> Any:
        mean, at = jnp.mean(x), jnp.array([1, 5, rows - 1, rows + 3, -90, 7, 5])
        for change in ("add", "multiply", "min", "max"):
            table = getattr(table.at[at], change)(mean + jnp.arange(7.0)[:, None], mode=mode)
        table = table.at[at[:2]].set(mean, mode=mode).at[at[:2], at[:2]].add(mean, mode=mode)
        made = jnp.zeros_like(table).at[at, 2].add(mean * jnp.arange(7.0), mode=mode)
        return table + made, (table[at[1:3]], jnp.sum(made), jnp.full(rows, 2.0).at[at].add(mean, mode=mode))

    compare(step, jnp.asarray(rng.normal(size=(rows, WIDTH))), rng.normal(size=(12, 3)), sizes, {"": dim})


def test_dtypes() -> None:
    dtypes = ("bfloat16", "float16", "int32", "complex64", "bool")
    tables = [jnp.arange(400).reshape(100, 4).astype(dtype) for dtype in dtypes]

    def step(tables: Any, x: Any) -> Any:
        set_ = [table.at[jnp.array([3, 60])].set(x[0].astype(table.dtype)) for table in tables]
        return set_, [table[jnp.array([2, 99, 120])] for table in tables]

    compare(step, tables, np.ones((4, 4)), SIZES[0], {"": 0})


def test_of_logits_nothing_travels() -> None:
    """But the largest, the sum, and that at the label."""
    rows, examples, tokens = 4096, 4, 16

    def step(out: Any, batch: Any) -> Any:
        def loss_fn(out: Any) -> Any:
            logits = batch["x"] @ out
            own = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - own)

        loss, grads = jax.value_and_grad(loss_fn)(out)
        return out - grads, loss

    mesh = meshes.mesh({"model": 4})
    decorated: Any = jaxdist.parallel(step, mesh=mesh, layouts={"": 1})
    found: list[Any] = []
    decorated._traced = lambda _, closed, __: found.append(closed)
    batch = {"x": np.ones((examples, tokens, 8)), "labels": np.zeros((examples, tokens), np.int32)}
    args = jnp.ones((8, rows)), batch
    compiled = decorated.lower(*args).compile()
    assert sum(one.elements * n for one, n in transfers(found[-1], axes_of_mesh(mesh)).items()) <= (
        4 * examples * tokens
    )
    alone = jax.jit(step).lower(*args).compile()
    analyses: list[Any] = [made.memory_analysis() for made in (compiled, alone)]
    used = [found.temp_size_in_bytes for found in analyses]
    assert used[0] <= 1.1 / 4 * used[1] + 10_000
