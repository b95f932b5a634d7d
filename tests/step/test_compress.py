"""Gradients in 16 bits on the wire: what is compressed, and how much accuracy it costs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.communicators import exchange

N = 8
X = np.random.default_rng(0).normal(size=(64, 5))
W = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)))
LOSS = {"bf16": 2.0**-8, "fp16": 2.0**-10}


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.sin(x @ w))


def compressed_and_exact(step: Any, state: Any, x: Any, compress: Any = "bf16") -> list[Any]:
    return [jaxdist.data_parallel(step, donate=False, compress=c)(state, x) for c in (compress, None)]


@pytest.mark.parametrize(("compress", "dtype"), [("bf16", "float64"), ("fp16", "float32")])
def test_gradients_lose_what_is_stated_and_losses_nothing(compress: Any, dtype: str) -> None:
    w, x = W.astype(dtype), X.astype(dtype)

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_fn)(w, x)
        assert grad.dtype == dtype
        return w - grad, loss

    (got, loss), (exact, exact_loss) = compressed_and_exact(step, w, x, compress)
    parts = np.stack([jax.grad(loss_fn)(w, part) for part in np.split(x, N)])
    error = np.abs(np.asarray(got) - np.asarray(exact))
    assert (error <= LOSS[compress] * np.abs(parts).mean(0) + 1e-6).all()
    assert error.max() > 1e-5, "nothing was compressed"
    np.testing.assert_array_equal(loss, exact_loss)


def test_what_is_no_gradient_is_not_compressed() -> None:
    """Losses, counts, statistics of the batch and what follows from them, arrays that are sums over the batch."""

    def step(state: Any, x: Any) -> Any:
        z = x @ state["w"]
        z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3)
        loss = jnp.mean(jnp.sin(z * jnp.array([1.0, 2.0, 3.0])))
        aux = {"loss": loss, "mean": z.mean(0), "count": jnp.sum(z > 0, 0), "second": x.T @ x}
        slope = jax.grad(lambda x: jnp.mean(jnp.sin(x @ state["w"])))(x)
        return state | {"total": state["total"] + x.sum(0), "moments": 0.9 * state["moments"] + x.T @ x}, (aux, slope)

    state = {"w": W, "total": jnp.zeros(5), "moments": jnp.zeros((5, 5))}
    jax.tree.map(np.testing.assert_array_equal, *compressed_and_exact(step, state, X))


def reductions(step: Any, *args: Any, **options: Any) -> list[str]:
    """The types of what is added up."""
    text = jaxdist.data_parallel(step, **options).lower(*args).as_text()  # type: ignore[attr-defined]
    return re.findall(r"stablehlo\.all_reduce.*?-> tensor<(\w+)>", text, re.DOTALL)


def test_gradients_through_a_batch_norm() -> None:
    """Those of the parameters are compressed, those of its statistics not."""

    def loss(w: Any, x: Any) -> Any:
        z = x @ w["a"]
        z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3)
        return jnp.mean(jnp.sin(z @ w["b"]) ** 2)

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w, x)), 0

    types = reductions(step, {"a": W, "b": jnp.ones((3, 4))}, X, compress="bf16", bucket_bytes=0)
    assert sorted(t for t in types if "bf16" in t) == ["3x4xbf16", "5x3xbf16"]
    assert len(types) > 4  # the mean and the variance, there and back


def in_a_loop(p: Any, x: Any, start: Any) -> Any:
    """`start`, and what a loop adds to it: the gradients of four microbatches."""
    add = lambda total, part: (total + jax.grad(loss_fn)(p, part), None)
    return jax.lax.scan(add, start, x.reshape(4, -1, x.shape[1]))[0]


def test_an_accumulated_gradient_is_compressed() -> None:
    got, exact = compressed_and_exact(lambda w, x: w - in_a_loop(w, x, jnp.zeros_like(w)), W, X)
    parts = np.stack([4 * jax.grad(loss_fn)(W, part) for part in np.split(X, N)])
    error = np.abs(np.asarray(got) - np.asarray(exact))
    assert error.max() > 1e-6
    assert (error <= LOSS["bf16"] * np.abs(parts).mean(0)).all()


def moved_in_the_loop(w: Any, x: Any) -> Any:
    def turn(carry: Any, part: Any) -> Any:
        total, w = carry
        grad = jax.grad(loss_fn)(w / 1000, part)
        return (total + grad, w - 0.1 * grad), None

    total, w = jax.lax.scan(turn, (jnp.zeros_like(w), w), x.reshape(4, -1, x.shape[1]))[0]
    return w, total


@pytest.mark.parametrize("step", [lambda w, x: (in_a_loop(w / 1000, x, w), 0), moved_in_the_loop])
def test_parameters_are_never_compressed(step: Any) -> None:
    got, exact = compressed_and_exact(step, 1000 + W / 3, X)
    np.testing.assert_allclose(got[0], exact[0], atol=0.02)  # of their last places in bfloat16: 4


@pytest.mark.parametrize(("compress", "dtype", "wire"), [("bf16", "bfloat16", "bf16"), ("fp16", "float16", "f16")])
def test_16_bit_gradients_of_the_same_type_travel_in_16_bits(compress: Any, dtype: str, wire: str) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x.astype(dtype) @ w).astype(jnp.float32)))(w), 0

    w = W.astype(dtype)
    assert reductions(step, w, X) == ["5x3xf32"]
    assert reductions(step, w, X, compress=compress) == [f"5x3x{wire}"]
    got, exact = (np.asarray(new, np.float32) for new, _ in compressed_and_exact(step, w, X, compress))
    np.testing.assert_allclose(got, exact, atol=4 * LOSS[compress] * np.abs(exact).max())


def test_other_16_bit_and_complex_gradients_travel_as_they_are() -> None:
    def step(state: Any, x: Any) -> Any:
        def loss(s: Any) -> Any:
            return jnp.mean(x[:, :3].astype(jnp.bfloat16) * s["half"]) + jnp.mean(jnp.abs(x[:, :3] * s["complex"]) ** 2)

        return jax.grad(loss)(state), 0

    state = {"half": jnp.ones(3, jnp.bfloat16), "complex": jnp.asarray([1 + 1j, 0.3, 2j])}
    jax.tree.map(np.testing.assert_array_equal, *compressed_and_exact(step, state, X, "fp16"))


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_the_exchange_of_parts(size: int) -> None:
    """What CPU processes do, the wire played by a stack of the devices' arrays."""
    xs = np.random.default_rng(size).normal(size=(N, size)).astype(np.float32)

    def on_device(x: Any) -> Any:
        return exchange.all_reduce(
            x, "bfloat16", N,
            all_to_all=lambda parts: jax.lax.all_to_all(parts, "d", 0, 0, tiled=True),
            all_gather=lambda part: jax.lax.all_gather(part, "d"),
        )  # fmt: skip

    got = np.asarray(jax.vmap(on_device, axis_name="d")(xs))
    assert (got == got[0]).all()
    assert (np.abs(got[0] - xs.astype(np.float64).sum(0)) <= LOSS["bf16"] * np.abs(xs).sum(0)).all()
