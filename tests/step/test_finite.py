"""`check_finite`: the leaf, the kind, the count and the device, from inside a step or beside it."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdist

X = np.ones((8, 3))


def with_nan(row: int) -> np.ndarray:
    x = X.copy()
    x[row, 1] = np.nan
    return x


def test_gradients_are_named_and_the_state_given_survives() -> None:
    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean((x @ w["a"] + w["b"]) ** 2))(w)
        grads = jaxdist.check_finite(grads, "grads")
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)

    w = step({"a": jnp.ones(3), "b": jnp.zeros(())}, X)
    message = r"step '.*step', call 2: grads\['a'\] is not finite: 3 NaN on every device\. \(1 more of what was checked"
    with pytest.raises(FloatingPointError, match=message):
        step(w, with_nan(5))
    assert np.isfinite(np.asarray(w["a"])).all()
    assert np.isfinite(np.asarray(step(w, X)["a"])).all()


def test_what_a_device_has_of_its_own_names_the_device() -> None:
    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        logits = x * w
        loss = jaxdist.check_finite({"n": jnp.arange(3), "logits": logits, "loss": jnp.mean(logits)}, "out")["loss"]
        return w, loss

    step(jnp.float32(1), X)
    with pytest.raises(FloatingPointError, match=r"out\['logits'\] is not finite: 1 NaN on device 5\. \(1 more"):
        step(jnp.float32(1), with_nan(5))
    x = with_nan(2)
    x[6] = [np.inf, -np.inf, 1]
    with pytest.raises(FloatingPointError, match=r"out\['logits'\] is not finite: 1 NaN and 2 infinite on device 2, 6"):
        step(jnp.float32(1), x)


@pytest.mark.parametrize("level", [0, 2, 3])
def test_in_shards(level: Literal[0, 2, 3]) -> None:
    where = "device 0, 1, 2, 3, 4, 5" if level else "every device"  # 11 columns in slices of two
    tx = jaxdist.zero(optax.adam(0.1), level)

    @jaxdist.data_parallel(check_finite=True)
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["b"] ** 2))(params)
        jaxdist.check_finite(grads, "grads")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"b": jnp.ones(13), "w": jnp.ones((3, 11))}
    params, opt_state, _ = step(params, tx.init(params), X)
    with pytest.raises(FloatingPointError, match=rf"call 2: grads\['w'\] is not finite: 33 NaN on {where}"):
        step(params, opt_state, with_nan(0))
    step(params, opt_state, X)  # nothing is lost


def test_the_result_of_a_step_in_shards_is_looked_at() -> None:
    step = jaxdist.data_parallel(
        lambda params, x: ({"w": params["w"] / (jnp.mean(x) * params["d"])}, jnp.mean(x)), check_finite=True
    )
    params = {"w": jaxdist.shard(jnp.arange(1.0, 12.0)), "d": jnp.ones(11).at[3].set(0.0)}
    with pytest.raises(FloatingPointError, match=r"result\[0\]\['w'\] is not finite: 1 infinite on device 1"):
        step(params, X)


def test_a_step_that_jax_types_refuse() -> None:
    def loss(w: Any, x: Any) -> Any:  # the branches differ in what varies
        return lax.cond(w[0] > 0, lambda: jnp.mean((x @ w) ** 2), lambda: jnp.zeros(()))

    @jaxdist.data_parallel(check_finite=True)
    def step(w: Any, x: Any) -> Any:
        value, grads = jaxdist.value_and_grad(loss)(w, x)
        jaxdist.check_finite((value, grads), "step")
        return w - 0.1 * grads, value

    w, _ = step(jnp.ones(3), X)
    with pytest.raises(FloatingPointError, match=r"call 2: step\[0\] is not finite: 1 NaN on .*\(3 more"):
        step(w, with_nan(3))


INNER: dict[str, Any] = {
    "grad": lambda look, w: jax.grad(look)(w),
    "scan": lambda look, w: lax.scan(lambda c, v: (c + look(v), None), 0.0, w)[0],
    "cond": lambda look, w: lax.cond(w[0] > 0, look, jnp.sum, w),
    "jit": lambda look, w: jax.jit(look)(w),
    "vmap": lambda look, w: jax.vmap(look)(w),
}


@pytest.mark.parametrize("inner", INNER)
def test_inside_of_inner_traces_it_says_what_to_do(inner: str) -> None:
    look = lambda v: jnp.sum(jaxdist.check_finite(v, "v"))
    step = jaxdist.data_parallel(lambda w, x: (w, jnp.sum(INNER[inner](look, w)) + jnp.mean(x)))
    with pytest.raises(jaxdist.StepError, match=r"check_finite\(\.\.\., 'v'\) is called inside a function"):
        step(jnp.ones(3), X)


def test_outside_of_a_step() -> None:
    tree = {"a": jnp.ones(2), "n": 3, "p": jaxdist.shard(jnp.arange(9.0)), "h": np.array([1.0, np.inf])}
    with pytest.raises(FloatingPointError, match=r"grads\['h'\] is not finite: 1 infinite\."):
        jaxdist.check_finite(tree, "grads")
    good = tree | {"h": np.ones(2)}
    assert jaxdist.check_finite(good) is good
    assert np.isnan(jax.jit(jaxdist.check_finite)(jnp.float32(np.nan)))


def test_a_step_that_asks_for_nothing_has_no_more_outputs() -> None:
    step: Any = jaxdist.data_parallel(lambda w, x: (w, jnp.mean(x)))
    assert "all_gather" not in step.lower(jnp.ones(3), X).as_text()
