"""`data_parallel` on virtual devices: what comes back, what is compiled, what is refused."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)))


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def sgd(w: Any, x: Any) -> Any:
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    return w - 0.1 * grad, loss


def collectives(step: Any, *args: Any) -> dict[str, int]:
    """The collectives of the compiled step and the number of operands (tensors) of each kind."""
    text = step.lower(*args).compile().as_text()
    found: dict[str, int] = {}
    for kind, operands in re.findall(
        r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(([^)]*)\)",
        text,
    ):
        found[kind] = found.get(kind, 0) + operands.count("%")
    return found


# --- what is compiled


def test_plain_step_holds_one_all_reduce_a_gradient_and_aux() -> None:
    params = {"w": W, "b": jnp.zeros(2), "unused": jnp.ones(3)}
    tx = optax.adam(1e-2)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    args = params, tx.init(params), X
    assert collectives(jaxdist.data_parallel(step, bucket_bytes=0), *args) == {"all-reduce": 3}  # w, b, loss
    assert collectives(jaxdist.data_parallel(step), *args) == {"all-reduce": 1}


def test_microbatches_compile_to_as_many_reductions_as_one_batch() -> None:
    def step_of(k: int) -> Any:
        @jaxdist.data_parallel(bucket_bytes=0)
        def step(w: Any, x: Any) -> Any:
            loss, grad = jaxdist.value_and_grad(loss_fn, microbatches=k)(w, x)
            return w - grad, loss

        return step

    assert collectives(step_of(1), W, X) == collectives(step_of(2), W, X) == {"all-reduce": 2}


def test_tied_parameter_is_reduced_once() -> None:
    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean((x @ w @ w.T @ w) ** 2))(w), 0

    assert collectives(step, W, X) == {"all-reduce": 1}


def test_gradient_of_a_broadcast_parameter_does_not_travel_as_a_batch() -> None:
    @jaxdist.data_parallel
    def step(s: Any, x: Any) -> Any:
        scaled = jnp.ones((x.shape[0], 1)) * s  # replicated, and as long as the batch
        return s - jax.grad(lambda s: jnp.mean(jnp.where(x > 0, x, s) * scaled * s))(s), 0

    text = step.lower(jnp.asarray(0.5), X).as_text()  # type: ignore[attr-defined]
    types = re.findall(r"stablehlo.all_reduce.*?\}\) : \((.*?)\)", text, re.DOTALL)
    assert types == ["tensor<f64>"], types


def test_user_collectives_stay() -> None:
    def step(w: Any, x: Any) -> Any:
        total = lax.psum(jnp.sum(x), "data")
        everyone = lax.all_gather(jnp.sum(x), "data")
        return w - jax.grad(loss_fn)(w, x), {"total": total, "sum": jnp.sum(everyone)}

    decorated = jaxdist.data_parallel(step)
    assert collectives(decorated, W, X)["all-gather"] == 1
    _, aux = decorated(W, X)
    np.testing.assert_allclose(aux["total"], X.sum())
    np.testing.assert_allclose(aux["sum"], X.sum())


# --- what comes back


def test_aux_rules() -> None:
    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        aux = {
            "mean": jnp.mean(x),
            "count": jnp.sum(x > 0),
            "rows": x[:, 0],
            "same": jnp.sum(w),
            "step": jnp.asarray(3),
        }
        return w, aux

    w, aux = step(W, X)
    np.testing.assert_allclose(aux["mean"], X.mean())
    assert aux["count"] == (X > 0).sum()
    np.testing.assert_array_equal(aux["rows"], X[:, 0])
    np.testing.assert_allclose(aux["same"], W.sum())
    assert aux["step"] == 3
    assert w.sharding.is_fully_replicated
    np.testing.assert_array_equal(w, W)


def test_reduce_sum_sums_gradients_and_losses() -> None:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 0.01 * grad, loss

    expected = step(W, X)
    got = jaxdist.data_parallel(step, reduce="sum")(W, X)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)


def test_batch_norm_statistics_of_local_data_are_averaged() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.BatchNorm(use_running_average=False, momentum=0.9, param_dtype=jnp.float64, dtype=jnp.float64)(x)
            return nn.Dense(1, param_dtype=jnp.float64)(x)

    model = Net()
    variables = model.init(jax.random.key(0), X[:1])

    @jaxdist.data_parallel
    def step(variables: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.mean(out**2), new["batch_stats"]

        grads, stats = jax.grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {"params": params, "batch_stats": stats}, 0.0

    new, _ = step(variables, X)
    stats = new["batch_stats"]["BatchNorm_0"]
    parts = X.reshape(8, 2, 3)
    np.testing.assert_allclose(stats["mean"], 0.1 * X.mean(0), rtol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * parts.var(1).mean(0), rtol=1e-6)


def test_several_batches_keywords_and_named_positions() -> None:
    @jaxdist.data_parallel(batch_argnums=(1, 2))
    def step(w: Any, x: Any, y: Any, scale: Any = 0.1) -> Any:
        return w - scale * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)

    y = X[:, :2]
    expected = W - 0.2 * jax.grad(lambda w: jnp.mean((X @ w - y) ** 2))(W)
    np.testing.assert_allclose(step(W, X, y, 0.2), expected, rtol=1e-12)
    np.testing.assert_allclose(step(W, y=y, x=X, scale=0.2), expected, rtol=1e-12)


def test_global_arrays_are_taken_as_they_are() -> None:
    step = jaxdist.data_parallel(sgd)
    mesh = jaxdist.get_context().mesh
    batch = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    np.testing.assert_allclose(step(W, batch)[0], sgd(W, X)[0], rtol=1e-12)


def test_no_batch_at_all() -> None:
    step = jaxdist.data_parallel(lambda w: w * 2, batch_argnums=())
    np.testing.assert_array_equal(step(W), W * 2)


def test_state_given_stays_usable_and_state_returned_is_donated() -> None:
    step = jaxdist.data_parallel(sgd)
    first, _ = step(W, X)
    again, _ = step(first, X)
    assert first.is_deleted()
    np.testing.assert_allclose(again, sgd(sgd(W, X)[0], X)[0], rtol=1e-12)
    kept = jaxdist.data_parallel(sgd, donate=False)
    first, _ = kept(W, X)
    kept(first, X)
    assert not first.is_deleted()
    host = np.array(W)
    step(host, X)
    np.testing.assert_array_equal(host, W)


def test_one_array_twice_in_the_state() -> None:
    @jaxdist.data_parallel
    def step(state: Any, x: Any) -> Any:
        grad = jax.grad(loss_fn)(state["w"], x)
        return {"w": state["w"] - grad, "average": 0.9 * state["average"] + 0.1 * state["w"]}

    first = step({"w": W, "average": W}, X)
    placed = first["w"]
    twice = step({"w": placed, "average": placed}, X)
    np.testing.assert_allclose(twice["average"], first["w"] if not placed.is_deleted() else twice["average"])


def test_bit_identical_twice() -> None:
    def run() -> Any:
        step, w = jaxdist.data_parallel(sgd), W
        losses = []
        for _ in range(3):
            w, loss = step(w, X)
            losses.append(np.asarray(loss))
        return np.asarray(w), np.asarray(losses)

    a, b = run(), run()
    assert a[0].tobytes() == b[0].tobytes()
    assert a[1].tobytes() == b[1].tobytes()


def test_programs_are_compiled_once() -> None:
    traces = []

    @jaxdist.data_parallel
    def step(state: Any, x: Any) -> Any:
        traces.append(1)
        return {"w": state["w"] - jax.grad(loss_fn)(state["w"], x), "n": state["n"] + 1}, jnp.mean(x)

    state = {"w": W, "n": 0}
    with jax.log_compiles(False):
        for _ in range(3):
            state, _ = step(state, X)
    assert len(traces) == 1
    assert state["n"] == 3


def test_enabled_false_is_the_step_itself() -> None:
    assert jaxdist.data_parallel(sgd, enabled=False) is sgd


def test_fold_rank_differs_between_devices() -> None:
    key = jax.random.key(0)

    @jaxdist.data_parallel
    def step(key: Any, x: Any) -> Any:
        return key, jax.random.uniform(jaxdist.fold_rank(key), (1,))

    _, draws = step(key, X)
    assert len(set(np.asarray(draws).tolist())) == 8
    assert jaxdist.fold_rank(key) == key


def test_method_and_name() -> None:
    class Trainer:
        @jaxdist.data_parallel
        def step(self: Any, x: Any) -> Any:  # the instance is no array: a constant
            """Doc."""
            return jnp.mean(x) * self.scale

        scale = 2.0

    trainer = Trainer()
    np.testing.assert_allclose(trainer.step(X), 2 * X.mean())
    assert Trainer.step.__doc__ == "Doc."


def test_check_finite_names_step_and_leaf() -> None:
    @jaxdist.data_parallel(check_finite=True)
    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] * lax.pmean(jnp.mean(x), "data"), "b": state["b"]}, jnp.sum(state["b"])

    state = {"w": W, "b": jnp.zeros(2)}
    state, _ = step(state, np.ones((8, 1)))
    with pytest.raises(FloatingPointError, match=r"step\.?.*call 2: result\[0\]\['w'\] is not finite"):
        step(state, np.full((8, 1), np.nan))


# --- what is refused


def test_parameters_moved_by_local_gradients_are_refused() -> None:
    @jaxdist.data_parallel
    def step(state: Any, x: Any) -> Any:
        local = lax.pcast(state["w"], "data", to="varying")
        return {"w": state["w"] - jax.grad(loss_fn)(local, x)}, 0

    with pytest.raises(jaxdist.StepError, match=r"state leaf state\['w'\] .*would differ between devices"):
        step({"w": W}, X)


def test_integers_made_of_local_data_are_refused() -> None:
    @jaxdist.data_parallel
    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"], "seen": state["seen"] + jnp.sum(x > 0)}, 0

    with pytest.raises(jaxdist.StepError, match=r"state\['seen'\].*int.*can't be averaged"):
        step({"w": W, "seen": jnp.zeros((), int)}, X)


def test_untyped_model_with_plain_grad_is_told_the_mend() -> None:
    def odd(w: Any, x: Any) -> Any:  # a branch that JAX's types refuse
        return lax.cond(w[0, 0] > 0, lambda: jnp.mean((x @ w) ** 2), lambda: jnp.zeros(()))

    def step_of(value_and_grad: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            loss, grad = value_and_grad(odd)(w, x)
            return w - 0.1 * grad, loss

        return step

    w = jnp.abs(W)
    with pytest.raises(jaxdist.StepError, match=r"state leaf w .*jaxdist\.value_and_grad"):
        jaxdist.data_parallel(step_of(jax.value_and_grad))(w, X)
    expected = step_of(jax.value_and_grad)(w, X)
    got = jaxdist.data_parallel(step_of(jaxdist.value_and_grad))(w, X)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)


def test_a_collective_that_some_devices_would_skip_is_refused() -> None:
    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        positive = jnp.sum(x) > 0  # of this device's data
        return w - lax.cond(positive, lambda: jax.grad(loss_fn)(w, x), lambda: jnp.zeros_like(w)), 0

    with pytest.raises(jaxdist.StepError, match="condition differs between devices"):
        step(W, X)


def test_per_example_gradients_are_refused_and_the_mend_is_right() -> None:
    def private(w: Any, x: Any) -> Any:  # DP-SGD: clip each example's gradient
        return jax.vmap(jax.grad(loss_fn), (None, 0))(w, x)

    def clipped(grads: Any) -> Any:
        norms = jnp.sqrt(jnp.sum(grads**2, (1, 2), keepdims=True))
        return jnp.mean(grads / jnp.maximum(1, norms), 0)

    with pytest.raises(jaxdist.StepError, match="one entry an example"):
        jaxdist.data_parallel(lambda w, x: w - clipped(private(w, x)))(W, X)

    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        local = lax.pcast(w, "data", to="varying")
        return w - lax.pmean(clipped(private(local, x)), "data")

    np.testing.assert_allclose(step(W, X), W - clipped(private(W, X)), rtol=1e-12)


def test_ensembles_are_not_taken_for_per_example_gradients() -> None:
    def step(ws: Any, x: Any) -> Any:  # as many members as a device has examples
        return ws - jax.vmap(jax.grad(loss_fn), (0, None))(ws, x)

    ws = jnp.stack([W, 2 * W])
    np.testing.assert_allclose(jaxdist.data_parallel(step)(ws, X), step(ws, X), rtol=1e-12)


def test_per_example_gradients_in_a_loop_are_refused() -> None:
    def private(w: Any, x: Any) -> Any:
        grads = lax.map(lambda row: jax.grad(loss_fn)(w, row), x)
        return w - jnp.mean(grads / jnp.maximum(1, jnp.abs(grads)), 0)

    with pytest.raises(jaxdist.StepError, match="loop of 2 turns"):
        jaxdist.data_parallel(private)(W, X)


def test_totals_and_queues_of_local_data_are_refused() -> None:
    def total(state: Any, x: Any) -> Any:
        return {"sum": state["sum"] + jnp.sum(x), "w": state["w"]}, 0

    with pytest.raises(jaxdist.StepError, match=r"state\['sum'\].*no running average"):
        jaxdist.data_parallel(total)({"sum": jnp.zeros(()), "w": W}, X)

    def queue(state: Any, x: Any) -> Any:
        return {"queue": jnp.concatenate([x, state["queue"]])[:4], "w": state["w"]}, 0

    with pytest.raises(jaxdist.StepError, match=r"state\['queue'\]"):
        jaxdist.data_parallel(queue)({"queue": jnp.zeros((4, 3)), "w": W}, X)


def test_an_aux_value_that_looks_like_a_state_argument_is_aux() -> None:
    @jaxdist.data_parallel(reduce="sum")
    def step(w: Any, lr: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - lr * grad, loss

    _, loss = step(W, 0.01, X)
    np.testing.assert_allclose(loss, np.sum((X @ W) ** 2), rtol=1e-12)

    @jaxdist.data_parallel
    def count(seed: Any, temperature: Any, x: Any) -> Any:
        return jnp.sum(x > 0), jnp.mean(x / temperature)

    counted, mean = count(3, 2.0, X)
    assert counted == (X > 0).sum()
    np.testing.assert_allclose(mean, X.mean() / 2)


def test_called_on_traced_values() -> None:
    step = jaxdist.data_parallel(sgd)
    with pytest.raises(TypeError, match="traced values"):
        jax.jit(step)(W, X)


def test_gradients_through_gradients() -> None:
    def penalised(w: Any, x: Any) -> Any:
        return loss_fn(w, x) + jnp.sum(jax.grad(loss_fn)(w, x) ** 2)

    def step_of(value_and_grad: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            loss, grad = value_and_grad(penalised)(w, x)
            return w - 0.1 * grad, loss

        return step

    expected = step_of(jax.value_and_grad)(W, X)
    for value_and_grad in (jax.value_and_grad, jaxdist.value_and_grad):
        got = jaxdist.data_parallel(step_of(value_and_grad))(W, X)
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
    with pytest.raises(jaxdist.StepError, match="takes gradients itself"):
        jaxdist.data_parallel(step_of(lambda f: jaxdist.value_and_grad(f, microbatches=2)))(W, X)


def test_one_helper_in_steps_with_sums_and_with_means() -> None:
    helper = jax.jit(lambda w, x: jaxdist.grad(loss_fn, microbatches=2)(w, x))
    summed = jaxdist.data_parallel(lambda w, x: helper(w, x), reduce="sum")(W, X)
    mean = jaxdist.data_parallel(lambda w, x: helper(w, x))(W, X)
    np.testing.assert_allclose(mean, jax.grad(loss_fn)(W, X), rtol=1e-12)
    np.testing.assert_allclose(summed, 16 * mean, rtol=1e-12)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X[:15], r"x has 15 examples .* can't be divided over 8 devices"),
        (X[:0], r"x is empty \(shape \(0, 3\)\)"),
        (np.float64(3.0), r"x is a scalar"),
        (3.0, r"x is a scalar"),
        ({"a": X, "b": X[:8]}, r"different numbers of examples: x\['a'\] has 16, x\['b'\] has 8"),
        ("digits", r"x .*not an array"),
        ({"a": X, "b": None, "c": "name"}, r"x\['c'\] .*not an array"),
    ],
)
def test_bad_batches(batch: Any, message: str) -> None:
    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        return w

    with pytest.raises((ValueError, TypeError), match=message):
        step(W, batch)
    np.testing.assert_array_equal(step(W, X), W)  # nothing is lost


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="reduce='average'"):
        jaxdist.data_parallel(sgd, reduce="average")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="one, named 'data'"):
        jaxdist.data_parallel(sgd, mesh=Mesh(jax.devices(), ("model",)))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="batch_argnums"):
        jaxdist.data_parallel(batch_argnums=2)(sgd)(W, X)
    with pytest.raises(TypeError, match="decorates a function"):
        jaxdist.data_parallel(3)  # type: ignore[call-overload]


def test_errors_of_the_step_itself_are_its_own() -> None:
    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        return x @ x

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        step(W, X)


@pytest.mark.parametrize("devices", [1, 2])
def test_on_one_device_nothing_is_reduced(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))

    @jaxdist.data_parallel(mesh=mesh)
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    text = step.lower(jnp.ones(3), jnp.ones((8, 3))).compile().as_text()  # type: ignore[attr-defined]
    assert ("all-reduce" in text) == (devices > 1)


def test_no_state_and_a_constant():
    @jaxdist.data_parallel(batch_argnums=0)
    def step(batch, how):
        return jax.lax.pmax(jnp.max(batch), "data") if how == "max" else jnp.mean(batch)

    for how, expected in (("mean", X.mean()), ("mean", X.mean()), ("max", X.max()), ("mean", X.mean())):
        assert abs(float(step(X, how)) - expected) < 1e-12
