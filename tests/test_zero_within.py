"""Hybrid sharding, ``zero(..., within=)``: in shards within groups of devices, and whole in each group."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import optimizers
from harness import oracle
from harness.parity import mesh

import jaxdist
from jaxdist.placements.layouts import Padded, physical
from jaxdist.planning.schedule import collectives

# --- as on one device


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices", "within", "level"), [("clip_adamw", 4, 2, 3), ("odd_parameters", 8, 4, 2)])
def test_as_on_one_device(name: str, devices: int, within: int, level: int) -> None:
    case = oracle.case(name, level, within)
    got = oracle.run_decorated(case, mesh=mesh(devices))
    assert oracle.difference(oracle.expected(name), got) < case.tolerance


@pytest.mark.slow
def test_optimizers_as_on_one_device() -> None:
    names = ["lamb", "adafactor", "muon"]
    got = optimizers.run_sharded(names, [1, 2, 2], within=2, mesh=mesh(8))
    assert optimizers.gap(optimizers.run_plain(names), got) < 1e-10


# --- what is sent, and what is kept


def mlp(level: Any, within: Any) -> tuple[Any, Any, Any]:
    tx = jaxdist.zero(optax.adamw(1e-2), level, within)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=(16, 24))), "b": jnp.asarray(rng.normal(size=(24, 7)))}
    return step, (params, tx.init(params)), rng.normal(size=(16, 16))


IN, ACROSS, ALL = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)


@pytest.mark.optimised
@pytest.mark.parametrize("level", [1, 3])
def test_nothing_crosses_the_groups_but_slices(level: Any) -> None:
    step, state, x = mlp(level, 2)
    decorated = jaxdist.data_parallel(step, mesh=mesh(4))
    found = collectives(decorated.lower(*state, x).compile().as_text(), 4)
    assert {one.groups for one in found if one.kind in ("all-gather", "reduce-scatter")} == {IN}
    sums: Counter[Any] = Counter()
    for one in found:
        if one.kind == "all-reduce":
            sums[one.groups] += one.bytes // 8
    assert sums == {ACROSS: (16 * 24 + 24 * 7) // 2, ALL: 1}  # half of the gradients; the loss


@pytest.mark.parametrize(("devices", "level"), [(4, 2), (8, 3)])
def test_a_group_keeps_what_all_devices_would(level: Any, devices: int) -> None:
    step, state, x = mlp(level, 2)
    *state, _ = jaxdist.data_parallel(step, mesh=mesh(devices))(*state, x)
    flat, whole = mlp(level, None), mlp(0, None)
    *flat_state, _ = jaxdist.data_parallel(flat[0], mesh=mesh(2))(*flat[1], x)
    row = jaxdist.memory({"state": state}).total
    assert row == jaxdist.memory({"state": flat_state}).total
    assert row.device < jaxdist.memory({"state": whole[1]}).total.device
    params = state[0]
    assert physical(params["a"]).is_fully_replicated == (level < 3)
    assert params["a"].shape == (16, 24)


def test_a_group_of_all_devices_is_none_and_groups_of_one_keep_everything() -> None:
    step, state, x = mlp(3, 4)
    (params, _, _) = jaxdist.data_parallel(step, mesh=mesh(4))(*state, x)
    assert isinstance(params["a"], jax.Array)
    step, state, x = mlp(3, 1)
    *state, _ = jaxdist.data_parallel(step, mesh=mesh(4))(*state, x)
    assert jaxdist.memory(state).total.device == jaxdist.memory(state).total.whole


# --- shard, unshard, checkpoints, check_sync, evaluation, plans


def test_shard_and_unshard() -> None:
    tree = {"even": jnp.arange(12.0).reshape(4, 3), "odd": jnp.arange(5.0), "one": jnp.ones(())}
    held = jaxdist.shard(tree, within=2)
    assert repr(held["odd"]) == "Padded(float64[5/data], pad=1, groups=4)"
    assert jaxdist.memory(held).total.device == (6 + 3 + 1) * 8
    back = jaxdist.unshard(held)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True))
    assert np.array_equal(np.asarray(held["odd"]), tree["odd"])
    jaxdist.check_sync(held)


@pytest.mark.parametrize("shape", [(8, 3), (13, 7)])
def test_a_group_whose_copy_differs_is_named(shape: tuple[int, ...]) -> None:
    held = jaxdist.shard(jnp.zeros(shape), within=2)
    whole = physical(held)
    parts = [np.array(shard.data) for shard in whole.addressable_shards]
    parts[5] += 1  # of the third group, the second slice
    arrays = [jax.device_put(part, shard.device) for part, shard in zip(parts, whole.addressable_shards, strict=True)]
    array = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, arrays)
    with pytest.raises(
        jaxdist.SyncError, match=r"slice 2 of 2, has other bits on rank 0 device .*5 than on rank 0 device"
    ):
        jaxdist.check_sync({"w": Padded(array, held.layout) if isinstance(held, Padded) else array})


def test_a_state_can_change_its_groups_on_the_way() -> None:
    expected, found = mlp(0, None), None
    for level, within in ((3, 2), (3, 4), (2, None), (1, 2)):
        step, state, x = mlp(level, within)
        *found, _ = jaxdist.data_parallel(step, mesh=mesh(8))(*(found or state), x)
    state = expected[1]
    for _ in range(4):
        *state, _ = jax.jit(expected[0])(*state, expected[2])
    assert oracle.difference(oracle.leaves(state), jaxdist.unshard(found)) < 1e-10


def test_evaluating_functions_take_them() -> None:
    held = jaxdist.shard({"w": jnp.arange(12.0).reshape(4, 3)}, within=4)
    x = np.random.default_rng(0).normal(size=(16, 4))
    got = jaxdist.data_parallel(lambda p, x: jnp.mean(x @ p["w"]), donate=False)(held, x)
    assert abs(got - np.mean(x @ np.arange(12.0).reshape(4, 3))) < 1e-12


@pytest.mark.parametrize("odd", [False, True])
def test_checkpoints_from_and_to_any_layout(tmp_path: Path, odd: bool) -> None:
    tree = {"w": jnp.arange(60.0).reshape(12, 5) if not odd else jnp.arange(7.0), "n": 3}
    layouts = [jaxdist.shard(tree["w"], within=within) for within in (2, 4, None)] + [tree["w"]]
    for i, w in enumerate(layouts):
        jaxdist.save(tmp_path / f"{i}", {"w": w, "n": 3}, step=1)
        for like in layouts:
            back = jaxdist.restore(tmp_path / f"{i}", like={"w": like, "n": 0})
            assert type(back["w"]) is type(like)
            assert getattr(back["w"], "layout", None) == getattr(like, "layout", None)
            assert np.array_equal(np.asarray(back["w"]), tree["w"])


def test_a_checkpoint_of_slices_gathers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = jaxdist.shard(jnp.arange(60.0).reshape(12, 5), within=2)
    monkeypatch.setattr("jaxdist.checkpoint.writing.unshard", None)
    monkeypatch.setattr(Padded, "__array__", None)
    jaxdist.save(tmp_path, {"w": w}, step=1)
    monkeypatch.undo()
    back = jaxdist.restore(tmp_path, like={"w": np.zeros((12, 5))})
    assert np.array_equal(back["w"], np.arange(60.0).reshape(12, 5))


def test_as_a_batch_they_are_refused() -> None:
    rows = jaxdist.shard(jnp.arange(32.0).reshape(16, 2), within=2)
    with pytest.raises(ValueError, match="batch leaf x is kept in shards within groups of devices, which is for state"):
        jaxdist.data_parallel(lambda w, x: jnp.mean(w * x), batch_argnums=1)(jnp.ones(2), rows)
    # Beside a batch with as many rows it is taken for state.
    got = jaxdist.data_parallel(lambda w, x: jnp.sum(w * x))(rows, np.ones((16, 2)))
    assert got == np.arange(32.0).sum()


def test_what_does_not_divide_the_devices() -> None:
    step, state, x = mlp(2, 3)
    with pytest.raises(ValueError, match="groups of 3 devices don't divide the 4 devices"):
        jaxdist.data_parallel(step, mesh=mesh(4))(*state, x)
    with pytest.raises(ValueError, match="within='node'"):
        jaxdist.zero(optax.sgd(0.1), 2, within="node")
