"""States to save: every dtype, every kind of leaf, states of libraries; and what can't be saved."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

USUAL = [
    "bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2", ">f4", ">i8", ">c16", ">u2",
]  # fmt: skip
"""Dtypes that have to be saved."""

_OF_ML = [getattr(ml_dtypes, name) for name in dir(ml_dtypes) if not name.endswith("info")]
DTYPES: list[Any] = [
    *USUAL, *(f"{order}{c}" for c in "gGOSUVMm" for order in "<>"), "S3", "U3", "V4", "M8[s]", "m8[ms]",
    [("a", "f4"), ("b", "i4")], np.dtypes.StringDType(), *(t for t in _OF_ML if isinstance(t, type)),
]  # fmt: skip
"""All that there are: others than the usual ones are saved, or refused."""


def some(dtype: Any, n: int = 64) -> np.ndarray:
    """Numbers of any bits that the type has, NaN among them."""
    dtype = np.dtype(dtype)
    if dtype.kind in "OT":
        return np.array(["a"] * n, dtype)
    if dtype.itemsize == 0:
        return np.zeros(n, dtype)
    raw = np.random.default_rng(0).integers(0, 256, n * dtype.itemsize, np.uint8)
    return (raw & 1 if dtype.kind == "b" else raw).view(dtype)


def _train_state() -> Any:
    params = {"layers_0": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
    tx = optax.adamw(optax.cosine_decay_schedule(1.0, 9))
    return TrainState.create(apply_fn=None, params=params, tx=tx).apply_gradients(grads=params)


def _nnx_state() -> Any:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))


def _by_memory() -> Any:
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    return {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "frozen": frozen, "strided": np.arange(10.0)[::3],
        "backward": np.arange(10.0)[::-1], "repeated": np.broadcast_to(np.float32(1), (3, 2)),
    }  # fmt: skip


class Pair(NamedTuple):
    """A named tuple of a user's."""

    first: Any
    second: Any


TREES: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [5, 2**63 - 1, -(2**70), True, 1.5, float("nan"), -0.0, 1 - 2j, "", "äö\n\0", "\ud800"],
    "scalars": lambda: [np.str_("a"), np.bool_(True), np.float64(1.5), np.complex128(1j), ml_dtypes.bfloat16(1.5),
                        ml_dtypes.int4(-3), np.array(1.5), np.float32(2.5)],
    "containers": lambda: {"pair": Pair(jnp.ones(2), (1, [np.arange(2)])), "trace": optax.TraceState(3), "none": None},
    "keys": lambda: {"key": jax.random.key(1), "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
                     "old": jax.random.PRNGKey(0)},
    "empty": lambda: {"x": jnp.zeros((0, 4)), "y": np.zeros((2, 0), np.int8)},
    "text alone": lambda: {"x": "text"},
    "a leaf alone": lambda: jnp.arange(3),
    "many dimensions": lambda: [np.ones((1,) * 31), np.ones((0,) * 64), np.ones((2, *(1,) * 30))],
    "numbers under odd names": lambda: {"/": 1, "~": "text", "\ud800": 1},
    "memory": _by_memory,
    "weak types": lambda: {"scalar": jnp.array(1.5), "array": jnp.where(jnp.ones(3) > 0, 1.0, 0.0), "not": jnp.ones(2)},
    "flax": _train_state,
    "nnx": _nnx_state,
    **{f"named {name!r}": lambda name=name: {name: {"w": np.arange(3.0), "t": "text"}}
       for name in ("", "a/b", "..", "\0", "a\nb", "zarr.json", "c/0", "%2F", "*", "x" * 300, 1.5)},
}  # fmt: skip
"""What comes back as it was."""


class Count(int):
    """Would come back as an int."""


REFUSED: dict[str, tuple[Any, str]] = {
    "masked": (np.ma.masked_array([1.0, 2.0], mask=[False, True]), "mask"),
    "matrix": (np.ones((1, 1)).view(np.matrix), "matrix"),
    "objects": (np.array([None]), "object"),
    "text of bytes": (np.bytes_(b"a"), "S1"),
    "float0": (np.zeros(2, jax.dtypes.float0), "dtype"),
    "subclass of int": (Count(1), "Count"),
    "bytes": (b"a", "bytes"),
}
"""What would come back as something else, and what the error names beside the leaf."""


MODEL = {"w": np.zeros((3, 3)), "n": 1, "key": jax.random.key(0), "none": np.zeros((0, 3))}
OTHER_MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "shape": ({"w": np.zeros((3, 4))}, ("model.w", "[3, 3]", "[3, 4]")),
    "dtype": ({"w": np.zeros((3, 3), np.float32)}, ("model.w", "float64", "float32")),
    "a leaf more": ({"v": np.zeros(3)}, ("model.v",)),
    "a leaf less": ({"w": None}, ("model.w",)),
    "an int as a float": ({"n": 1.5}, ("model.n", "int", "float")),
    "an int as text": ({"n": "1"}, ("model.n", "int", "str")),
    "a key as numbers": ({"key": np.zeros(2, np.uint32)}, ("model.key", "key")),
    "a key of another kind": ({"key": jax.random.key(0, impl="rbg")}, ("model.key", "fry", "rbg")),
    "numbers as a key": ({"w": jax.random.key(0)}, ("model.w", "key")),
    "an empty shape": ({"none": np.zeros((0, 2))}, ("model.none", "[0, 3]", "[0, 2]")),
}
"""What is other in `like` than in `MODEL`, and what the error names."""

BAD_SAVES: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"step": -1}, ValueError, ("-1",)), ({"step": 1.5}, ValueError, ("1.5",)), ({"step": True}, ValueError, ("True",)),
    ({"keep": 0}, ValueError, ("keep", "0")), ({"state": {}}, ValueError, ("no leaves",)),
    ({"state": {"a.b": 1, "a": {"b": 2}}}, ValueError, ("a.b",)),
    ({"state": {"x": jax.ShapeDtypeStruct((2,), np.float32)}}, TypeError, ("leaf x", "ShapeDtypeStruct")),
    ({"path": ""}, ValueError, ("empty",)), ({"path": "gs://bucket/run"}, ValueError, ("gs:/", "URL")),
    ({"path": Path("s3://bucket/run")}, ValueError, ("s3:/", "URL")),
    *(({"path": name}, ValueError, (name,)) for name in ("lr=[0.1]", "a*b", "a?b", "a\\b", "a/gs:/b")),
    ({"path": os.fsdecode(b"a\xffb")}, ValueError, ("utf-8",)),
]  # fmt: skip
"""Arguments of `save`, and what the error names."""

FOLDERS = [
    "run#3", "a|b", "50%", "a%20b", "a%2Fb", "a/b", "a:b", "~", "{a}", "$HOME", "a;b", "'", '"', "a b", "a\nb",
    "a\x7fb", "ü", "x" * 255,
]  # fmt: skip
"""Names of folders, odd ones."""
