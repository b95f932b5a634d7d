"""`data_parallel` on virtual devices: what comes back, what is compiled, what is refused."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import jobs, parity
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


def same(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)


def compiled(step: Any, *args: Any) -> str:
    return step.lower(*args).compile().as_text()


def collectives(text: str) -> dict[str, int]:
    """The number of operands (tensors) of each kind of collective in a compiled program."""
    found: dict[str, int] = {}
    for kind, operands in re.findall(
        r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(([^)]*)\)", text
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
    assert collectives(compiled(jaxdist.data_parallel(step, bucket_bytes=0), *args)) == {"all-reduce": 3}  # w, b, loss
    assert collectives(compiled(jaxdist.data_parallel(step), *args)) == {"all-reduce": 1}
    assert collectives(compiled(jaxdist.data_parallel(step, mesh=parity.mesh(1)), *args)) == {}
    assert collectives(compiled(jaxdist.data_parallel(step, enabled=False), *args)) == {}


@pytest.mark.optimised
def test_microbatches_of_a_loop_over_layers_are_reduced_outside_of_loops() -> None:
    """In the compiled program: none of the computations that loops run has a reduction in it."""

    def loss_of(ws: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    @jaxdist.data_parallel
    def step(ws: Any, x: Any) -> Any:
        loss, grads = jaxdist.value_and_grad(loss_of, microbatches=2)(ws, x)
        return ws - grads, loss

    text = compiled(step, jnp.ones((4, 48, 48)), jnp.ones((32, 48)))
    inside, main = text.split("ENTRY ")
    assert "while(" in main
    assert "all-reduce" not in inside
    assert collectives(text) == {"all-reduce": 1}


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
        aux = {
            "total": lax.psum(jnp.sum(x), "data"), "mean": lax.pmean(x.mean(0), "data"),
            "everyone": lax.all_gather(jnp.sum(x), "data"), "largest": lax.pmax(x.max(), "data"),
            "index": lax.axis_index("data"), "size": lax.psum(1, "data"), "parts": lax.axis_size("data"),
            "scattered": lax.psum_scatter(x.T, "data", tiled=True), "moved": lax.ppermute(w, "data", [(0, 0)]),
            "exchanged": lax.all_to_all(x, "data", 0, 1, tiled=True),
        }  # fmt: skip
        return w - lax.pmean(jax.grad(loss_fn)(w, x), "data"), aux

    aux = {"total": X.sum(), "mean": X.mean(0), "everyone": X.sum()[None], "largest": X.max(), "index": 0, "size": 1,
           "parts": 1, "scattered": X.T, "moved": W, "exchanged": X}  # fmt: skip
    decorated = jaxdist.data_parallel(step, donate=False)
    off = jaxdist.data_parallel(step, enabled=False)
    assert "all-gather" not in collectives(compiled(decorated, W, X))
    for call in (decorated, off, jax.jit(off)):
        same(call(W, X), (W - jax.grad(loss_fn)(W, X), aux))


def test_the_axis_by_other_names(caplog: pytest.LogCaptureFixture) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - lax.pmean(jax.grad(loss_fn)(w, x), "batch")

    with caplog.at_level(logging.INFO, "jaxdist"):
        same(jaxdist.data_parallel(step)(W, X), W - jax.grad(loss_fn)(W, X))
    assert sum("'batch' is taken for that of data parallelism" in m for m in caplog.messages) == 1
    for decorated in (jaxdist.data_parallel(step, axis_name="batch"), jaxdist.data_parallel(step, mesh=parity.mesh(1))):
        same(decorated(W, X), W - jax.grad(loss_fn)(W, X))

    def own(w: Any, x: Any) -> Any:  # an axis that the step binds itself is its own
        return w + jax.vmap(lambda row: row.sum() - lax.pmean(row.sum(), "rows"), axis_name="rows")(x).max()

    same(jaxdist.data_parallel(own)(W, X), own(W, X))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: lax.ppermute(x, "data", [(0, 1)]), "the permutation"),
        (lambda x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]), "groups of several devices"),
        (lambda x: lax.pmean(lax.psum(x, "rows"), "columns"), "two axes that nothing binds, 'rows' and 'columns'"),
    ],
)
def test_what_reaches_beyond_the_axis_is_refused(call: Any, words: str) -> None:
    with pytest.raises((jaxdist.StepError, ValueError), match=words):
        jaxdist.data_parallel(lambda w, x: (w, call(x)))(W, X)


# --- what comes back


def test_arrays_without_entries() -> None:
    for shape, step in (
        ((4, 0), lambda w, x: (w, x @ w)),
        ((8, 0), lambda w, x: (w + 1, (x @ w).sum())),
        ((4, 2), lambda w, x: (w, x[:, :0])),
    ):
        parity.check(step, jnp.zeros((0, 8)), jnp.zeros(shape), devices=8)


def test_global_arrays_are_taken_as_they_are() -> None:
    batch = jax.device_put(X, jax.NamedSharding(jaxdist.get_context().mesh, jax.P("data")))
    same(jaxdist.data_parallel(sgd)(W, batch), sgd(W, X))


def test_state_given_stays_usable_and_state_returned_is_donated() -> None:
    step = jaxdist.data_parallel(sgd)
    first, _ = step(W, X)
    assert first.sharding.is_fully_replicated
    again, _ = step(first, X)
    assert first.is_deleted()
    same(again, sgd(sgd(W, X)[0], X)[0])
    kept = jaxdist.data_parallel(sgd, donate=False)
    first, _ = kept(W, X)
    kept(first, X)
    assert not first.is_deleted()
    host = np.array(W)
    step(host, X)
    np.testing.assert_array_equal(host, W)


def test_one_array_twice_in_the_state() -> None:
    def step(state: Any, x: Any) -> Any:
        grad = jax.grad(loss_fn)(state["w"], x)
        return {"w": state["w"] - grad, "average": 0.9 * state["average"] + 0.1 * state["w"]}

    decorated = jaxdist.data_parallel(step)
    placed = decorated({"w": W, "average": W}, X)["w"]
    want = step({"w": np.array(placed), "average": np.array(placed)}, X)
    same(decorated({"w": placed, "average": placed}, X), want)


@pytest.mark.optimised
def test_bit_identical_twice() -> None:
    def run() -> bytes:
        step, w, bits = jaxdist.data_parallel(sgd), W, b""
        for _ in range(3):
            w, loss = step(w, X)
            bits += np.asarray(w).tobytes() + np.asarray(loss).tobytes()
        return bits

    assert run() == run()


def test_a_step_is_traced_once_for_each_type_of_its_state() -> None:
    traces = []

    @jaxdist.data_parallel(donate=False)
    def step(state: Any, x: Any) -> Any:
        traces.append(1)
        return jax.tree.map(lambda w: w - jnp.mean(x) * w, state)

    state, x = {"w": W, "n": 1}, np.full(8, 0.25)
    for turn in range(1, 4):
        state = step(state, x)
        same(state, {"w": 0.75**turn * W, "n": 0.75**turn})
    strong = jnp.asarray(2.0, jnp.result_type(float))
    for state in 4 * [W, jnp.ones(3), jnp.asarray(2.0), strong]:  # of the last two the first type is weak
        same(step(state, x), 0.75 * state)
    assert len(traces) <= 2 + 4


def test_fold_rank_is_the_identity_outside_of_per_device() -> None:
    key = jax.random.key(0)
    step = jaxdist.data_parallel(lambda key, x: jax.random.uniform(jaxdist.fold_rank(key), x.shape), donate=False)
    np.testing.assert_array_equal(step(key, X), jax.random.uniform(key, X.shape))
    assert jaxdist.fold_rank(key) == key


# --- where it runs


def test_on_tracers_it_is_the_plain_step() -> None:
    step = jaxdist.data_parallel(sgd, donate=False)
    assert "jaxdist_plain" in str(jax.make_jaxpr(step)(W, X))
    same(jax.grad(lambda w: step(w, X)[1])(W), jax.grad(lambda w: sgd(w, X)[1])(W))
    same(jax.vmap(step, (0, None))(jnp.stack([W, 2 * W]), X)[0][1], sgd(2 * W, X)[0])
    with pytest.warns(UserWarning, match="runs on one of 8 devices. Decorate the outer function"):
        same(jax.jit(step)(W, X), sgd(W, X))
    with pytest.warns(UserWarning, match="plain step"):
        lax.scan(lambda w, x: step(w, x), W, X[None])


def test_a_decorated_step_in_a_decorated_step() -> None:
    inner = jaxdist.data_parallel(sgd)

    @jaxdist.data_parallel
    def outer(w: Any, x: Any) -> Any:
        w, first = inner(w, x)
        w, losses = lax.scan(inner, w, jnp.stack([x, 2 * x]))
        return w, [first, *losses]

    w, losses = W, []
    for x in (X, X, 2 * X):
        w, loss = sgd(w, x)
        losses.append(loss)
    same(outer(W, X), (w, losses))


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


# --- what is refused


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
    step = jaxdist.data_parallel(lambda w, x: w, batch_argnums=1)
    with pytest.raises((ValueError, TypeError), match=message):
        step(W, batch)
    np.testing.assert_array_equal(step(W, X), W)  # nothing is lost


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"reduce": "sum"}, TypeError, "reduce"),
        ({"axis_name": 3}, ValueError, "axis_name=3"),
        ({"mesh": Mesh(jax.devices(), ("model",))}, ValueError, "one, named 'data'"),
        ({"batch_argnums": 2}, TypeError, "batch_argnums"),
        ({"compress": "int8"}, ValueError, "'bf16' or 'fp16'"),
        ({"step": 3}, TypeError, "decorates a function"),
    ],
)
def test_bad_settings(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    decorate: Any = jaxdist.data_parallel
    with pytest.raises(kind, match=message):
        decorate(**{"step": sgd, **settings})(W, X)
