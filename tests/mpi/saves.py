"""Checkpoints of several ranks: what each of them is told, and what comes back."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxdist
from jaxdist.checkpoint import writing

ctx = jaxdist.get_context()
WIDE = np.random.default_rng(0).normal(size=(60, 500))


def told(call: Any, *args: Any, **settings: Any) -> str:
    """The error that a call raises."""
    try:
        call(*args, **settings)
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def bad_calls(path: str) -> list[str]:
    own = jax.device_put(np.full(3, ctx.rank), jax.local_devices()[0])
    first = [
        told(jaxdist.restore, path, {"w": 0}),
        told(jaxdist.save, path + str(ctx.rank), {"w": 0}, 1),
        told(jaxdist.save, path, {"w": np.zeros(2 + ctx.rank)}, 1),
        told(jaxdist.save, path, {"v": np.ones(3), "w": own}, 1),
        told(jaxdist.save, path, {"w": 0 if ctx.is_root else len}, 1),
        told(jaxdist.save, "/proc/none", {"w": 0}, 1),
    ]
    jaxdist.save(path, {"w": np.zeros(3)}, 1)
    return [
        *first,
        told(jaxdist.restore, path, {"w": np.zeros(3 + ctx.rank)}),
        told(jaxdist.save, path, {"w": np.zeros(3)}, 1),
        told(jaxdist.restore, path, {"w": np.zeros(3)}, step=1 + ctx.rank),
        told(jaxdist.restore, path, {"w": np.zeros(3) if ctx.is_root else b""}),
    ]


def key_of_a_step(path: str) -> None:
    """It is restored onto its mesh."""
    step = jaxdist.data_parallel(lambda key, x: (jax.random.split(key)[0], x.sum()))
    key, _ = step(jax.random.key(1), np.ones(2))
    jaxdist.save(path, {"key": key}, 1)
    got = jaxdist.restore(path, {"key": key})["key"]
    assert got.sharding == key.sharding
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(key))
    assert step(got, np.ones(2))[1] == 2 * ctx.size


def two_steps(path: str) -> None:
    for step in (10, 20):
        jaxdist.save(path, {"w": jaxdist.shard(WIDE + step), "step": step}, step)


def damaged(path: str) -> list[Any]:
    """What is said of the second of two steps, and, after a restart, which step is restored whole."""
    like = {"w": jaxdist.shard(WIDE), "step": 0}
    said = told(jaxdist.restore, path, like)
    os.environ["JAXDIST_RESTARTS"] = "1"
    got = jaxdist.restore(path, like)
    return [said, got["step"], np.array_equal(jaxdist.unshard(got["w"]), WIDE.astype(got["w"].dtype) + 10)]


def a_leaf_that_differs(path: str) -> dict[str, str]:
    """What is said of each kind of leaf that the last rank alone has another of, and of other arguments."""
    last, long = ctx.rank == ctx.size - 1, "x" * 1000
    pairs: dict[str, tuple[Any, Any]] = {
        "float": (0.1, 0.2), "zero": (0.0, -0.0), "int": (1, 2), "bool": (True, False), "complex": (1j, 2j),
        "string": ("a", "b"), "long": (long + "a", long + "b"), "np.str_": (np.str_("a"), np.str_("b")),
        "np.float32": (np.float32(1), np.float32(2)), "np.bool_": (np.bool_(0), np.bool_(1)),
        "int4": (ml_dtypes.int4(1), ml_dtypes.int4(2)), "0-d": (np.array(1.0), np.array(2.0)),
        "array": (np.ones(3), np.zeros(3)), "big": (np.ones(3, ">f4"), np.zeros(3, ">f4")),
        "local": (jnp.ones(3), jnp.zeros(3)), "key": (jax.random.key(0), jax.random.key(1)),
        "type": (1, 1.0), "text": (1, "1"), "scalar": (1.0, np.float64(1)),
        "dtype": (np.ones(3, "f4"), np.ones(3, "f8")), "shape": (np.ones(3), np.ones(4)),
        "impl": (jax.random.key(0), jax.random.key(0, impl="rbg")),
    }  # fmt: skip
    said = {
        name: told(jaxdist.save, path, {"same": np.ones(3), "deep": [0.5, {name: pair[last]}]}, 1)
        for name, pair in pairs.items()
    }
    said["structure"] = told(jaxdist.save, path, {"a": 1, "b": 2} if last else {"a": 1}, 1)
    said["keep"] = told(jaxdist.save, path, [1], 1, keep=1 + last)
    said["overwrite"] = told(jaxdist.save, path, [1], 1, overwrite=last)
    assert jaxdist.latest_step(path) is None
    order = ">" if last else "<"
    same = np.full(3, np.nan), np.full(3, np.nan, f"{order}f4"), float("nan"), long, jnp.ones(2), 2**60
    jaxdist.save(path, same, 1)
    got = jaxdist.restore(path, same)
    assert (got[1].dtype.str, got[3], got[5]) == (f"{order}f4", long, 2**60)
    return said


def full_disk(path: str) -> str:
    # Many: each that can't be written could show a traceback of its own.
    big = jaxdist.shard({f"w{i}": np.random.default_rng(i).normal(size=(128, 256)) for i in range(32)})
    said = told(jaxdist.save, path, big, 2)
    assert jaxdist.latest_step(path) == 1
    assert jaxdist.restore(path, {"w": np.zeros(3)})["w"].tolist() == [0, 1, 2]
    return said


def slow_writes(path: str) -> None:
    """Longer than the timeout, on one rank and then on the other; and a last one that fails."""
    slow, write = 0, writing._write

    def slowly(*args: Any) -> Any:
        time.sleep(3.5 * (ctx.rank == slow))
        return write(*args)

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    writing._write = slowly
    state = {"whole": np.ones(3), "wide": jaxdist.shard(np.ones(64))}
    for slow in (0, 1):
        jaxdist.save(path, state, slow, wait=slow == 0).wait()
        print("LATEST", jaxdist.latest_step(path), flush=True)
    writing._write = full if ctx.rank == 1 else write
    jaxdist.save(path, state, 2, wait=False)
