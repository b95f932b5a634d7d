"""Checkpoints of several ranks, each in a folder of its own."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness.errors import error_of
from harness.states import data_file, flip, same, small_files

import jaxdist

ctx = jaxdist.get_context()
WIDE = np.random.default_rng(0).integers(0, 2**32, (60, 500), np.uint32)  # does not compress: only checksums can tell
LAST = ctx.rank == ctx.size - 1


def two_steps(path: str) -> None:
    """In shards, padded, and whole."""
    for step in (10, 20):
        jaxdist.save(path, {"w": jaxdist.shard(WIDE + step), "odd": jaxdist.shard(WIDE[:7, :3]), "step": step}, step)
    like = {"w": jaxdist.shard(WIDE), "odd": WIDE[:7, :3], "step": 0}
    got = jaxdist.restore(path, like)
    assert got["w"].sharding == like["w"].sharding
    assert same(jax.tree.map(np.asarray, jaxdist.unshard(got)), like | {"w": WIDE + 20, "step": np.asarray(20)})


def goes_on(path: str, step: int) -> None:
    """State that another job has saved comes back bit for bit, and is saved anew."""
    whole = {"w": WIDE, "odd": WIDE[:7, :3].view(np.float32), "row": WIDE[0], "step": 0}
    state = {name: jaxdist.shard(x) if name in ("w", "odd") else x for name, x in whole.items()}
    if step:
        state = jaxdist.restore(path, jax.tree.map(lambda x: x, state))
        got = jax.tree.map(np.asarray, jaxdist.unshard(state))
        assert int(got.pop("step")) == step - 1
        assert {n: x.tobytes() for n, x in got.items()} == {n: whole[n].tobytes() for n in got}
    jaxdist.save(path, {**state, "step": step}, step)
    assert state["w"].sharding.num_devices == ctx.num_devices


def damaged(path: str) -> list[Any]:
    """One bit of the second: what is said of it, and what comes back if it is passed over."""
    file = data_file(Path(path, "20"))
    jaxdist.barrier()
    if ctx.is_root:
        flip(file)
    jaxdist.barrier()
    like = {"w": jaxdist.shard(WIDE), "odd": jaxdist.shard(WIDE[:7, :3]), "step": 0}
    said = error_of(jaxdist.restore, path, like, step=20)
    got = jaxdist.restore(path, like)
    return [said, got["step"], bool((jaxdist.unshard(got["w"]) == WIDE + 10).all())]


def key_of_a_step(path: str) -> None:
    """It is restored onto its mesh."""
    step = jaxdist.data_parallel(lambda key, x: (jax.random.split(key)[0], x.sum()))
    key, _ = step(jax.random.key(1), np.ones(2))
    jaxdist.save(path, {"key": key}, 1)
    got = jaxdist.restore(path, {"key": key})["key"]
    assert got.sharding == key.sharding
    assert (jax.random.key_data(got) == jax.random.key_data(key)).all()
    assert step(got, np.ones(2))[1] == 2 * ctx.size


def bad_calls(path: str) -> dict[str, list[str]]:
    """What is said of calls that are wrong on one rank, or differ."""
    own = jax.device_put(np.full(3, ctx.rank), jax.local_devices()[0])
    said = {
        "nothing there": error_of(jaxdist.restore, path, {"w": 0}),
        "another folder": error_of(jaxdist.save, path + str(ctx.rank), {"w": 0}, 1),
        "another shape": error_of(jaxdist.save, path, {"w": np.zeros(2 + ctx.rank)}, 1),
        "another value": error_of(jaxdist.save, path, {"v": np.ones(3), "w": own}, 1),
        "no leaf": error_of(jaxdist.save, path, {"w": 0 if ctx.is_root else len}, 1),
        "no folder": error_of(jaxdist.save, "/proc/none", {"w": 0}, 1),
    }
    jaxdist.save(path, {"w": np.zeros(3)}, 1)
    return said | {
        "another like": error_of(jaxdist.restore, path, {"w": np.zeros(3 + ctx.rank)}),
        "there already": error_of(jaxdist.save, path, {"w": np.zeros(3)}, 1),
        "another step": error_of(jaxdist.restore, path, {"w": np.zeros(3)}, step=1 + ctx.rank),
        "no leaf of like": error_of(jaxdist.restore, path, {"w": np.zeros(3) if ctx.is_root else b""}),
    }


def other_leaves(path: str) -> dict[str, list[str]]:
    """What is said of leaves that the last rank alone has otherwise, and of other arguments."""
    pairs: dict[str, tuple[Any, Any]] = {
        "zero": (0.0, -0.0), "string": ("x" * 1000 + "a", "x" * 1000 + "b"), "type": (1, 1.0),
        "array": (np.ones(3), np.zeros(3)), "local": (jnp.ones(3), jnp.zeros(3)), "shape": (np.ones(3), np.ones(4)),
    }  # fmt: skip
    said = {
        f"leaf deep.1.{name}": error_of(jaxdist.save, path, {"same": np.ones(3), "deep": [0.5, {name: pair[LAST]}]}, 1)
        for name, pair in pairs.items()
    }
    said["leaf b"] = error_of(jaxdist.save, path, {"a": 1, "b": 2} if LAST else {"a": 1}, 1)
    said["keep"] = error_of(jaxdist.save, path, [1], 1, keep=1 + LAST)
    assert jaxdist.latest_step(path) is None
    alike = [np.full(3, np.nan, ">f4" if LAST else "<f4"), float("nan"), jnp.ones(2)]  # whatever the order of bytes
    jaxdist.save(path, alike, 1)
    assert jaxdist.restore(path, alike)[0].dtype == alike[0].dtype
    return said


def not_shared(path: str) -> dict[str, list[str]]:
    """Under one name each rank has a folder of its own."""
    own = Path(f"{path}{ctx.rank}")
    own.mkdir()
    os.chdir(own)
    shards = {"w": jaxdist.shard(WIDE)}
    said = {"save": error_of(jaxdist.save, "/proc/self/cwd/run", shards, 1)}
    jaxdist.save("/proc/self/cwd/run", {"w": WIDE}, 2)  # the root alone writes
    return said | {"restore": error_of(jaxdist.restore, "/proc/self/cwd/run", shards, step=2)}


def full_disk(path: str) -> list[str]:
    """Of the last rank, for each of many arrays; what was there stays."""
    jaxdist.save(path, {"w": np.arange(3)}, 1)
    big = jaxdist.shard({f"w{i}": np.random.default_rng(i).normal(size=(128, 256)) for i in range(32)})
    with small_files(LAST):
        said = error_of(jaxdist.save, path, big, 2)
    assert jaxdist.latest_step(path) == 1
    assert jaxdist.restore(path, {"w": np.zeros(3, int)})["w"].tolist() == [0, 1, 2]
    return said


def lost_part(path: str) -> list[str]:
    """The last rank cannot copy its leaf once all have agreed to save; the next save works."""
    from jaxdist.checkpoint import writing  # private: nothing else fails between the agreement and the write

    def fails(x: Any) -> Any:
        raise MemoryError("no memory on purpose")

    copied = writing.on_host
    writing.on_host = fails if LAST else copied
    said = error_of(jaxdist.save, path, {"w": np.arange(3)}, 1)
    writing.on_host = copied
    assert jaxdist.latest_step(path) is None
    jaxdist.save(path, {"w": np.arange(3)}, 1)
    return said
