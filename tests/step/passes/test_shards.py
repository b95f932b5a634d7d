"""What the *shards* pass computes on slices, and so does not gather."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxdist
from jaxdist.step.interpreter import subjaxprs
from jaxdist.step.primitives import gather_shards_p

BATCH = np.random.default_rng(0).normal(size=(24,))


def gathers(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of the arrays that a program gathers."""
    found = [v.aval.shape for e in jaxpr.eqns if e.primitive is gather_shards_p for v in e.outvars]
    return found + [shape for e in jaxpr.eqns for inner in subjaxprs(e) for shape in gathers(inner)]


def check(tx: optax.GradientTransformation, w: np.ndarray, devices: int, view: Any = lambda w: w) -> list[Any]:
    """Train `w`, of which the model sees `view`, as one device would. What each step of level 2 gathers."""

    def step_of(tx: Any) -> Any:
        def step(w: Any, opt_state: Any, x: Any) -> Any:
            def loss_fn(w: Any) -> Any:
                seen = view(w)
                wave = jnp.sin(x[:, None] * jnp.arange(1, seen.size + 1)).reshape(-1, *seen.shape)
                return jnp.mean((wave * jnp.tanh(seen)).reshape(x.shape[0], -1).sum(1) ** 2)

            updates, opt_state = tx.update(jax.grad(loss_fn)(w), opt_state, w)
            return optax.apply_updates(w, updates), opt_state

        return step

    mesh = Mesh(jax.devices()[:devices], ("data",))
    sharded: Any = jaxdist.data_parallel(step_of(jaxdist.zero(tx, 2)), mesh=mesh, bucket_bytes=0)
    programs: list[Any] = []
    sharded._traced = lambda program, _: programs.append(program)
    plain = jax.jit(step_of(tx))
    ours = theirs = (jnp.array(w), tx.init(jnp.array(w)))
    for _ in range(3):
        ours, theirs = sharded(*ours, BATCH), plain(*theirs, BATCH)
    for x, y in zip(jax.tree.leaves(jaxdist.unshard(ours)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    return gathers(programs[0].jaxpr)


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape)


def test_a_gradient_is_reduced_along_the_dimension_of_its_state_through_a_reshape() -> None:
    shape = (4, 8, 16)  # in slices of the last dimension; alone (32, 16) would be in slices of the first
    assert check(optax.adam(0.1), values(*shape), 4, lambda w: w.reshape(32, 16)) == [shape]


def test_a_gradient_of_a_reshaped_parameter_is_gathered_rather_than_its_state() -> None:
    assert check(optax.adam(0.1), values(4, 8, 16), 4, lambda w: w.reshape(4, -1)) == [(4, 128), (4, 8, 16)]


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("shape", [(8, 33), (7, 5), (2, 3, 5)])
def test_inner_products_are_sums_over_the_slices(shape: tuple[int, ...], devices: int) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        mu = 0.9 * state + updates
        return -0.1 * mu * jnp.tanh(jnp.vdot(mu, updates) + jnp.vdot(params, mu) + jnp.vdot(mu, jnp.ones(mu.shape))), mu

    tx = optax.GradientTransformation(lambda params: jnp.zeros_like(params), update)
    assert check(tx, values(*shape), devices) == [shape]


def test_raveled_arrays_in_their_order_are_gathered() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        mu = 0.9 * state + updates
        return -0.1 * mu * jnp.tanh(jnp.sort(mu.ravel())[3]), mu

    shape = (8, 33)
    assert sorted(
        check(optax.GradientTransformation(lambda params: jnp.zeros_like(params), update), values(*shape), 3)
    ) == [
        shape,
        shape,
    ]


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_history_is_written_and_read_on_slices(devices: int) -> None:
    """By an index, by a traced one, and by several."""

    def init(params: Any) -> Any:
        return jnp.zeros((5, *params.shape)), jnp.zeros((), int)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        history, count = state
        history = history.at[count % 5].set(updates).at[4].set(params)
        recent = history[count % 5] + history[jnp.array([4, 0]) - count % 2].sum(0)
        return -0.01 * recent, (history, count + 1)

    shape = (8, 33)
    assert check(optax.GradientTransformation(init, update), values(*shape), devices) == [shape]
