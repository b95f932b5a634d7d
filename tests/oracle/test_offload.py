"""The optimizer's state in the host's memory, ``zero(..., offload=True)``."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness.check import check_steps, close, decorated, mesh, train_step
from harness.errors import raises
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist
from jaxdist import planning

HOST = "pinned_host"
RNG = np.random.default_rng(0)
PARAMS = {"a": jnp.asarray(RNG.normal(size=(16, 24))), "b": jnp.asarray(RNG.normal(size=(24, 9))), "c": jnp.ones(9)}
X = RNG.normal(size=(16, 16))
ADAM = optax.adamw(1e-2)
WAYS = [(1, None, 1), (4, None, 2), (8, 2, 3)]  # devices, groups of them, level


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices have memories of these names too, which hold nothing apart: here they say that they do."""
    # private: no CPU device has a memory of its own, and no GPU is here
    monkeypatch.setattr("jaxdist.machine.Machine.has_own_memory", True)
    monkeypatch.setattr("jaxdist.compilation.program.check_host_memory", lambda mesh: None)  # private: likewise


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) * p["c"]) ** 2)


def step_of(level: Any, offload: bool = True, within: Any = None) -> Any:
    return train_step(loss_fn, jaxdist.zero(ADAM, level, within, offload=offload))


def kinds(tree: Any) -> set[Any]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


START = PARAMS, ADAM.init(PARAMS)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_where_it_lies(way: tuple[int, int | None, int]) -> None:
    devices, within, level = way
    params, opt_state = check_steps(step_of(level, within=within), START, [X, X], on=devices)
    assert (kinds(opt_state), kinds(params)) == ({HOST}, {"device"})
    *flat, _ = decorated(step_of(level, False, within), devices)(*START, X)
    moved, kept = planning.memory({"s": opt_state}).total, planning.memory({"s": flat[1]}).total
    assert (moved.host, moved.device) == (kept.device - 4, 4)  # the counter's bytes are on the device
    assert (moved.whole, moved.padding) == (kept.whole, kept.padding)
    assert "in host memory" in str(planning.memory(opt_state))


def test_it_can_move_on_the_way() -> None:
    """What comes in the host's memory stays there; what comes in shards is moved there."""
    want, got, plain = START, START, jax.jit(step_of(0, False))
    for level, offload, kind in [(2, False, "device"), (1, True, HOST), (3, True, HOST), (1, False, HOST)]:
        (*want, _), (*got, _) = plain(*want, X), decorated(step_of(level, offload), 4)(*got, X)
        assert kinds(got[1]) == {kind}, level
    close(tuple(got), tuple(want))


def test_what_takes_it(tmp_path: Path) -> None:
    """`unshard`, `check_sync`, evaluation, a step that keeps it, and checkpoints from and to it."""
    step = decorated(step_of(2), 4)
    *state, _ = step(*START, X)
    assert kinds(jaxdist.unshard(state)) == {"device"}
    jaxdist.check_sync(state)
    norm = decorated(lambda s, x: optax.tree.norm(s[0].mu), 4)
    close(norm(state[1], X), optax.tree.norm(jaxdist.unshard(state[1])[0].mu))
    close(step(*state, X), step(*state, X), 0)
    *flat, _ = decorated(step_of(2, False), 4)(*START, X)
    for i, saved in enumerate((tuple(state), tuple(flat))):
        jaxdist.save(tmp_path / f"{i}", saved, step=1)
        for like in (tuple(state), tuple(flat), START):
            back = jaxdist.restore(tmp_path / f"{i}", like)
            assert like is START or kinds(back[1]) == kinds(like[1])
            *found, _ = step(*back, X)
            assert kinds(found[1]) == {HOST}


@pytest.mark.parametrize("devices", [1, 4])
def test_state_that_is_used_elsewhere(devices: int) -> None:
    """Read before the update, in a branch, by `jax.jit`, and not at all; effects."""
    tx = jaxdist.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 1, offload=True)
    seen: list[float] = []

    def step(params: Any, opt_state: Any, spare: Any, x: Any) -> Any:
        before = optax.tree.norm(opt_state[1][0].nu)
        jax.debug.callback(lambda n: seen.append(float(n)), before)
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(params)

        @jax.jit
        def update(params: Any, opt_state: Any) -> Any:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = lax.cond(value > 0, update, lambda *state: state, params, opt_state)
        return params, opt_state, spare, before

    w = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)))
    got = check_steps(step, (w, tx.init(w), tx.init(w)), [X, X, X], on=devices)
    jax.effects_barrier()
    assert kinds(got[1]) == {HOST}
    assert len(seen) == 6  # of both runs, once a call
    np.testing.assert_allclose(sorted(seen)[::2], sorted(seen)[1::2], rtol=1e-6)


def test_arrays_of_your_own_in_the_host() -> None:
    """Whole on several devices, or numbers: then they are put on the devices."""
    where = NamedSharding(mesh(4), PartitionSpec(), memory_kind=HOST)
    w, n = jax.device_put(jnp.ones(3), where), jax.device_put(jnp.ones(()), where)
    w, n = decorated(lambda w, n, x: (w + x.sum(), n + 1), 4)(w, n, np.ones((4, 2)))
    assert w.sharding.memory_kind == n.sharding.memory_kind == "device"
    assert w.tolist() == [9.0] * 3


def test_ordered_effects_are_refused() -> None:
    def printing(params: Any, opt_state: Any, x: Any) -> Any:
        jax.debug.callback(lambda n: None, jnp.sum(params["c"]), ordered=True)
        return step_of(1)(params, opt_state, x)

    with raises(jaxdist.StepError, "ordered=True"):
        decorated(printing, 1)(*START, X)
