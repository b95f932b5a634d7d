"""Parameters in 16 bits with a float32 copy: `zero(precision=)` beside a step that is written out for one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from harness.parity import mesh
from test_zero import gap, held

import jaxdist
from jaxdist.precision import LossScale, MixedState

RNG = np.random.default_rng(0)
PARAMS = {
    "a": jnp.asarray(RNG.normal(size=(6, 16)), jnp.float32),
    "b": jnp.asarray(RNG.normal(size=(16, 9)), jnp.float32),
    "c": jnp.asarray(RNG.normal(size=9), jnp.float32),
}
BATCH = np.asarray(RNG.normal(size=(16, 6)), np.float16)
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
LEVELS = pytest.mark.parametrize("level", [0, 1, 2, 3])


def loss_fn(params: Any, x: Any) -> Any:
    """In 16 bits up to the last sum."""
    x = x.astype(params["a"].dtype)
    y = jnp.tanh(x @ params["a"]) @ params["b"] + params["c"]
    return jnp.mean(jnp.square(y).astype(jnp.float32))


def step_of(tx: Any) -> Any:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        scale = jaxdist.loss_scale(opt_state)
        loss, grads = jax.value_and_grad(lambda p: scale * loss_fn(p, x))(params)
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


def start(tx: Any, dtype: Any) -> Any:
    return optax.tree.cast(PARAMS, dtype), tx.init(PARAMS)


@LEVELS
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", jnp.bfloat16), ("fp16", jnp.float16)])
def test_as_written_out_for_one_device(precision: Any, dtype: Any, level: Any) -> None:
    tx = jaxdist.zero(ADAM, level, precision=precision)
    step, plain = jaxdist.data_parallel(step_of(tx), mesh=mesh(4)), by_hand(dtype)
    params, opt_state = start(tx, dtype)
    first = jnp.float32(2.0**9 if precision == "fp16" else 1)
    if precision == "fp16":
        opt_state = opt_state._replace(loss_scale=LossScale(first, jnp.int32(7)))
    state = PARAMS, ADAM.init(PARAMS), first, jnp.int32(7)
    bad = BATCH.copy()
    bad[3] = np.inf if precision == "fp16" else 6e4  # one device's example
    for x in (BATCH, bad, BATCH[::-1]):
        before = jaxdist.unshard(opt_state)
        params, opt_state, loss = step(params, opt_state, x)
        state, expected = plain(state, x)
        assert np.allclose(loss, expected, rtol=2e-2, equal_nan=True)
        assert gap(state[0], opt_state.master) < 2e-3  # of gradients in 16 bits, whose sums round in another order
        assert gap(optax.tree.cast(jaxdist.unshard(opt_state.master), dtype), params) == 0
        left_out = precision == "fp16" and x is bad
        assert (gap(before.master, opt_state.master) == 0) == (gap(before.inner, opt_state.inner) == 0) == left_out
    if precision == "fp16":
        scale = opt_state.loss_scale
        assert (float(scale.scale), int(scale.good_steps)) == (float(state[2]), int(state[3])) == (2.0**8, 1)
    assert held(opt_state.master["b"]) == (16 * 9 // 4 if level else 16 * 9)
    assert held(params["b"]) == (16 * 9 // 4 if level == 3 else 16 * 9)
    assert {str(p.dtype) for p in jax.tree.leaves(params)} == {str(jnp.dtype(dtype))}


@LEVELS
def test_an_overflow_of_one_device_that_the_sum_does_not_have_is_none(level: Any) -> None:
    """Decided after the reduction, as on one device: 6e4 and -6e4 of two devices, twice each, are 0 in all."""
    tx = jaxdist.zero(optax.sgd(1.0), level, precision="fp16")

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(x @ p["w"], dtype=jnp.float32))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones((8, 4), jnp.float16)}
    x = np.repeat(np.array([6e4, 6e4, -6e4, -6e4, 1, 1, 1, 1], np.float16)[:, None], 8, 1)
    got, expected = (
        f(params, tx.init(params), x)[1] for f in (jaxdist.data_parallel(step, mesh=mesh(4)), jax.jit(step))
    )
    assert float(got.loss_scale.scale) == float(expected.loss_scale.scale) == 2.0**16
    assert gap(expected.master, got.master) == 0


def test_the_scale_grows_and_has_bounds() -> None:
    tx = jaxdist.zero(optax.sgd(0.0), 2, precision="fp16")
    step = jaxdist.data_parallel(step_of(tx), mesh=mesh(4))

    def after(scale: float, good: int, x: Any) -> tuple[float, int]:
        params, opt_state = start(tx, jnp.float16)
        opt_state = opt_state._replace(loss_scale=LossScale(jnp.float32(scale), jnp.int32(good)))
        found = step(params, opt_state, x)[1].loss_scale
        return float(found.scale), int(found.good_steps)

    bad = np.full_like(BATCH, np.nan)
    assert after(8.0, 1998, BATCH) == (8.0, 1999)
    assert after(8.0, 1999, BATCH) == (16.0, 0)
    assert after(8.0, 1999, bad) == (4.0, 0)
    assert after(1.0, 3, bad) == (1.0, 0)
    params, opt_state = start(tx, jnp.float16)
    opt_state = opt_state._replace(loss_scale=LossScale(jnp.float32(2.0**24), jnp.int32(1999)))
    _, opt_state = tx.update(jax.tree.map(jnp.zeros_like, params), opt_state, params)
    assert float(jaxdist.loss_scale(opt_state)) == 2.0**24


def test_small_gradients_are_not_lost_in_float16() -> None:
    """1e-9 is 0 in float16; 65536 times that is not."""
    tx = jaxdist.zero(optax.sgd(1.0), 1, precision="fp16")

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        scale = jaxdist.loss_scale(opt_state)
        grads = jax.grad(lambda p: scale * 1e-9 * jnp.mean((x @ p).astype(jnp.float32)))(params)
        return tx.update(grads, opt_state, params)[1]

    w = jnp.zeros((6, 4), jnp.float16)
    got = step(w, tx.init(w), np.ones((16, 6), np.float16)).master
    assert np.allclose(got, -1e-9 / 4, rtol=1e-2)


def test_a_checkpoint_has_the_scale(tmp_path: Path) -> None:
    tx = jaxdist.zero(ADAM, 2, precision="fp16")
    step = jaxdist.data_parallel(step_of(tx), mesh=mesh(4))
    state = start(tx, jnp.float16)
    for x in (np.full_like(BATCH, np.inf), BATCH):
        *state, _ = step(*state, x)
    jaxdist.save(tmp_path, state, 2)
    back = jaxdist.restore(tmp_path, start(tx, jnp.float16))
    assert gap(state, back) == 0
    assert isinstance(back[1], MixedState)
    assert float(jaxdist.loss_scale(back[1])) == 2.0**15


def test_updates_too_small_for_16_bits_add_up() -> None:
    params = {"a": jnp.ones((16, 24), jnp.bfloat16)}
    tx = jaxdist.zero(optax.sgd(1e-4), 2, precision="bf16")

    @jaxdist.data_parallel
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p["a"].astype(jnp.float32)) * jnp.mean(x))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state: Any = params, tx.init(params)
    for _ in range(60):
        state = step(state[0], state[1], np.ones((16, 1), np.float32))
    assert np.allclose(jaxdist.unshard(state[1].master)["a"], 1 - 60e-4, rtol=1e-5)
    assert np.all(np.asarray(jaxdist.unshard(state[0])["a"], np.float32) == 0.9921875)  # 16 bits have 1, then this


def test_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.full((6, 4), 0.5, jnp.float16))

    tx = jaxdist.zero(optax.adam(1e-2), 2, precision="fp16")
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @jaxdist.data_parallel
    def step(model: Model, optimizer: Any, x: Any) -> Any:
        scale = jaxdist.loss_scale(optimizer)
        loss, grads = nnx.value_and_grad(lambda m: scale * jnp.mean((x @ m.w).astype(jnp.float32) ** 2))(model)
        optimizer.update(model, grads)
        return loss / scale

    losses = [float(step(model, optimizer, BATCH)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert float(jaxdist.loss_scale(optimizer)) == 2.0**16


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='half'.*'bf16', 'fp16' or None"):
        jaxdist.zero(ADAM, 1, precision="half")  # type: ignore[arg-type]
    tx = jaxdist.zero(ADAM, 1, precision="bf16")
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"none .* is in bfloat16 \(they are in float32\).*optax.tree.cast"):
        tx.update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match=r"tx.update\(grads, opt_state, params\)"):
        tx.update(PARAMS, state)
    with pytest.raises(ValueError, match="here are 0"):
        jaxdist.loss_scale(ADAM.init(PARAMS))
    assert float(jaxdist.loss_scale(state)) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
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
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[precision]

    def run(tx: Any, decorate: Any) -> tuple[Any, list[float]]:
        def step(params: Any, opt_state: Any, x: Any) -> Any:
            scale = jaxdist.loss_scale(opt_state)
            scaled = lambda params, x: scale * loss_fn(params, x)
            _, grads = jaxdist.value_and_grad(scaled, microbatches=2)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, scale

        decorated, state, scales = decorate(step), start(tx, dtype), []
        for _ in range(9):
            *state, scale = decorated(*state, BATCH)
            scales.append(float(scale))
        return state, scales

    expected, scales = run(jaxdist.zero(inner, 0, precision=precision), jax.jit)
    got, same = run(jaxdist.zero(inner, 2, precision=precision), decorate)
    assert same == scales
    assert (len(set(scales)) > 1) == (precision == "fp16")
    assert gap(expected[1].master, got[1].master) < 1e-2  # of gradients in 16 bits
    assert gap(expected[1].master, PARAMS) > 2e-2, "it was trained"
