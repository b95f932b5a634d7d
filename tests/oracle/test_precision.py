"""Parameters in 16 bits with a float32 copy: `zero(precision=)` beside a step that is written out for one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from catalogue import collectives as calls
from harness.check import close, compare, decorated, held, mesh
from harness.errors import raises

import jaxdist

RNG = np.random.default_rng(0)
PARAMS = {
    "a": jnp.asarray(RNG.normal(size=(6, 16)), jnp.float32),
    "b": jnp.asarray(RNG.normal(size=(16, 9)), jnp.float32),
    "c": jnp.asarray(RNG.normal(size=9), jnp.float32),
}
BATCH = np.asarray(RNG.normal(size=(16, 6)), np.float16)
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
DTYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
PRECISIONS = pytest.mark.parametrize("precision", DTYPES)


def loss_fn(params: Any, x: Any) -> Any:
    """In 16 bits up to the last sum."""
    x = x.astype(params["a"].dtype)
    y = jnp.tanh(x @ params["a"]) @ params["b"] + params["c"]
    return jnp.mean(jnp.square(y).astype(jnp.float32))


def step_of(tx: Any, microbatches: int = 1) -> Any:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        scale = jaxdist.loss_scale(opt_state)
        scaled = lambda p, x: scale * loss_fn(p, x)
        loss, grads = jaxdist.value_and_grad(scaled, microbatches=microbatches)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / scale

    return step


def by_hand(dtype: Any) -> Any:
    """One device's step in 16 bits: master weights, and the loss scale of float16 under a `lax.cond`."""

    def step(state: Any, x: Any) -> Any:
        master, inner, scale, good = state
        params = jax.tree.map(lambda p: p.astype(dtype), master)
        loss, grads = jax.value_and_grad(lambda p: scale * loss_fn(p, x))(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        finite = jnp.all(jnp.asarray([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))

        def go() -> Any:
            updates, new = ADAM.update(grads, inner, master)
            grown = good + 1 == 2000
            counted = jnp.where(grown, 2 * scale, scale), jnp.where(grown, 0, good + 1)
            return optax.apply_updates(master, updates), new, *counted

        skip = lambda: (master, inner, scale / 2, jnp.int32(0))
        return (jax.lax.cond(finite, go, skip) if dtype == jnp.float16 else (*go()[:2], scale, good)), loss / scale

    return jax.jit(step)


def start(tx: Any, dtype: Any, scale: float | None = None, good: int = 0) -> Any:
    params, opt_state = optax.tree.cast(PARAMS, dtype), tx.init(PARAMS)
    if scale is not None:
        new = opt_state.loss_scale._replace(scale=jnp.float32(scale), good_steps=jnp.int32(good))
        opt_state = opt_state._replace(loss_scale=new)
    return params, opt_state


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@PRECISIONS
def test_as_written_out_for_one_device(precision: Any, level: Any) -> None:
    tx, dtype, fp16 = jaxdist.zero(ADAM, level, precision=precision), DTYPES[precision], precision == "fp16"
    step, plain = jaxdist.data_parallel(step_of(tx), mesh=mesh(4)), by_hand(dtype)
    first = jnp.float32(2.0**9 if fp16 else 1)
    params, opt_state = start(tx, dtype, 2.0**9 if fp16 else None, 7)
    state = PARAMS, ADAM.init(PARAMS), first, jnp.int32(7)
    bad = BATCH.copy()
    bad[3] = np.inf if fp16 else 6e4  # one device's example
    for x in (BATCH, bad, BATCH[::-1]):
        before = jaxdist.unshard(opt_state)
        params, opt_state, loss = step(params, opt_state, x)
        state, expected = plain(state, x)
        np.testing.assert_allclose(loss, expected, rtol=2e-2)
        close(opt_state.master, state[0], 2e-3)  # of gradients in 16 bits, whose sums round in another order
        compare(jaxdist.unshard(params), optax.tree.cast(jaxdist.unshard(opt_state.master), dtype), 0)
        same = jax.tree.map(np.array_equal, before.master, jaxdist.unshard(opt_state.master))
        assert all(jax.tree.leaves(same)) == (fp16 and x is bad), (
            "an overflow leaves the state as it is, and no other does"
        )
        assert int(before.inner[1][0].count) + (not (fp16 and x is bad)) == int(opt_state.inner[1][0].count)
    if fp16:
        scale = opt_state.loss_scale
        assert (float(scale.scale), int(scale.good_steps)) == (float(state[2]), int(state[3])) == (2.0**8, 1)
    assert held(opt_state.master["b"]) == (16 * 9 // 4 if level else 16 * 9)
    assert held(params["b"]) == (16 * 9 // 4 if level == 3 else 16 * 9)


@pytest.mark.parametrize("level", [0, 2])
def test_an_overflow_of_one_device_that_the_sum_does_not_have_is_none(level: Any) -> None:
    """Decided after the reduction, as on one device: 6e4 and -6e4 of two devices, twice each, are 0 in all."""
    tx = jaxdist.zero(optax.sgd(1.0), level, precision="fp16")

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(x @ p["w"], dtype=jnp.float32))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones((8, 4), jnp.float16)}
    x = np.repeat(np.array([6e4, 6e4, -6e4, -6e4, 1, 1, 1, 1], np.float16)[:, None], 8, 1)
    many, one = jaxdist.data_parallel(step, mesh=mesh(4)), jax.jit(step)
    got, expected = (f(params, tx.init(params), x)[1] for f in (many, one))
    assert float(got.loss_scale.scale) == float(expected.loss_scale.scale) == 2.0**16
    close(got.master, expected.master, 0)


def test_the_scale_grows_and_has_bounds() -> None:
    tx = jaxdist.zero(optax.sgd(0.0), 2, precision="fp16")
    step, bad = jaxdist.data_parallel(step_of(tx), mesh=mesh(4)), np.full_like(BATCH, np.nan)

    def after(scale: float, good: int, x: Any) -> tuple[float, int]:
        found = step(*start(tx, jnp.float16, scale, good), x)[1].loss_scale
        return float(found.scale), int(found.good_steps)

    assert after(8.0, 1998, BATCH) == (8.0, 1999)
    assert after(8.0, 1999, BATCH) == (16.0, 0)
    assert after(8.0, 1999, bad) == (4.0, 0)
    assert after(1.0, 3, bad) == (1.0, 0)
    params, opt_state = start(tx, jnp.float16, 2.0**24, 1999)
    _, opt_state = tx.update(jax.tree.map(jnp.zeros_like, params), opt_state, params)
    assert float(jaxdist.loss_scale(opt_state)) == 2.0**24


@PRECISIONS
@pytest.mark.parametrize(
    ("inner", "decorate"),
    [
        (ADAM, lambda step: jaxdist.parallel(step, mesh={"data": 4, "model": 2}, layouts={"'a'": 1, "'b'": 0})),
        (optax.contrib.muon(1e-2), lambda step: jaxdist.data_parallel(step, mesh=mesh(4))),
        (optax.MultiSteps(optax.adam(1e-2), 2), lambda step: jaxdist.data_parallel(step, mesh=mesh(4))),
    ],
    ids=["two axes", "whole matrices", "accumulated"],
)
def test_with_microbatches_on_meshes_and_other_optimizers(inner: Any, decorate: Any, precision: Any) -> None:
    """As the same step under jit, whose scale starts too high and comes down."""
    scales: list[list[float]] = []
    states = []
    for level, make in ((0, jax.jit), (2, decorate)):
        tx = jaxdist.zero(inner, level, precision=precision)  # type: ignore[arg-type]
        step, state = make(step_of(tx, microbatches=2)), start(tx, DTYPES[precision])
        scales.append([float(jaxdist.loss_scale(state[1]))])
        for _ in range(9):
            *state, _ = step(*state, BATCH)
            scales[-1].append(float(jaxdist.loss_scale(state[1])))
        states.append(state[1].master)
    assert scales[0] == scales[1]
    assert (len(set(scales[0])) > 1) == (precision == "fp16")
    close(states[1], states[0], 1e-2)  # of gradients in 16 bits
    assert max(float(jnp.abs(states[0][k] - PARAMS[k]).max()) for k in PARAMS) > 2e-2, "it was trained"


def test_refused() -> None:
    tx = jaxdist.zero(ADAM, 1, precision="bf16")
    state = tx.init(PARAMS)
    with raises(ValueError, "bfloat16", "float32"):
        tx.update(PARAMS, state, PARAMS)
    with raises(ValueError, "tx.update(grads, opt_state, params)"):
        tx.update(PARAMS, state)
    with raises(ValueError, "0"):
        jaxdist.loss_scale(ADAM.init(PARAMS))
    assert float(jaxdist.loss_scale(state)) == 1


def test_every_dtype() -> None:
    """Numbers from two bits to 128, in shards and in the batch, their ends padded. (Not padded: between processes.)"""
    w, b = calls.numbers(15), calls.numbers(7)
    got = decorated(calls.moved)(jaxdist.shard(w), b)
    compare(jaxdist.unshard(got), jax.jit(calls.moved)(w, b))
