"""`value_and_grad` and `grad` outside a step, and their errors; inside one they are in the oracle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(3,)))
X = jnp.asarray(RNG.normal(size=(12, 3)))


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w - 1) ** 2)


def close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13), a, b)


@pytest.mark.parametrize("k", [1, 3, 12])
def test_microbatches_outside_a_step(k: int) -> None:
    close(jaxdist.value_and_grad(loss_fn, microbatches=k)(W, X), jax.value_and_grad(loss_fn)(W, X))


def test_drop_in_for_jax() -> None:
    f = lambda a, b, x: (jnp.sum(jnp.sin(a * x) * b), {"aux": a * 2})
    for argnums in (0, 1, (0, 1), (1, 0), -2):
        close(
            jaxdist.value_and_grad(f, argnums, has_aux=True)(W, 2 * W, X),
            jax.value_and_grad(f, argnums, has_aux=True)(W, 2 * W, X),
        )
        close(jaxdist.grad(f, argnums, has_aux=True)(W, 2 * W, X), jax.grad(f, argnums, has_aux=True)(W, 2 * W, X))
    g = lambda w, n: jnp.sum(w * n)
    got = jaxdist.grad(g, (0, 1), allow_int=True)(W, 3)
    assert got[1].dtype == jax.dtypes.float0
    keywords = jaxdist.grad(lambda w, *, x: loss_fn(w, x))(W, x=X)
    close(keywords, jax.grad(loss_fn)(W, X))


def test_aux_of_microbatches_is_put_together() -> None:
    def f(w: Any, x: Any) -> Any:
        y = x @ w
        return jnp.mean(y**2), {"rows": y, "count": jnp.sum(y > 0), "mean": y.mean(), "stat": x.mean(0), "none": None}

    (_, got), _ = jaxdist.value_and_grad(f, has_aux=True, microbatches=4)(W, X)
    (_, want), _ = jax.value_and_grad(f, has_aux=True)(W, X)
    close(got, want)
    assert got["count"].dtype == want["count"].dtype


def test_microbatches_hold_every_kth_example() -> None:
    f = lambda w, x: (jnp.sum(w * x[0]), x[:, 0])
    (_, rows), grads = jaxdist.value_and_grad(f, has_aux=True, microbatches=3)(W, X)
    np.testing.assert_array_equal(rows, X[:, 0])  # in the batch's order
    np.testing.assert_allclose(grads, X[:3].mean(0), rtol=1e-12)  # the first of each: examples 0, 1 and 2
    seen = jaxdist.value_and_grad(lambda w, x: (jnp.sum(w), x[:1]), has_aux=True, microbatches=3)
    (_, first), _ = seen(W, X)
    np.testing.assert_allclose(first, X[:3].mean(0)[None], rtol=1e-12)


def test_low_precision_is_accumulated_in_float32() -> None:
    x = jnp.full((256, 1), 1.0, jnp.bfloat16)
    w = jnp.ones(1, jnp.bfloat16)
    f = lambda w, x: jnp.sum(x * w)  # of two ones: a bfloat16 sum of such gradients stops at 512, half of what it is
    grads = jaxdist.grad(f, microbatches=512)(w, jnp.concatenate([x] * 4))
    assert grads.dtype == jnp.bfloat16
    assert float(grads[0]) == 2


@pytest.mark.parametrize(
    ("settings_", "args", "message"),
    [
        ({"microbatches": 5}, (W, X), "batch of 12 examples can't be divided into 5 microbatches"),
        ({"microbatches": 0}, (W, X), "a positive integer"),
        ({"microbatches": 2, "batch_argnums": (0, 1)}, (W, X), "argument 0 is differentiated and split"),
        ({"microbatches": 2}, (W, 3.0), "batch_argnums= says which"),
    ],
)
def test_bad_input(settings_: Any, args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxdist.value_and_grad(loss_fn, **settings_)(*args)


def test_two_batches_in_microbatches() -> None:
    def f(w: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.mean((x @ w - y) ** 2)

    @jaxdist.data_parallel(batch_argnums=(1, 2), donate=False)
    def step(w: Any, x: Any, y: Any) -> Any:
        return w - jaxdist.grad(f, microbatches=2)(w, (x, y))

    x, y = RNG.normal(size=(32, 3)), RNG.normal(size=32)
    close(step(W, x, y), W - jax.grad(f)(W, (x, y)))


@pytest.mark.parametrize("name", ["reduce", "weight"])
def test_settings_that_are_gone(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        jaxdist.value_and_grad(loss_fn, **{name: "sum"})(W, X)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 5),
    hidden=st.integers(0, 4),
    dtype=st.sampled_from(["float32", "float64"]),
    k=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_dtype(rows: int, width: int, hidden: int, dtype: str, k: int, seed: int) -> None:
    """Odd sizes, empty leaves, scalars: the decorated step is the plain one."""
    rng = np.random.default_rng(seed)
    params = {
        "w": rng.normal(size=(width, hidden)).astype(dtype),
        "v": rng.normal(size=(hidden, width)).astype(dtype),
        "b": rng.normal(size=()).astype(dtype),
    }
    x = rng.normal(size=(8 * k * rows, width)).astype(dtype)

    def f(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] + p["b"] - x) ** 2)

    def step(p: Any, x: Any) -> Any:
        loss, grads = jaxdist.value_and_grad(f, microbatches=k)(p, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

    want, got = jax.jit(step)(params, x), jaxdist.data_parallel(step)(params, x)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
