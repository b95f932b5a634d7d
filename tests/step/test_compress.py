"""Gradients in 16 bits on the wire: what is compressed, and how much accuracy it costs."""

from __future__ import annotations

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_gradients_lose_what_is_stated_and_losses_nothing(compress: Any, dtype: str) -> None:
    w, x = W.astype(dtype), X.astype(dtype)

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_fn)(w, x)
        assert grad.dtype == dtype
        return grad, {"loss": loss}

    got, aux = jaxdist.data_parallel(step, donate=False, compress=compress)(w, x)
    exact, exact_aux = jaxdist.data_parallel(step, donate=False)(w, x)
    parts = np.stack([jax.grad(loss_fn)(w, part) for part in np.split(x, N)])
    error = np.abs(np.asarray(got) - np.asarray(exact))
    assert (error <= LOSS[compress] * np.abs(parts).mean(0)).all()
    assert error.max() > 1e-6, "nothing was compressed"
    np.testing.assert_array_equal(aux["loss"], exact_aux["loss"])


def test_weighted_gradients_are_compressed_and_their_weights_are_not() -> None:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jaxdist.value_and_grad(loss_fn, weight=x[:, 0] > 0)(w, x)
        return grad, {"loss": loss}

    got, aux = jaxdist.data_parallel(step, donate=False, compress="bf16")(W, X)
    exact, exact_aux = jaxdist.data_parallel(step, donate=False)(W, X)
    np.testing.assert_array_equal(aux["loss"], exact_aux["loss"])
    assert 1e-6 < np.abs(np.asarray(got) - np.asarray(exact)).max() < 1e-2


def in_a_loop(p: Any, x: Any, start: Any) -> Any:
    """`start`, and what a loop adds to it: the gradients of four microbatches."""
    add = lambda total, part: (total + jax.grad(loss_fn)(p, part), None)
    return jax.lax.scan(add, start, x.reshape(4, -1, x.shape[1]))[0]


def test_an_accumulated_gradient_is_compressed() -> None:
    step = lambda w, x: (in_a_loop(w, x, jnp.zeros_like(w)), 0)
    got, exact = (jaxdist.data_parallel(step, donate=False, compress=c)(W, X)[0] for c in ("bf16", None))
    parts = np.stack([4 * jax.grad(loss_fn)(W, part) for part in np.split(X, N)])
    error = np.abs(np.asarray(got) - np.asarray(exact))
    assert error.max() > 1e-6
    assert (error <= LOSS["bf16"] * np.abs(parts).mean(0)).all()


def test_parameters_are_never_compressed() -> None:
    large = 1000 + W / 3

    def from_parameters(w: Any, x: Any) -> Any:
        return in_a_loop(w / 1000, x, w), 0

    def moved_in_the_loop(w: Any, x: Any) -> Any:
        def turn(carry: Any, part: Any) -> Any:
            total, w = carry
            grad = jax.grad(loss_fn)(w / 1000, part)
            return (total + grad, w - 0.1 * grad), None

        total, w = jax.lax.scan(turn, (jnp.zeros_like(w), w), x.reshape(4, -1, x.shape[1]))[0]
        return w, total

    for step in (from_parameters, moved_in_the_loop):
        got, exact = (jaxdist.data_parallel(step, donate=False, compress=c)(large, X)[0] for c in ("bf16", None))
        np.testing.assert_allclose(got, exact, atol=0.02)  # of their last places in bfloat16: 4


def test_16_bit_and_complex_gradients_travel_as_they_are() -> None:
    def step(state: Any, x: Any) -> Any:
        def loss(s: Any) -> Any:
            return jnp.mean(x[:, :3].astype(jnp.bfloat16) * s["half"]) + jnp.mean(jnp.abs(x[:, :3] * s["complex"]) ** 2)

        return jax.grad(loss)(state), 0

    state = {"half": jnp.ones(3, jnp.bfloat16), "complex": jnp.asarray([1 + 1j, 0.3, 2j])}
    got, _ = jaxdist.data_parallel(step, donate=False, compress="fp16")(state, X)
    exact, _ = jaxdist.data_parallel(step, donate=False)(state, X)
    jax.tree.map(np.testing.assert_array_equal, got, exact)


def test_the_wire_is_16_bits_wide() -> None:
    step: Any = jaxdist.data_parallel(lambda w, x: (jax.grad(loss_fn)(w, x), 0), compress="bf16")
    text = step.lower(W, X).as_text()
    reductions = text.split("stablehlo.all_reduce")[1:]
    assert reductions
    assert all("bf16" in r.split("-> tensor")[1].split("\n")[0] for r in reductions), text


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_the_exchange_of_parts(size: int, op: Any) -> None:
    """What CPU processes do, the wire played by a stack of the devices' arrays."""
    xs = np.random.default_rng(size).normal(size=(N, size)).astype(np.float32)

    def on_device(x: Any) -> Any:
        return exchange.all_reduce(
            x, op, "bfloat16", N,
            all_to_all=lambda parts: jax.lax.all_to_all(parts, "d", 0, 0, tiled=True),
            all_gather=lambda part: jax.lax.all_gather(part, "d"),
        )  # fmt: skip

    got = np.asarray(jax.vmap(on_device, axis_name="d")(xs))
    right = xs.astype(np.float64).mean(0) if op == "mean" else xs.astype(np.float64).sum(0)
    scale = np.abs(xs).mean(0) if op == "mean" else np.abs(xs).sum(0)
    assert (got == got[0]).all()
    assert (np.abs(got[0] - right) <= LOSS["bf16"] * scale).all()


def test_unknown_compression() -> None:
    with pytest.raises(ValueError, match="'bf16' or 'fp16'"):
        jaxdist.data_parallel(lambda s, x: s, compress="int8")  # type: ignore[call-overload]
