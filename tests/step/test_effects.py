"""What a step changes outside of itself is noticed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray([1.0, -2.0, 0.5])
KEPT: list[Any] = []


def test_an_argument_changed_in_place() -> None:
    @jaxdist.data_parallel
    def step(state: Any, x: Any) -> Any:
        state["w"] = state["w"] - 0.1 * x.mean(0)
        return x.sum()

    with pytest.raises(jaxdist.StepError, match=r"changes its argument state\['w'\] in place, and does not return it"):
        step({"w": W}, X)


def test_what_is_changed_and_returned_is_as_under_jit() -> None:
    def step(state: Any, batch: Any) -> Any:
        x = batch.pop("x")
        state["w"] -= 0.1 * x.mean(0)
        state["old"], state["older"] = state["w"], state["old"]
        return state

    given = {"w": W, "old": W, "older": W}
    expected = jax.jit(step)(dict(given), {"x": X})
    found = jaxdist.data_parallel(step)(given, {"x": X})
    jax.tree.map(np.testing.assert_allclose, found, expected)


def test_an_argument_to_work_in_whose_next_value_is_returned() -> None:
    """As optax's example of meta-learning does with the state of `inject_hyperparams`."""

    def loss(rate: Any, state: Any, w: Any, x: Any) -> Any:
        state["rate"] = jax.nn.sigmoid(rate)  # a value of the gradient's trace, which the step can't return
        state = {"rate": state["rate"], "w": w - state["rate"] * x.mean(0)}
        return (state["w"] ** 2).sum(), state

    def step(rate: Any, state: Any, x: Any) -> Any:
        grad, state = jax.grad(loss, has_aux=True)(rate, state, state["w"], x)
        return rate - 0.1 * grad, state

    expected = jax.jit(step)(0.5, {"w": W, "rate": jnp.zeros(())}, X)
    found = jaxdist.data_parallel(step)(0.5, {"w": W, "rate": jnp.zeros(())}, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


def test_a_result_kept_outside() -> None:
    losses: list[Any] = []

    class Trainer:
        loss: Any = None

        def step(self, w: Any, x: Any) -> Any:
            self.loss = x.mean()
            return w - self.loss

    def in_a_list(w: Any, x: Any) -> Any:
        losses.append(x.mean())
        return w - losses[-1]

    def in_a_global(w: Any, x: Any) -> Any:
        KEPT.append({"loss": x.mean()})
        return w - KEPT[-1]["loss"]

    with pytest.raises(jaxdist.StepError, match=r"keeps a result in losses\[0\], outside"):
        jaxdist.data_parallel(in_a_list)(W, X)
    with pytest.raises(jaxdist.StepError, match=r"keeps a result in KEPT\[0\]\['loss'\], outside"):
        jaxdist.data_parallel(in_a_global)(W, X)
    with pytest.raises(jaxdist.StepError, match=r"keeps a result in Trainer\.loss, outside"):
        jaxdist.data_parallel(Trainer().step)(W, X)
    KEPT.clear()


def test_what_is_read_outside_is_no_change() -> None:
    scale = [jnp.asarray(2.0)]
    step = jaxdist.data_parallel(lambda w, x: w - scale[0] * x.mean(0))
    np.testing.assert_allclose(step(W, X), W - 2 * X.mean(0), rtol=1e-12)
