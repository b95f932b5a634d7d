"""`zero`, `shard`, `unshard`: what users see, what is refused."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax.training.dynamic_scale import DynamicScale
from harness import parity
from harness.parity import mesh

import jaxdist
from jaxdist.placements.layouts import Padded
from jaxdist.step.tracing import say_once

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(6, 5))), "v": jnp.asarray(RNG.normal(size=(5, 8))), "s": jnp.asarray(2.0)}
BATCH = RNG.normal(size=(16, 6))


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ p["w"] @ p["v"] * p["s"]) ** 2)


def step_of(tx: Any, loss_fn: Any = loss_fn) -> Any:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optax.global_norm(grads)}

    return step


def run(step: Any, state: Any, steps: int = 3, x: Any = BATCH) -> Any:
    aux = None
    for i in range(steps):
        *state, aux = step(*state, np.roll(x, i, 0))
    return state, aux


def gap(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(jaxdist.unshard(a)), jax.tree.leaves(jaxdist.unshard(b)), strict=True)
    arrays = ((np.asarray(x, float), np.asarray(y, float)) for x, y in pairs)
    return max(float(np.max(np.abs(x - y) / (1 + np.abs(x)), initial=0)) for x, y in arrays)


def state_of(tx: Any, params: Any = PARAMS) -> Any:
    return params, tx.init(params)


ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
SLICES = {"w": 10, "v": 10, "s": 1}
"""Of 6x5 in slices of 2x5, of 5x8 in slices of 5x2, on four devices."""
WHOLE = {name: x.size for name, x in PARAMS.items()}


def held(x: Any) -> int:
    """Entries of an array on one device."""
    return jaxdist.memory([x]).total.device // x.dtype.itemsize


# --- what is in shards at which level


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_a_level_keeps_in_shards(level: Any) -> None:
    tx = jaxdist.zero(ADAM, level)
    (params, opt_state), _ = run(jaxdist.data_parallel(step_of(tx), mesh=mesh(4)), state_of(tx), 1)
    moments = opt_state[1][0].mu
    assert jax.tree.map(held, moments) == (SLICES if level else WHOLE)
    assert jax.tree.map(held, params) == (SLICES if level == 3 else WHOLE)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, PARAMS)
    assert jax.tree.structure(opt_state) == jax.tree.structure(ADAM.init(PARAMS))
    assert isinstance(moments["w"], Padded) == bool(level)
    assert not isinstance(moments["v"], Padded)


@pytest.mark.parametrize(("level", "devices"), [(1, 3), (3, 8)])
def test_leaves_of_all_kinds(level: Any, devices: int) -> None:
    """Of all shapes, in less precision, frozen, and one array as two of them."""
    shapes = [(), (1,), (3,), (7, 5), (2, 3, 5, 7), (0, 4), (33, 1)]
    rng = np.random.default_rng(0)
    params = {f"{i}": jnp.asarray(rng.normal(size=shape)) for i, shape in enumerate(shapes)}
    params |= {"half": params["3"].astype(jnp.float32), "frozen": params["3"].T, "tied": params["3"]}
    x = {name: rng.normal(size=(24, *p.shape)).astype(p.dtype) for name, p in params.items()}
    labels = {name: "freeze" if name == "frozen" else "train" for name in params}
    adamw = optax.masked(optax.adamw(1e-2), lambda p: True)
    inner = optax.partition({"freeze": optax.set_to_zero(), "train": adamw}, labels)

    def loss(p: Any, x: Any) -> Any:
        each = {name: jnp.sum(jnp.tanh(w - x[name]).reshape(24, -1) ** 2, 1) for name, w in p.items()}
        return sum(jnp.mean(y, dtype=float) for y in each.values()) + jnp.sum(p["3"] * p["tied"] * p["frozen"].T)

    a, b = state_of(inner, params), state_of(inner, params)
    plain, tx = jax.jit(step_of(inner, loss)), jaxdist.zero(inner, level)  # type: ignore[arg-type]
    decorated = jaxdist.data_parallel(step_of(tx, loss), mesh=mesh(devices))
    for _ in range(3):
        (*a, _), (*b, _) = plain(*a, x), decorated(*b, x)
    assert gap(a, b) < 1e-6
    assert gap(params["frozen"], b[0]["frozen"]) == 0
    del a[0]["half"], b[0]["half"]  # float32
    assert gap(a[0], b[0]) < 1e-12


def test_large_leaves() -> None:
    params = {"a": jnp.asarray(RNG.normal(size=(1023, 1023))), "b": jnp.asarray(RNG.normal(size=(50257, 64)))}
    x = {"a": RNG.normal(size=(8, 1023)), "b": RNG.integers(0, 50257, 8)}
    loss = lambda p, x: jnp.mean(jnp.tanh(x["a"] @ p["a"])[:, :64] * p["b"][x["b"]])
    tx = optax.sgd(0.1, momentum=0.9)
    *a, _ = jax.jit(step_of(tx, loss))(*state_of(tx, params), x)
    *b, _ = jaxdist.data_parallel(step_of(jaxdist.zero(tx, 3), loss))(*state_of(tx, params), x)
    assert gap(a, b) < 1e-10


def test_one_device_keeps_everything() -> None:
    tx = jaxdist.zero(ADAM, 3)
    (params, _), _ = run(jaxdist.data_parallel(step_of(tx), mesh=mesh(1)), state_of(tx))
    assert not isinstance(params["w"], Padded)


def test_outside_a_decorated_step_it_is_the_transformation() -> None:
    want = run(jax.jit(step_of(ADAM)), state_of(ADAM))
    for level in (3, 0):
        tx = jaxdist.zero(ADAM, level)
        assert gap(run(jax.jit(step_of(tx)), state_of(tx)), want) == 0


def test_levels_can_change_on_the_way() -> None:
    expected, state, plain = state_of(ADAM), state_of(ADAM), jax.jit(step_of(ADAM))
    for level in (1, 3, 0):
        tx = jaxdist.zero(ADAM, level)
        expected, _ = run(plain, expected, 1)
        state, _ = run(jaxdist.data_parallel(step_of(tx)), state, 1)
        assert gap(expected, state) < 1e-12
    assert isinstance(state[0]["w"], Padded)  # what is in shards stays so, until it is made whole


def test_elementwise_work_of_the_users_own_runs_on_shards() -> None:
    """A moving average of the parameters, in shards because it came so."""
    tx = jaxdist.zero(ADAM, 3)

    def step(params: Any, opt_state: Any, average: Any, x: Any) -> Any:
        params, opt_state, aux = step_of(tx)(params, opt_state, x)
        return params, opt_state, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), aux

    state, _ = run(jaxdist.data_parallel(step), (*state_of(tx), jaxdist.shard(PARAMS)))
    assert isinstance(state[2]["w"], Padded)
    expected, _ = run(jax.jit(step), (*state_of(tx), PARAMS))
    assert gap(expected, state) < 1e-12


def test_a_step_that_needs_whole_gradients_and_parameters() -> None:
    def of(tx: Any) -> Any:
        def step(params: Any, opt_state: Any, x: Any) -> Any:
            grads = jax.grad(loss_fn)(params, x)
            aux = {"sorted": jnp.sort(grads["w"].ravel()), "rank": jnp.linalg.norm(grads["v"], 2), "all": grads}
            aux |= {"positive": grads["w"] > 0, "signs": jnp.sign(grads["v"]).astype(int)}
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, opt_state, {**aux, "largest": jnp.max(jnp.abs(params["w"]))}

        return step

    a = run(jax.jit(of(ADAM)), state_of(ADAM), 2)
    b = run(jaxdist.data_parallel(of(jaxdist.zero(ADAM, 3)), mesh=mesh(4)), state_of(ADAM), 2)
    assert gap(a, b) < 1e-12
    assert isinstance(b[1]["all"]["w"], jax.Array)  # aux values are whole


def test_what_cannot_be_computed_on_shards_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def median(updates: Any, state: Any, params: Any = None) -> Any:
        updates = jax.tree.map(lambda g, m: 0.1 * g + m, updates, state)
        return jax.tree.map(lambda m: -0.1 * m / (1 + jnp.sort(m.ravel())[m.size // 2] ** 2), updates), updates

    sorting = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), median)
    for tx in (jaxdist.zero(sorting, 2, split="slices"), jaxdist.zero(sorting, 3, split="slices")):
        say_once.cache_clear()  # a step that is decorated anew says nothing new
        with caplog.at_level(logging.WARNING, "jaxdist"):
            jaxdist.data_parallel(step_of(tx)).lower(*state_of(tx), BATCH)
        (said,) = caplog.messages
        assert "gathers 560 B from shards: sort needs all of it" in said
        assert "test_zero.py:" in said
        caplog.clear()
    for tx in (jaxdist.zero(ADAM, 3), jaxdist.zero(optax.contrib.muon(1e-2), 2), jaxdist.zero(sorting, 2)):
        jaxdist.data_parallel(step_of(tx)).lower(*state_of(tx), BATCH)
        assert not caplog.messages


# --- mixed precision


def test_compressed_gradients() -> None:
    tx = jaxdist.zero(optax.sgd(0.1), 2)
    state, _ = run(jaxdist.data_parallel(step_of(tx), compress="bf16"), state_of(tx))
    expected, _ = run(jax.jit(step_of(tx)), state_of(tx))
    assert 0 < gap(expected, state) < 1e-2


def test_dynamic_loss_scaling_skips_the_step_on_all_devices() -> None:
    """flax's DynamicScale; one device's part of the batch overflows."""
    tx = jaxdist.zero(optax.adam(1e-2), 3)

    def step(params: Any, opt_state: Any, scale: Any, x: Any) -> Any:
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, x)
        updates, new_state = tx.update(grads, opt_state, params)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return keep(optax.apply_updates(params, updates), params), keep(new_state, opt_state), scale, loss

    decorated, plain = jaxdist.data_parallel(step), jax.jit(step)
    start = DynamicScale(scale=jnp.asarray(2.0**16))  # type: ignore[arg-type]
    a: Any = (*state_of(tx), start)
    b: Any = (*state_of(tx), start)
    bad = BATCH.copy()
    bad[3] = np.inf
    for x in (BATCH, bad, BATCH):
        before = jaxdist.unshard(b[0])
        *a, _ = plain(*a, x)
        *b, _ = decorated(*b, x)
        assert (gap(before, b[0]) == 0) == (x is bad)
        assert gap(a[:2], b[:2]) < 1e-10
    assert float(b[2].scale) == 2.0**15


# --- shard, unshard, evaluation


def test_evaluating_functions_take_shards_and_a_copy_survives_the_next_step() -> None:
    tx = jaxdist.zero(ADAM, 3)
    step = jaxdist.data_parallel(step_of(tx))
    state, _ = run(step, state_of(tx))
    evaluate = jaxdist.data_parallel(loss_fn)
    got = float(evaluate(state[0], BATCH))
    assert got == pytest.approx(float(loss_fn(jaxdist.unshard(state[0]), BATCH)), rel=1e-12)
    assert float(evaluate(state[0], BATCH)) == got  # not donated
    copy = jaxdist.unshard(state)
    before = jax.tree.map(np.array, copy)
    run(step, state)
    assert gap(before, copy) == 0


@pytest.mark.optimised
def test_state_made_inside_a_decorated_function_is_in_shards() -> None:
    tx = jaxdist.zero(optax.adam(1e-2), 3)

    @jaxdist.data_parallel(batch_argnums=())
    def init(key: Any) -> Any:
        params = jaxdist.shard({"w": jax.random.normal(key, (6, 5)), "v": jnp.ones((5, 8)), "s": jnp.ones(())})
        return params, tx.init(params)

    params, opt_state = init(jax.random.key(0))
    assert held(params["v"]) == held(opt_state[0].mu["v"]) == 5
    plain = {"w": jax.random.normal(jax.random.key(0), (6, 5)), "v": jnp.ones((5, 8)), "s": jnp.ones(())}
    assert gap(plain, params) == 0
    a = run(jaxdist.data_parallel(step_of(tx)), (params, opt_state))
    assert gap(a, run(jax.jit(step_of(tx)), state_of(tx, plain))) < 1e-12


def test_a_padded_leaf_looks_like_the_array() -> None:
    x = jaxdist.shard(PARAMS)["w"]
    assert (x.shape, x.ndim, x.size, x.dtype, x.nbytes) == ((6, 5), 2, 30, np.float64, 240)
    assert np.array_equal(np.asarray(x), PARAMS["w"])
    assert np.array_equal(jnp.sum(jnp.asarray(x), 1), jnp.sum(PARAMS["w"], 1))
    assert "6/data" in repr(x)
    assert jax.block_until_ready(x) is x


def test_memory_names_replicated_and_padding() -> None:
    tx = jaxdist.zero(optax.adam(1e-2), 3)
    step = jaxdist.data_parallel(step_of(tx), mesh=mesh(4))
    (params, opt_state), _ = run(step, state_of(tx), 1)
    table = jaxdist.memory({"params": params, "opt_state": opt_state}, step.lower(params, opt_state, BATCH).compile())
    rows = {r.kind: r for r in table.rows}
    assert rows["params"].whole == 8 * (30 + 40 + 1)
    assert rows["params"].device == 8 * (10 + 10 + 1)
    assert rows["params"].replicated == 8
    assert rows["params"].padding == pytest.approx(8 * (10 - 30 / 4), abs=8)
    assert table.compiled["arguments"] >= table.total.device
    assert all(word in str(table) for word in ("params", "opt_state", "replicated", "padding", "temporaries", "total"))


# --- bad input


@pytest.mark.parametrize("level", [4, -1, "2", 1.0, True, None])
def test_levels_that_are_not_there(level: Any) -> None:
    with pytest.raises(ValueError, match=r"level=.*0 .*1 .*2 .*3"):
        jaxdist.zero(ADAM, level)


@pytest.mark.parametrize("tx", [None, 1e-3, optax.adam, lambda g: g])
def test_what_is_no_transformation(tx: Any) -> None:
    with pytest.raises(TypeError, match="init and update"):
        jaxdist.zero(tx, 1)


def test_parameters_other_than_those_at_init() -> None:
    tx = jaxdist.zero(ADAM, 2)
    step = jaxdist.data_parallel(step_of(tx))
    other = {**PARAMS, "more": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"not made for these parameters: .*\['more'\].* is missing"):
        step(other, tx.init(PARAMS), BATCH)
    with pytest.raises(ValueError, match=r"\['v'\].* has shape \(5, 8\), expected \(9, 8\)"):
        step({**PARAMS, "w": jnp.ones((6, 9)), "v": jnp.ones((9, 8))}, tx.init(PARAMS), BATCH)


def test_gradients_of_each_example() -> None:
    """`dpsgd` is given those: it clips and adds them up itself."""

    def step_with(tx: Any) -> Any:
        def step(params: Any, opt_state: Any, x: Any) -> Any:
            grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, x[:, None])
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, None

        return step

    tx = optax.contrib.dpsgd(0.1, 0.01, 1.3, 0, momentum=0.9)
    expected, _ = run(jax.jit(step_with(tx)), state_of(tx), 2)
    found, _ = run(jaxdist.data_parallel(step_with(jaxdist.zero(tx, 3)), mesh=mesh(4)), state_of(tx), 2)
    drop = lambda state: [x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert gap(drop(expected), drop(found)) < 1e-12
    of_sgd = lambda state: isinstance(state, optax.TraceState)
    (trace,) = [state.trace for state in jax.tree.leaves(found[1], is_leaf=of_sgd) if of_sgd(state)]
    assert jax.tree.map(held, trace) == jax.tree.map(held, found[0]) == SLICES


def without_parameters(tx: Any, apply: Any = optax.apply_updates) -> Any:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state)
        return apply(params, jax.tree.map(lambda u: 2 * u, updates)), opt_state, None

    return step


@pytest.mark.parametrize("level", [1, 3])
def test_parameters_not_given(level: Any) -> None:
    """They are what the updates are added to, and kept and updated as if they were given."""
    adam, tx = optax.adam(1e-2), jaxdist.zero(optax.adam(1e-2), level)
    expected, _ = run(jax.jit(without_parameters(adam)), state_of(adam))
    step = jaxdist.data_parallel(without_parameters(tx), mesh=mesh(4))
    found, _ = run(step, state_of(tx))
    assert gap(expected, found) < 1e-12
    assert jax.tree.map(held, found[1][0].mu) == SLICES
    assert jax.tree.map(held, found[0]) == (SLICES if level == 3 else WHOLE)


def test_parameters_that_are_needed_or_not_found() -> None:
    adam = optax.adam(1e-2)
    replaced = without_parameters(jaxdist.zero(adam, 3), lambda params, updates: updates)
    with pytest.raises(ValueError, match=r"level=3.*tell it which they are, tx.update\(grads, state, params\)"):
        jaxdist.data_parallel(replaced)(*state_of(adam), BATCH)
    with pytest.raises(ValueError, match="params"):
        jaxdist.data_parallel(without_parameters(jaxdist.zero(ADAM, 1)))(*state_of(ADAM), BATCH)


def test_state_of_another_number_of_devices() -> None:
    tx = jaxdist.zero(ADAM, 1)
    state, _ = run(jaxdist.data_parallel(step_of(tx), mesh=mesh(4)), state_of(tx), 1)
    with pytest.raises(ValueError, match=r"opt_state.*in shards over the devices 0 to 3.*on 0 to 7\..*checkpoint"):
        jaxdist.data_parallel(step_of(tx))(*state, BATCH)
    run(jaxdist.data_parallel(step_of(tx)), jaxdist.unshard(state), 1)


def test_gradients_of_other_shapes() -> None:
    tx = jaxdist.zero(optax.sgd(0.1), 1)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        updates, opt_state = tx.update({**grads, "w": grads["w"][:1]}, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with pytest.raises(ValueError, match=r"gradients.*\['w'\] has shape \(1, 5\), expected \(6, 5\)"):
        jaxdist.data_parallel(step)(PARAMS, tx.init(PARAMS), BATCH)


@pytest.mark.parametrize("devices", [3, 8])
def test_what_is_in_shards_over_other_devices_as_a_batch(devices: int) -> None:
    whole = -1.0 - jnp.arange(60.0).reshape(6, 10)
    kept = jaxdist.shard(whole)  # over eight: two rows of padding
    assert isinstance(kept, Padded)
    for use in (lambda x: x * 2, lambda x: 2 - x, lambda x: x[0], lambda x: x @ x, float, len):
        with pytest.raises(TypeError, match=r"is kept in shards .*jaxdist\.unshard"):
            use(kept)
    step = lambda batch: (batch.max(0), 2 * batch, jnp.sort(batch, 0)[-1])
    parity.compare(jax.tree.map(jaxdist.unshard, parity.decorated(step, devices)(kept)), jax.jit(step)(whole))
