"""Meshes of the user's own: one that is set for the process or around a call, one that a step names, and one over which
state comes in shards.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import jobs, parity, quick
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 4))
W = np.random.default_rng(1).normal(size=(4, 3))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SET = {
    "all devices": lambda: jax.set_mesh(jax.make_mesh((8,), ("S",), (AUTO,))),
    "explicit": lambda: jax.set_mesh(jax.make_mesh((8,), ("S",), (EXPLICIT,))),
    "of two axes": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("fsdp", "tensor"), (AUTO, AUTO))),
    "of our name": lambda: jax.set_mesh(jax.make_mesh((8,), ("data",), (EXPLICIT,))),
    "one device": lambda: jax.set_mesh(jax.make_mesh((1,), ("S",), (AUTO,), devices=jax.devices()[:1])),
    "with mesh": lambda: Mesh(jax.devices(), ("S",)),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(w: Any, opt_state: Any, key: Any, x: Any) -> Any:
    """With control flow, random numbers and a state in shards."""
    x = x + jax.random.normal(key, x.shape)
    loss, grads = jax.value_and_grad(loss_fn)(w, x)
    updates, opt_state = jaxdist.zero(optax.adam(0.1), 1).update(grads, opt_state, w)
    w = jax.lax.cond(loss > 0, lambda: optax.apply_updates(w, updates), lambda: w)
    return jax.lax.fori_loop(0, 2, lambda _, w: w * 0.99, w), opt_state, jax.random.split(key)[0], loss


def train(folder: Path) -> Any:
    """What a training script calls."""
    decorated: Any = jaxdist.data_parallel(step, check_every=2)
    *state, _ = decorated(W, optax.adam(0.1).init(W), jax.random.key(0), X)
    *state, loss = decorated(*state, X)
    jaxdist.check_sync(state)
    jaxdist.save(folder, state, 1)
    state = jaxdist.restore(folder, state)
    evaluate = jaxdist.data_parallel(loss_fn, donate=False)
    ahead = evaluate.lower(state[0], X).compile()(state[0], X)  # type: ignore[attr-defined]
    types = evaluate.eval_shape(state[0], X)  # type: ignore[attr-defined]
    assert "all-reduce" in str(jaxdist.explain(evaluate, state[0], X))
    losses = [evaluate(state[0], x) for x in jaxdist.loader(X, batch_size=8, shuffle=False)]
    means = jaxdist.per_device(lambda x: x.mean(0, keepdims=True), P("data"), P("data"))(X)
    return jax.tree.map(np.asarray, (jaxdist.unshard(state[:2]), loss, ahead, losses, means)), types.dtype


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with quick.compilation():
        return train(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", ["of two axes", "of our name", "one device", "with mesh"])
def test_a_mesh_that_is_set(name: str, trained: Any, tmp_path: Path) -> None:
    want, kind = trained
    with SET[name]():
        before = jax.sharding.get_abstract_mesh(), jax.sharding.get_mesh()
        got, found = train(tmp_path / "set")
        assert (jax.sharding.get_abstract_mesh(), jax.sharding.get_mesh()) == before
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert found == kind


def constrained(w: Any, x: Any) -> Any:
    """As maxtext does, and flax's ``with_logical_constraint``."""

    def loss(w: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("S"))
        return jnp.mean(hidden**2)

    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("name", ["all devices", "with mesh"])
def test_a_step_that_names_its_axes(name: str) -> None:
    with SET[name]():
        want = jax.jit(constrained)(jnp.asarray(W), X)
        got = jaxdist.data_parallel(constrained)(W, X)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    with pytest.raises(RuntimeError, match="requires a non-empty mesh"):  # the mesh is no longer set: as under jit
        jaxdist.data_parallel(constrained)(W, X)


def test_a_step_that_asks_for_shardings() -> None:
    def resharded(w: Any, x: Any) -> Any:
        return w - jax.sharding.reshard(x, P("S")).mean(0)[:, None]

    with SET["explicit"](), pytest.raises(ValueError, match="mesh") as raised:
        jaxdist.data_parallel(resharded)(W, X)
    assert any("whole batch, without the mesh of jax.set_mesh" in note for note in raised.value.__notes__)


# JAX traces what vmap adds to a layer's bias in the context of the mesh that it is constrained to.
LAYERS: dict[str, Any] = {
    "plain": lambda w, b, x: x @ w + b,
    "in a loop": lambda w, b, x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w + b) @ w.T, None), x, None, length=2)[0],
    "computed again": lambda w, b, x: jax.checkpoint(lambda w: jnp.sin(x @ w + b))(w),
    "called": lambda w, b, x: jax.jit(lambda w: jnp.sin(x @ w + b))(w),
    "constrained within": lambda w, b, x: jax.lax.with_sharding_constraint(x @ w, own_mesh(1)) + b,
}


def own_mesh(devices: int) -> NamedSharding:
    return NamedSharding(jax.make_mesh((devices,), ("S",), (AUTO,), devices=jax.devices()[:devices]), P())


@pytest.mark.parametrize(
    ("layer", "devices", "level"),
    [*((name, 1, 3 * (i % 2)) for i, name in enumerate(LAYERS)), ("plain", 1, 3), ("plain", 8, 3)],
)
def test_a_step_that_constrains_to_a_mesh_of_its_own(layer: str, devices: int, level: Any) -> None:
    """As equinox's notebook on parallelism does."""

    def train(decorate: Any, tx: Any) -> Any:
        def step(w: Any, opt_state: Any, x: Any) -> Any:
            w = jax.lax.with_sharding_constraint(w, own_mesh(devices))
            out = lambda w: jax.vmap(LAYERS[layer], (None, None, 0))(*w, x)
            updates, opt_state = tx.update(jax.grad(lambda w: jnp.mean(out(w) ** 2))(w), opt_state, w)
            return optax.apply_updates(w, updates), opt_state

        w, step = [np.tile(W, (1, 8)), np.ones(24)], decorate(step)
        opt_state = tx.init(w)
        for _ in range(2):
            w, opt_state = step(w, opt_state, X)
        return jaxdist.unshard(w)

    want = train(jax.jit, optax.adam(0.1))
    got = train(jaxdist.data_parallel, jaxdist.zero(optax.adam(0.1), level))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), got, want)


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
jax.set_mesh(jax.make_mesh((4,), ("S",), (jax.sharding.AxisType.Auto,)))  # as an import of netket does
import jaxdist
jaxdist.init()
X = np.arange(24.0).reshape(8, 3) / 24
loss = lambda w: jnp.mean((X @ w) ** 2)
step = jaxdist.data_parallel(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
w = step(step(jnp.ones(3), X), X)
want = jnp.ones(3)
for _ in range(2):
    want -= 0.1 * jax.grad(loss)(want)
np.testing.assert_allclose(w * 1.0, want, rtol=1e-12)
assert jaxdist.allreduce(np.ones(2)).tolist() == [1, 1]
"""


def test_a_mesh_set_for_the_whole_process() -> None:
    env = jobs.environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"})
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


DEVICES = jax.devices()
SHARDED = {
    "along an axis": NamedSharding(Mesh(DEVICES, ("S",)), P("S")),
    "along one of two": NamedSharding(Mesh(np.array(DEVICES).reshape(2, 4), ("a", "b")), P("b")),
    "along both": NamedSharding(Mesh(np.array(DEVICES).reshape(2, 4), ("a", "b")), P(("a", "b"))),
    "along both dimensions": NamedSharding(Mesh(np.array(DEVICES).reshape(4, 2), ("a", "b")), P("b", "a")),
    "in another order": NamedSharding(Mesh(DEVICES[::-1], ("data",)), P("data")),
    "explicitly": NamedSharding(jax.make_mesh((4, 2), ("a", "b"), (EXPLICIT, EXPLICIT)), P("b")),
    "in the host's memory": NamedSharding(Mesh(DEVICES, ("S",)), P("S"), memory_kind="unpinned_host"),
}


@pytest.mark.parametrize(
    ("name", "level"), [*((name, 3 * (i % 2)) for i, name in enumerate(SHARDED)), ("along both", 3)]
)
def test_state_in_shards_of_a_mesh_of_the_same_devices(name: str, level: Any) -> None:
    tx = jaxdist.zero(optax.adam(0.1), level)
    w = {"a": np.arange(8.0 * 8).reshape(8, 8) / 64, "b": np.ones((8, 8))}

    def step(w: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean((x @ w["a"] @ w["b"]) ** 2))(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    x = np.random.default_rng(0).normal(size=(16, 8))
    state = (w, optax.adam(0.1).init(w))
    want = jax.jit(step)(*jax.jit(step)(*state, x), x)
    sharded = jax.tree.map(lambda x: jax.device_put(x, SHARDED[name]) if np.ndim(x) else x, state)
    decorated: Any = jaxdist.data_parallel(step)
    jax.tree.map(np.testing.assert_array_equal, jaxdist.unshard(sharded), state)
    got = jaxdist.unshard(decorated(*decorated(*sharded, x), x))
    parity.compare(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), 1e-10)
    assert not any(x.is_deleted() for x in jax.tree.leaves(sharded) if isinstance(x, jax.Array)), "they were copied"


def test_state_in_shards_of_other_devices() -> None:
    w = jax.device_put(np.ones(4), NamedSharding(Mesh(DEVICES[:4], ("S",)), P("S")))
    with pytest.raises(ValueError, match=r"state leaf w is in shards over the devices 0 to 3, .* runs on 0 to 7"):
        jaxdist.data_parallel(lambda w, x: w - x.mean(0))(w, X)
