"""`save`, `restore`, `latest_step` in one process of several devices."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from harness import training
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from states import same, there

import jaxdist
from jaxdist import CheckpointError
from jaxdist.placements.layouts import Padded


def test_like_without_values(tmp_path: Path) -> None:
    state = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(4)}
    jaxdist.save(tmp_path, state, 1)
    assert same(jaxdist.restore(tmp_path, jax.eval_shape(lambda: state)), state)


def test_shards_have_their_logical_shape_on_disk(tmp_path: Path) -> None:
    state = jaxdist.shard({"even": jnp.arange(16.0), "padded": jnp.arange(33.0).reshape(33, 1), "whole": jnp.ones(2)})
    assert type(state["padded"]) is Padded
    jaxdist.save(tmp_path, state, 7)
    # As plain orbax sees it.
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 7
        as_numpy = dict.fromkeys(state, ocp.RestoreArgs(restore_type=np.ndarray))
        plain = manager.restore(7, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    assert {k: v.shape for k, v in plain.items()} == {"even": (16,), "padded": (33, 1), "whole": (2,)}
    assert np.asarray(plain["padded"]).ravel().tolist() == list(range(33))
    got = jaxdist.restore(tmp_path, state)
    assert isinstance(got["padded"], Padded)
    assert got["padded"].layout is state["padded"].layout
    assert got["even"].sharding == state["even"].sharding
    assert same(jaxdist.unshard(got), jaxdist.unshard(state))
    # And what was in shards may be restored as a whole.
    whole = jaxdist.restore(tmp_path, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state))
    assert np.array_equal(whole["padded"].ravel(), np.arange(33.0))


def test_whole_into_shards(tmp_path: Path) -> None:
    plain = {"even": np.arange(16.0), "padded": np.arange(33.0)}
    jaxdist.save(tmp_path, plain, 1)
    got = jaxdist.restore(tmp_path, jaxdist.shard(jax.tree.map(np.zeros_like, plain)))
    assert not got["even"].is_fully_replicated
    assert same(jax.tree.map(np.asarray, got), plain)


def test_into_a_described_place(tmp_path: Path) -> None:
    jaxdist.save(tmp_path, {"w": np.arange(16.0)}, 1)
    place = NamedSharding(jaxdist.init().mesh, P("data"))
    got = jaxdist.restore(tmp_path, {"w": jax.ShapeDtypeStruct((16,), np.float64, sharding=place)})
    assert got["w"].sharding == place


@pytest.mark.slow
def test_training_goes_on(tmp_path: Path) -> None:
    """Bit for bit; at another level up to rounding."""
    straight = training.run(str(tmp_path / "straight"), 10, 3)
    training.run(str(tmp_path / "cut"), 5, 3)
    cut = training.run(str(tmp_path / "cut"), 10, 3)
    assert cut["bits"] == straight["bits"]
    shutil.rmtree(tmp_path / "cut" / "10")
    other = training.run(str(tmp_path / "cut"), 10, 2)
    assert max(np.abs(np.subtract(other["params"][k], v)).max() for k, v in straight["params"].items()) <= 1e-10


def test_in_the_background(tmp_path: Path) -> None:
    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(batch) * jnp.sum(w))(w)

    w = step(jaxdist.shard(jnp.arange(64.0)), np.ones(8))
    expected = np.asarray(w)
    saving = jaxdist.save(tmp_path, {"w": w}, 1, wait=False)
    for _ in range(5):
        w = step(w, np.ones(8))  # takes its memory
    saving.wait()
    assert saving.done
    assert np.array_equal(jaxdist.restore(tmp_path, {"w": expected})["w"], expected)


def test_what_killed_writers_left_is_passed_over_and_removed(tmp_path: Path) -> None:
    jaxdist.save(tmp_path, {"w": np.ones(3)}, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    (tmp_path / "3").mkdir()  # of someone else
    assert jaxdist.latest_step(tmp_path) == 1
    jaxdist.save(tmp_path, {"w": np.ones(3)}, 2)
    assert there(tmp_path) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.zeros((3, 4))}, r"leaf model\.w of checkpoint .*5 has shape \(3, 3\), in `like` \(3, 4\)"),
        ({"w": np.zeros((3, 3), np.float32)}, r"leaf model\.w .* is float64, in `like` float32"),
        ({"v": np.zeros(3)}, r"5 has no leaf model\.v"),
        ({"n": 1.5}, r"model\.n .* is int64, in `like` float"),
        ({"n": "1"}, r"model\.n .*string"),
        ({"key": np.zeros(2, np.uint32)}, r"model\.key .* is a PRNG key"),
        ({"key": jax.random.key(0, impl="rbg")}, r"model\.key .*key<fry>.*key<rbg>"),
        ({"w": jax.random.key(0)}, r"model\.w .* is not a PRNG key"),
        ({"w": None}, r"has a leaf model\.w that `like` has not"),
        ({"none": np.zeros((0, 2))}, r"model\.none .*\(0, 3\), in `like` \(0, 2\)"),
    ],
)
def test_of_another_model(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = {"w": np.zeros((3, 3)), "n": 1, "key": jax.random.key(0), "none": np.zeros((0, 3))}
    jaxdist.save(tmp_path, {"model": model}, 5)
    with pytest.raises(CheckpointError, match=message):
        jaxdist.restore(tmp_path, {"model": model | change})


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        jaxdist.restore(tmp_path / "nowhere", {"w": 0})
    (tmp_path / "file").touch()
    assert jaxdist.latest_step(tmp_path / "file") is None
    jaxdist.save(tmp_path, {"w": 0}, 3)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4 .*there: 3"):
        jaxdist.restore(tmp_path, {"w": 0}, step=4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": -1}, ValueError, "0 or more"),
        ({"step": 1.5}, ValueError, "integer"),
        ({"step": True}, ValueError, "integer"),
        ({"keep": 0}, ValueError, "1 or more"),
        ({"state": {"n": 2**63}}, ValueError, "leaf n can't be saved: 9223372036854775808 does not fit into 64 bits"),
        ({"state": {}}, ValueError, "no leaves"),
        ({"state": {"f": len}}, TypeError, "leaf f can't be saved: builtin"),
        ({"state": {"o": np.array([None])}}, TypeError, "leaf o can't be saved"),
        ({"state": {"a.b": 1, "a": {"b": 2}}}, ValueError, r"a\.b"),
    ],
)
def test_bad_calls(arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        jaxdist.save(tmp_path, **{"state": {"w": 0}, "step": 1} | arguments)
    assert there(tmp_path) == []


def test_a_donated_state(tmp_path: Path) -> None:
    w = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(w)
    with pytest.raises(ValueError, match="leaf w was donated"):
        jaxdist.save(tmp_path, {"w": w}, 1)


def test_states_of_flax_and_optax(tmp_path: Path) -> None:
    from flax.training.train_state import TrainState

    params = {"layers_0": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
    state = TrainState.create(apply_fn=lambda: None, params=params, tx=optax.adamw(optax.cosine_decay_schedule(1.0, 9)))
    state = state.apply_gradients(grads=params)
    jaxdist.save(tmp_path, state, 1)
    fresh = TrainState.create(apply_fn=state.apply_fn, params=params, tx=state.tx)
    assert same(jaxdist.restore(tmp_path, fresh), state)


def test_killed_between_the_renames_of_a_replacement(tmp_path: Path) -> None:
    jaxdist.save(tmp_path, {"w": jnp.ones(3)}, 5)
    (tmp_path / "5").rename(tmp_path / "5.replaced.orbax-checkpoint-tmp")
    assert jaxdist.latest_step(tmp_path) == 5
    assert jaxdist.restore(tmp_path, {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]
    with pytest.raises(FileExistsError, match="there is a checkpoint of this step"):
        jaxdist.save(tmp_path, {"w": jnp.zeros(3)}, 5)
    jaxdist.save(tmp_path, {"w": jnp.zeros(3)}, 6)
    assert there(tmp_path) == ["5", "6"]
    assert jaxdist.restore(tmp_path, {"w": jnp.zeros(3)}, step=5)["w"].tolist() == [1, 1, 1]
