"""`save`, `restore`, `latest_step`: what was saved comes back, wherever it goes; and what can't be is said."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from catalogue.trees import BAD_SAVES, DTYPES, FOLDERS, MODEL, OTHER_MODELS, REFUSED, TREES, USUAL, some
from harness.errors import raises
from harness.states import same, small_files, there
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import CheckpointError

STATE = {"w": np.arange(3.0)}


def like(state: Any) -> Any:
    """Of other values, where that matters."""
    return jax.tree.map(lambda x: type(x)(0) if isinstance(x, str | int | float | complex) else x, state)


def check(path: Path, state: Any, name: str = "") -> None:
    """It comes back as it was."""
    jaxdist.save(path, state, 1)
    assert same(jaxdist.restore(path, like(state)), state), name


# --- leaves


def test_any_dtype_is_saved_or_refused(tmp_path: Path) -> None:
    refused = dict[str, str]()
    for i, dtype in enumerate(DTYPES):
        state = {"a": {"x": some(dtype)}}
        try:
            check(tmp_path / str(i), state, str(dtype))
        except TypeError as error:
            refused[np.dtype(dtype).name] = str(error)
    assert not {np.dtype(name).name for name in USUAL} & refused.keys()
    assert all("leaf a.x" in text for text in refused.values()), refused
    jaxdist.save(tmp_path / "other", {"x": np.arange(3, dtype=">f4")}, 1)
    assert same(jaxdist.restore(tmp_path / "other", {"x": np.zeros(3, "<f4")}), {"x": np.arange(3, dtype="<f4")})


@pytest.mark.filterwarnings("error")
def test_any_tree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i, (name, tree) in enumerate(TREES.items()):
        check(tmp_path / str(i), tree(), name)
    assert not caplog.records


def test_what_would_come_back_as_something_else(tmp_path: Path) -> None:
    jaxdist.save(tmp_path / "there", {"a": {"x": 1}}, 1)
    for name, (x, said) in REFUSED.items():
        said = str(x.dtype) if said == "dtype" else said
        with raises(TypeError, "leaf a.x", said):
            jaxdist.save(tmp_path / "run", {"a": {"x": x}}, 1)
        assert there(tmp_path / "run") == [], name
        with raises(TypeError, "leaf a.x", "like", said):
            jaxdist.restore(tmp_path / "there", {"a": {"x": x}})


def test_bad_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, error, tokens in BAD_SAVES:
        given: Any = {"path": "run", "state": STATE, "step": 1} | arguments
        with raises(error, *tokens):
            jaxdist.save(**given)
        assert there(tmp_path / "run") == [], arguments
        if "path" in arguments:
            assert list(tmp_path.iterdir()) in ([], [tmp_path / "run"])
            for call in (
                lambda given=given: jaxdist.restore(given["path"], STATE),
                lambda given=given: jaxdist.latest_step(given["path"]),
            ):
                with raises(error, *tokens):
                    call()


def test_leaves_without_a_value(tmp_path: Path) -> None:
    with raises(TypeError, "leaf x"):
        jax.jit(lambda x: jaxdist.save(tmp_path, {"x": x}, 1))(jnp.ones(3))
    w = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(w)
    with raises(ValueError, "leaf w", "donated"):
        jaxdist.save(tmp_path, {"w": w}, 1)
    jaxdist.save(tmp_path, {"x": np.ones(3)}, 1)
    wide = {"x": jax.ShapeDtypeStruct((3,), np.float64)}
    with jax.enable_x64(False), raises(CheckpointError, "leaf x", "float64", "jax_enable_x64"):
        jaxdist.restore(tmp_path, wide)


def test_a_number_that_a_step_has_made_an_array(tmp_path: Path) -> None:
    for i, (saved, target) in enumerate(
        [(jnp.asarray(3), 0), (3, np.int64(0)), (np.float32(3), 0.5), (3, jnp.array(0))]
    ):
        jaxdist.save(tmp_path, {"n": saved}, i)
        got = jaxdist.restore(tmp_path, {"n": target})["n"]
        assert (got, type(got)) == (3, type(target))
    with raises(CheckpointError, "leaf n", "int", "float"):
        jaxdist.restore(tmp_path, {"n": 0.5})


def test_of_another_model(tmp_path: Path) -> None:
    """Which is no damage."""
    jaxdist.save(tmp_path, {"model": MODEL}, 5)
    for change, tokens in OTHER_MODELS.values():
        with raises(CheckpointError, *tokens, str(tmp_path / "5")):
            jaxdist.restore(tmp_path, {"model": MODEL | change})


# --- places


def _mesh(*shape: int) -> Mesh:
    return Mesh(np.reshape(jax.devices(), shape), ("data", "model")[: len(shape)])


def _on(mesh: tuple[int, ...], *specs: P) -> Callable[[Any], Any]:
    place = lambda x, spec: jax.device_put(x, NamedSharding(_mesh(*mesh), spec))
    return lambda tree: jax.tree.map(place, tree, dict(zip(sorted(tree), specs, strict=True)))


PLACED = {
    "half": np.arange(64, dtype=np.float64).reshape(16, 4).astype(jnp.bfloat16), "odd": some("float32", 33),
    "wide": some("int8", 96).reshape(8, 12),
}  # fmt: skip
PLACES: dict[str, Callable[[Any], Any]] = {
    "on the host": lambda tree: tree,
    "on a device": lambda tree: jax.tree.map(jnp.asarray, tree),
    "in shards, padded": jaxdist.shard,
    "over 8": _on((8,), P("data"), P(), P("data")),
    "over 2 x 4": _on((2, 4), P("data", "model"), P(), P(None, "model")),
    "over 4 x 2": _on((4, 2), P(("data", "model")), P(), P("model", "data")),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_from_any_place_into_any_other(place: str, tmp_path: Path) -> None:
    jaxdist.save(tmp_path, PLACES[place](PLACED), 1)
    for name, other in PLACES.items():
        target = other(jax.tree.map(np.zeros_like, PLACED))
        got = jaxdist.restore(tmp_path, target)
        assert jax.tree.map(lambda x: getattr(x, "sharding", None), got) == jax.tree.map(
            lambda x: getattr(x, "sharding", None), target
        ), name
        assert same(jax.tree.map(np.asarray, jaxdist.unshard(got)), PLACED), name


def test_into_what_is_described(tmp_path: Path) -> None:
    state = {"w": jnp.arange(16.0), "key": jax.random.key(4)}
    jaxdist.save(tmp_path, state, 1)
    assert same(jaxdist.restore(tmp_path, jax.eval_shape(lambda: state)), state)
    place = NamedSharding(_mesh(8), P("data"))
    described = {"w": jax.ShapeDtypeStruct((16,), np.float64, sharding=place), "key": state["key"]}
    got = jaxdist.restore(tmp_path, described)["w"]
    assert (got.sharding, np.asarray(got).tolist()) == (place, list(range(16)))


def test_weak_types_and_padding(tmp_path: Path) -> None:
    """``bfloat16 * x`` is bfloat16 with such an `x`, and float32 with another. The padding holds other numbers."""
    step = jaxdist.data_parallel(lambda s, b: (jnp.where(s > 0, 1.0, 2.0), b.sum()))
    weak = {"padded": step(jaxdist.shard(jnp.ones(33)), np.ones(16))[0], "whole": jnp.array(1.5)}
    jaxdist.save(tmp_path, weak, 1)
    got = jaxdist.restore(tmp_path, jax.tree.map(lambda x: jaxdist.unshard(x) + np.ones(x.shape, x.dtype), weak))
    assert [x.weak_type for x in jax.tree.leaves(got)] == [True, True]
    assert got["padded"].sharding != weak["padded"].sharding


def test_orbax_reads_it(tmp_path: Path) -> None:
    """In the shapes that arrays have for the user."""
    state = jaxdist.shard({"even": jnp.arange(16.0), "padded": jnp.arange(33.0).reshape(33, 1), "whole": jnp.ones(2)})
    jaxdist.save(tmp_path, state, 7)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 7
        as_numpy = dict.fromkeys(state, ocp.RestoreArgs(restore_type=np.ndarray))
        plain = manager.restore(7, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    assert same(jax.tree.map(np.asarray, plain), jax.tree.map(np.asarray, jaxdist.unshard(state)))


# --- in the background


def test_a_step_may_take_what_is_being_saved(tmp_path: Path) -> None:
    step = jaxdist.data_parallel(lambda w, b: w - 0.1 * jax.grad(lambda w: jnp.mean(b) * jnp.sum(w))(w), donate=True)
    w = step(jaxdist.shard(jnp.arange(64.0)), np.ones(8))
    expected, host = np.asarray(w), np.arange(5.0)
    saving = jaxdist.save(tmp_path, {"w": w, "host": host}, 1, wait=False)
    host += 1
    for _ in range(5):
        w = step(w, np.ones(8))
    saving.wait()
    assert same(jaxdist.restore(tmp_path, {"w": expected, "host": host}), {"w": expected, "host": np.arange(5.0)})


@pytest.mark.parametrize("call", ["save", "restore", "latest_step", "wait"])
def test_a_failure_in_the_background_is_told_once(call: str, tmp_path: Path) -> None:
    large = {"w": np.random.default_rng(0).normal(size=1 << 17)}
    jaxdist.save(tmp_path, STATE, 1)
    with small_files():
        saving = jaxdist.save(tmp_path, large, 2, wait=False)
        while any(thread.name.startswith("jaxdist-save") for thread in threading.enumerate()):
            time.sleep(0.01)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: jaxdist.save(tmp_path, STATE, 3), "restore": lambda: jaxdist.restore(tmp_path, STATE),
        "latest_step": lambda: jaxdist.latest_step(tmp_path), "wait": saving.wait,
    }  # fmt: skip
    with raises(CheckpointError, str(tmp_path / "2"), "File too large"):
        calls[call]()
    assert jaxdist.latest_step(tmp_path) == 1
    assert there(tmp_path) == ["1"]
    calls[call]()


# --- which is the latest, and which are kept


def save(path: Path, *steps: int, **how: Any) -> None:
    for step in steps:
        jaxdist.save(path, {"w": step}, step, **how)


def test_the_latest_is_known_by_names_and_not_by_times(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 20)
    for step, then in ((5, 3e9), (10, 2e9), (20, 1e9)):
        for file in (tmp_path / str(step), *(tmp_path / str(step)).rglob("*")):
            os.utime(file, (then, then))
    (tmp_path / "30").mkdir()  # of someone else
    (tmp_path / "notes").touch()
    shutil.copytree(tmp_path / "5", tmp_path / "40.orbax-checkpoint-tmp")  # of a killed writer
    assert jaxdist.latest_step(tmp_path) == 20
    assert jaxdist.restore(tmp_path, {"w": 0}) == {"w": 20}
    save(tmp_path, 25)
    assert there(tmp_path) == ["10", "20", "25", "30", "5", "notes"]


@pytest.mark.parametrize(
    ("keep", "steps", "left"),
    [(1, (1, 2, 10), "10"), (2, (1, 2, 10), "10 2"), (3, (8, 9, 10, 11), "10 11 9"), (2, (30, 20, 25), "25 30"),
     (1, (30, 20), "20")],
)  # fmt: skip
def test_the_highest_ones_are_kept(keep: int, steps: tuple[int, ...], left: str, tmp_path: Path) -> None:
    """And the one that was just saved."""
    save(tmp_path, *steps, keep=keep)
    assert " ".join(there(tmp_path)) == left
    assert jaxdist.restore(tmp_path, {"w": 0}) == {"w": max(map(int, left.split()))}


def test_after_going_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The highest step stays the latest, and a save below it warns, once."""
    save(tmp_path, 10, 20, 30)
    assert jaxdist.restore(tmp_path, {"w": 0}, step=10) == {"w": 10}
    save(tmp_path, 15)
    save(tmp_path, 16)
    assert [line.levelname for line in caplog.records if "step 30" in line.getMessage()] == ["WARNING"]
    assert jaxdist.latest_step(tmp_path) == 30
    with raises(FileExistsError, str(tmp_path / "15")):
        save(tmp_path, 15)


@pytest.mark.parametrize("kind", ["leftover", "old"])
def test_what_cannot_be_removed_warns_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On NFS a file that someone reads stays, and so does its folder: saving goes on."""
    run = tmp_path / "run"
    if kind == "leftover":
        (run / "7.abc.orbax-checkpoint-tmp").mkdir(parents=True)
    else:
        save(run, 1)

    def busy(path: Path, **_: Any) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        for step in (2, 3, 4):
            save(run, step, keep=3)
            assert jaxdist.restore(run, {"w": 0}) == {"w": step}
    assert ["busy" in line.getMessage() for line in caplog.records] == [True]
    save(run, 9, keep=1)
    assert there(run) == ["9"]


def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, 3)
    shutil.rmtree(tmp_path / "run")
    save(tmp_path / "run", 1, 2, keep=1)
    assert there(tmp_path / "run") == ["2"]


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        assert jaxdist.latest_step(tmp_path / name) is None
        with raises(FileNotFoundError, name):
            jaxdist.restore(tmp_path / name, STATE)
    jaxdist.save(tmp_path, STATE, 3)
    with raises(FileNotFoundError, "step 4", "3"):
        jaxdist.restore(tmp_path, STATE, step=4)


# --- folders


def test_folders_of_any_name(tmp_path: Path) -> None:
    for i, name in enumerate(FOLDERS):
        jaxdist.save(tmp_path / name, {"w": np.full(3, i)}, 1)
    for i, name in enumerate(FOLDERS):
        assert jaxdist.restore(tmp_path / name, {"w": np.zeros(3, int)})["w"].tolist() == [i] * 3, name


def test_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in ("file", "file/below", "dangling/below"):
        with raises(CheckpointError, str(tmp_path / path), "exist" if path == "file" else "[Errno"):
            jaxdist.save(tmp_path / path, STATE, 1)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    jaxdist.save(tmp_path / "link" / "below", STATE, 1)
    assert same(jaxdist.restore(tmp_path / "there" / "below", STATE), STATE)
