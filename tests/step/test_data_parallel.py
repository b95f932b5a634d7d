"""`data_parallel` on virtual devices: what comes back, what is compiled, what is refused."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import optax
import parity
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


@pytest.mark.optimised
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


@pytest.mark.optimised
def test_microbatches_compile_to_as_many_reductions_as_one_batch() -> None:
    def step_of(k: int) -> Any:
        @jaxdist.data_parallel(bucket_bytes=0)
        def step(w: Any, x: Any) -> Any:
            loss, grad = jaxdist.value_and_grad(loss_fn, microbatches=k)(w, x)
            return w - grad, loss

        return step

    assert collectives(step_of(1), W, X) == collectives(step_of(2), W, X) == {"all-reduce": 2}


@pytest.mark.optimised
def test_microbatches_of_a_loop_over_layers_are_reduced_outside_of_loops() -> None:
    """In the compiled program: none of the computations that loops run has a reduction in it."""

    def loss_of(ws: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    @jaxdist.data_parallel
    def step(ws: Any, x: Any) -> Any:
        loss, grads = jaxdist.value_and_grad(loss_of, microbatches=2)(ws, x)
        return ws - grads, loss

    text = step.lower(jnp.ones((4, 48, 48)), jnp.ones((32, 48))).compile().as_text()  # type: ignore[attr-defined]
    inside, main = text.split("ENTRY ")
    assert "while(" in main
    assert "all-reduce" not in inside
    assert collectives(step, jnp.ones((4, 48, 48)), jnp.ones((32, 48))) == {"all-reduce": 1}


def test_gradient_of_a_broadcast_parameter_does_not_travel_as_a_batch() -> None:
    @jaxdist.data_parallel
    def step(s: Any, x: Any) -> Any:
        scaled = jnp.ones((x.shape[0], 1)) * s  # replicated, and as long as the batch
        return s - jax.grad(lambda s: jnp.mean(jnp.where(x > 0, x, s) * scaled * s))(s), 0

    text = step.lower(jnp.asarray(0.5), X).as_text()  # type: ignore[attr-defined]
    types = re.findall(r"stablehlo.all_reduce.*?\}\) : \((.*?)\)", text, re.DOTALL)
    assert types == ["tensor<f64>"], types


@pytest.mark.optimised
def test_the_axis_has_size_one() -> None:
    def step(w: Any, x: Any) -> Any:
        everyone = lax.all_gather(jnp.sum(x), "data")
        aux = {
            "total": lax.psum(jnp.sum(x), "data"), "mean": lax.pmean(x.mean(0), "data"), "everyone": everyone,
            "largest": lax.pmax(x.max(), "data"), "index": lax.axis_index("data"), "size": lax.psum(1, "data"),
            "scattered": lax.psum_scatter(x.T, "data", tiled=True), "moved": lax.ppermute(w, "data", [(0, 0)]),
            "exchanged": lax.all_to_all(x, "data", 0, 1, tiled=True), "parts": lax.axis_size("data"),
        }  # fmt: skip
        return w - lax.pmean(jax.grad(loss_fn)(w, x), "data"), aux

    decorated = jaxdist.data_parallel(step, donate=False)
    assert "all-gather" not in collectives(decorated, W, X)
    w, aux = decorated(W, X)
    np.testing.assert_allclose(w, W - jax.grad(loss_fn)(W, X), rtol=1e-12)
    np.testing.assert_allclose(aux["total"], X.sum())
    np.testing.assert_allclose(aux["mean"], X.mean(0))
    np.testing.assert_allclose(aux["everyone"], X.sum()[None])
    np.testing.assert_array_equal(aux["largest"], X.max())
    assert (int(aux["index"]), int(aux["size"]), int(aux["parts"])) == (0, 1, 1)
    np.testing.assert_array_equal(aux["scattered"], X.T)
    np.testing.assert_array_equal(aux["moved"], W)
    np.testing.assert_array_equal(aux["exchanged"], X)
    for plain in (jaxdist.data_parallel(step, enabled=False), jax.jit(jaxdist.data_parallel(step, enabled=False))):
        got = plain(W, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, (w, aux))


def test_the_axis_by_other_names(caplog: pytest.LogCaptureFixture) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - lax.pmean(jax.grad(loss_fn)(w, x), "batch")

    expected = W - jax.grad(loss_fn)(W, X)
    with caplog.at_level(logging.INFO, "jaxdist"):
        np.testing.assert_allclose(jaxdist.data_parallel(step)(W, X), expected, rtol=1e-12)
    assert sum("'batch' is taken for that of data parallelism" in m for m in caplog.messages) == 1
    np.testing.assert_allclose(jaxdist.data_parallel(step, axis_name="batch")(W, X), expected, rtol=1e-12)
    one = parity.mesh(1)
    np.testing.assert_allclose(jaxdist.data_parallel(step, mesh=one)(W, X), expected, rtol=1e-12)

    def both(w: Any, x: Any) -> Any:
        return w + lax.pmean(lax.psum(x.mean(), "rows"), "columns")

    with pytest.raises(jaxdist.StepError, match="two axes that nothing binds, 'rows' and 'columns'"):
        jaxdist.data_parallel(both)(W, X)

    def own(w: Any, x: Any) -> Any:  # an axis that the step binds itself is its own
        return w + jax.vmap(lambda row: row.sum() - lax.pmean(row.sum(), "rows"), axis_name="rows")(x).max()

    np.testing.assert_allclose(jaxdist.data_parallel(own)(W, X), own(W, X), rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: lax.ppermute(x, "data", [(0, 1)]), "the permutation"),
        (lambda x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]), "groups of several devices"),
    ],
)
def test_what_reaches_beyond_the_axis_is_refused(call: Any, words: str) -> None:
    with pytest.raises((jaxdist.StepError, ValueError), match=words):
        jaxdist.data_parallel(lambda w, x: (w, call(x)))(W, X)


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


@pytest.mark.parametrize("rows", [1, 9, 15])
def test_any_number_of_examples(rows: int) -> None:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_fn)(w, x)
        aux = {"loss": loss, "rows": x[:, 0], "count": jnp.sum(x > 0), "size": x.shape[0], "largest": x.max()}
        return w - 0.1 * grad, aux

    x = np.random.default_rng(rows).normal(size=(rows, 3))
    got = jaxdist.data_parallel(step)(W, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, step(W, x))


@pytest.mark.parametrize(
    ("state", "batch", "step"),
    [
        ((0, 8), (4, 0), lambda w, x: (w, x @ w)),
        ((0, 8), (8, 0), lambda w, x: (w + 1, (x @ w).sum())),
        ((0, 8), (4, 0), lambda w, x: (w * 2, x)),
        ((0, 8), (4, 2), lambda w, x: (w, x[:, :0])),
    ],
)
def test_arrays_without_entries(state: tuple[int, ...], batch: tuple[int, ...], step: Any) -> None:
    args = jnp.zeros(state), jnp.zeros(batch)
    want, got = jax.jit(step)(*args), jaxdist.data_parallel(step)(*args)
    jax.tree.map(np.testing.assert_array_equal, got, want)


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
    plain = jaxdist.data_parallel(sgd, enabled=False)
    assert plain.__wrapped__ is sgd  # type: ignore[attr-defined]
    got = plain(W, X)
    np.testing.assert_array_equal(got[0], sgd(W, X)[0])
    assert len(got[0].devices()) == 1


def test_fold_rank_is_the_identity_outside_of_per_device() -> None:
    key = jax.random.key(0)

    @jaxdist.data_parallel(donate=False)
    def step(key: Any, x: Any) -> Any:
        return key, jax.random.uniform(jaxdist.fold_rank(key), x.shape)

    _, draws = step(key, X)
    np.testing.assert_array_equal(draws, jax.random.uniform(key, X.shape))
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


def test_a_model_that_types_refuse_is_an_ordinary_one() -> None:
    def odd(w: Any, x: Any) -> Any:  # of the branches one depends on the batch
        return lax.cond(w[0, 0] > 0, lambda: jnp.mean((x @ w) ** 2), lambda: jnp.zeros(()))

    w = jnp.abs(W)
    for value_and_grad in (jax.value_and_grad, jaxdist.value_and_grad):
        step = lambda w, x, f=value_and_grad: (w - 0.1 * f(odd)(w, x)[1], f(odd)(w, x)[0])
        got, want = jaxdist.data_parallel(step)(w, X), step(w, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)


def test_an_aux_value_that_looks_like_a_state_argument_is_aux() -> None:
    @jaxdist.data_parallel
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


def test_on_tracers_it_is_the_plain_step() -> None:
    step = jaxdist.data_parallel(sgd, donate=False)
    expected = sgd(W, X)
    got = jax.eval_shape(step, W, X)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(lambda a: (a.shape, a.dtype), expected)
    assert "jaxdist_plain" in str(jax.make_jaxpr(step)(W, X))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.grad(lambda w: step(w, X)[1])(W),
        jax.grad(lambda w: sgd(w, X)[1])(W),
    )
    many = jax.vmap(step, (0, None))(jnp.stack([W, 2 * W]), X)
    np.testing.assert_allclose(many[0][1], sgd(2 * W, X)[0], rtol=1e-12)
    with pytest.warns(UserWarning, match="runs on one of 8 devices. Decorate the outer function"):
        got = jax.jit(step)(W, X)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
    with pytest.warns(UserWarning, match="plain step"):
        lax.scan(lambda w, x: step(w, x), W, X[None])


def test_a_decorated_step_in_a_decorated_step() -> None:
    inner = jaxdist.data_parallel(sgd)

    @jaxdist.data_parallel
    def outer(w: Any, x: Any) -> Any:
        w, first = inner(w, x)
        w, losses = lax.scan(inner, w, jnp.stack([x, 2 * x]))
        return w, (first, losses)

    w, first = sgd(W, X)
    w, second = sgd(w, X)
    w, third = sgd(w, 2 * X)
    got, (one, rest) = outer(W, X)
    np.testing.assert_allclose(got, w, rtol=1e-12)
    np.testing.assert_allclose([one, *rest], [first, second, third], rtol=1e-12)


def test_leaves_of_the_batch_may_differ_in_length() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(loss_fn)(w, x["a"]) - jax.grad(loss_fn)(w, x["b"])

    batch = {"a": X, "b": X[:5]}
    np.testing.assert_allclose(jaxdist.data_parallel(step)(W, batch), step(W, batch), rtol=1e-12)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X[:0], r"x is empty \(shape \(0, 3\)\)"),
        (np.float64(3.0), r"x is a scalar"),
        (3.0, r"x is a scalar"),
        ("digits", r"x .*not an array"),
        ({"a": X, "b": None, "c": "name"}, r"x\['c'\] .*not an array"),
    ],
)
def test_bad_batches(batch: Any, message: str) -> None:
    @jaxdist.data_parallel(batch_argnums=1)
    def step(w: Any, x: Any) -> Any:
        return w

    with pytest.raises((ValueError, TypeError), match=message):
        step(W, batch)
    np.testing.assert_array_equal(step(W, X), W)  # nothing is lost


def test_bad_settings() -> None:
    with pytest.raises(TypeError, match="reduce"):
        jaxdist.data_parallel(sgd, reduce="sum")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="axis_name=3"):
        jaxdist.data_parallel(sgd, axis_name=3)  # type: ignore[call-overload]
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


@pytest.mark.optimised
@pytest.mark.parametrize("devices", [1, 2])
def test_on_one_device_nothing_is_reduced(devices):
    mesh = parity.mesh(devices)

    @jaxdist.data_parallel(mesh=mesh)
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    text = step.lower(jnp.ones(3), jnp.ones((8, 3))).compile().as_text()  # type: ignore[attr-defined]
    assert ("all-reduce" in str(text)) == (devices > 1)


def test_no_state_and_a_constant():
    @jaxdist.data_parallel(batch_argnums=0)
    def step(batch, how):
        return jnp.max(batch) if how == "max" else jnp.mean(batch)

    for how, expected in (("mean", X.mean()), ("mean", X.mean()), ("max", X.max()), ("mean", X.mean())):
        assert abs(float(step(X, how)) - expected) < 1e-12


def test_states_of_several_types_take_turns_under_one_step() -> None:
    traces = []

    @jaxdist.data_parallel(donate=False)
    def step(state: Any, x: Any) -> Any:
        traces.append(1)
        return state - jnp.mean(x) * state

    strong = jnp.asarray(2.0, jnp.result_type(float))
    states = [jnp.ones(3), jnp.ones((2, 2)), jnp.asarray(2.0), strong]  # of these two the first type is weak
    for _ in range(4):
        for state in states:
            np.testing.assert_allclose(np.asarray(step(state, jnp.full(8, 0.25))), 0.75 * np.asarray(state))
    assert len(traces) <= 2 * len(states)


_MANY_CALLS = """
import jax, jax.numpy as jnp, numpy as np
import jaxdist

@jaxdist.data_parallel
def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return w - grad, loss

@jaxdist.data_parallel
def evaluate(w, x):
    return (x @ w).sum()

w, x = jnp.ones((512, 512)), np.ones((64, 512), np.float32)
for _ in range(400):
    w, loss = step(w, x)
found = [evaluate(w, x) for _ in range(400)]
print("fine", jnp.isfinite(loss), len(set(map(float, found))))
"""


@pytest.mark.slow
def test_a_loop_may_run_ahead_of_virtual_devices() -> None:
    """As many threads as devices: XLA alone would end the process after a minute (`program._AHEAD`)."""
    devices = "--xla_force_host_platform_device_count=2"
    env = jobs.environment({"XLA_FLAGS": devices, "PJRT_NPROC": "2", "NPROC": "2"})
    command = [sys.executable, "-c", _MANY_CALLS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "fine True 1\n", done.stdout + done.stderr
