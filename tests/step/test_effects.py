"""What a step changes outside of itself is noticed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray([1.0, -2.0, 0.5])
KEPT: list[Any] = []


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

    for step, where in ((in_a_list, r"losses\[0\]"), (in_a_global, r"KEPT\[0\]\['loss'\]"),
                        (Trainer().step, r"Trainer\.loss")):  # fmt: skip
        with pytest.raises(jaxdist.StepError, match=rf"keeps a result in {where}, outside"):
            jaxdist.data_parallel(step)(W, X)
    KEPT.clear()


def test_what_is_read_outside_is_no_change() -> None:
    scale = [jnp.asarray(2.0)]
    step = jaxdist.data_parallel(lambda w, x: w - scale[0] * x.mean(0))
    np.testing.assert_allclose(step(W, X), W - 2 * X.mean(0), rtol=1e-12)


def mixed(batch: Any) -> Any:
    """As scenic's mixup does."""
    batch["x"] = 0.7 * batch["x"] + 0.3 * batch["x"][::-1]
    return batch


def taken_out(batch: Any, w: Any) -> Any:
    y = batch.pop("y")
    batch["residual"] = batch["x"] @ w - y
    return jnp.mean(batch["residual"] ** 2)


def nested(batch: Any, w: Any) -> Any:
    batch["more"]["views"].append(batch["x"] * 2)
    batch["more"]["views"][0] = batch["more"]["views"][0] + 1
    return jnp.mean((sum(batch["more"]["views"]) @ w - batch["y"]) ** 2)


USES = {
    "replaced": lambda w, batch: jnp.mean((mixed(batch)["x"] @ w - batch["y"]) ** 2),
    "taken out": lambda w, batch: taken_out(batch, w),
    "nested": lambda w, batch: nested(batch, w),
    "summed over the axis": lambda w, batch: jax.lax.pmean(taken_out(batch, w), "batch"),
}


@pytest.mark.filterwarnings("ignore:.*was called inside a function that jax compiles")
@pytest.mark.parametrize("name", USES)
def test_a_batch_to_work_in(name: str) -> None:
    """However the step is called for one of them, in the usual way for the others."""

    def step(w: Any, batch: Any) -> Any:
        return w - 0.1 * jax.grad(USES[name])(w, batch)

    def batch() -> Any:
        return {"x": X, "y": np.ones(16), "more": {"views": [X]}}

    if "axis" in name:  # bound at size one
        want = jax.jit(jax.vmap(step, (None, 0), axis_name="batch"))(W, jax.tree.map(lambda x: x[None], batch()))[0]
    else:
        want = jax.jit(step)(W, batch())
    decorated = jaxdist.data_parallel(step)
    within = jaxdist.data_parallel(lambda w, batch: (decorated(w, batch), batch["y"].sum()))
    calls: dict[str, Any] = {"decorated": decorated}
    if name in ("nested", "summed over the axis"):
        calls |= {
            "named": jaxdist.data_parallel(step, batch_argnums="batch"),
            "off": jaxdist.data_parallel(step, enabled=False),
            "within a step": lambda w, batch: within(w, batch)[0],
            "under jit": jax.jit(lambda w, batch: (decorated(w, batch), batch["y"].sum())[0]),
        }
    for how, call in calls.items():
        given = batch()
        np.testing.assert_allclose(call(W, given), want, rtol=1e-12, err_msg=how)
        assert jax.tree.structure(given) == jax.tree.structure(batch()), "the caller's is as it was"
        assert given["x"] is X
        assert given["more"]["views"][0] is X
    with jax.disable_jit():
        np.testing.assert_allclose(decorated(W, batch()), want, rtol=1e-12)


def test_a_change_of_what_is_no_batch() -> None:
    def change(state: Any, name: str, result: Any) -> Any:
        state[name] = state[name] * 0.5
        return result

    cases: list[tuple[Any, Any, str]] = [
        (lambda state, x: change(state, "w", x.sum()), ({"w": W}, X), r"state\['w'\] in place, and does not return it"),
        (lambda w, settings, batch: change(settings, "rate", w - settings["rate"] * batch["x"].mean(0)),
         (W, {"rate": jnp.ones(())}, {"x": X}), r"settings\['rate'\] in place.*or work in a copy"),
    ]  # fmt: skip
    for step, args, said in cases:
        with pytest.raises(jaxdist.StepError, match=rf"changes its argument {said}"):
            jaxdist.data_parallel(step)(*args)
    step = jaxdist.data_parallel(lambda w, data: change(data, "n", w - data["x"].mean(0)), batch_argnums="data['x']")
    with pytest.raises(jaxdist.StepError, match=r"changes its argument data\['n'\] in place"):
        step(W, {"x": X, "n": 0})


def test_a_state_of_nnx_to_work_in() -> None:
    """A module that is merged from it shares its variables, and `nnx.remat` sets them anew."""
    graph, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)

    def step(state: Any, x: Any) -> Any:
        return jnp.sum(nnx.remat(lambda model, x: model(x))(nnx.merge(graph, state), x))

    np.testing.assert_allclose(jaxdist.data_parallel(step)(state, X), jax.jit(step)(state, X), rtol=1e-10)
