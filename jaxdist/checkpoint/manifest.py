"""The manifest of a checkpoint: its step, leaves and digest. Also which leaves can be saved."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jaxdist.compilation.signature import is_keys
from jaxdist.errors import CheckpointError, in_words
from jaxdist.placements.model.layouts import Padded
from jaxdist.sharding import unshard

FILE = "manifest.json"
IN_SAFETENSORS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip
STORABLE = {*IN_SAFETENSORS, "complex128", "int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz"}
PYTHON = (bool, int, float, complex, str, np.str_)  # stored in the manifest itself, not as arrays
Name = tuple[str, ...]  # the keys of a leaf
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")  # in tensorstore's errors
_DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # None: read, but invalid


class DamagedError(CheckpointError):
    """A checkpoint on disk differs from the one that was saved."""


class Leaf(NamedTuple):
    """A saved leaf: a number or string, or an array, whose data are in a different file."""

    kind: str  # as `kind_of` writes it
    value: Any = None  # of a number or string
    shape: tuple[int, ...] = ()  # of the array on disk
    dtype: str = ""
    digest: int = 0  # see `jaxdist.checkpoint.checksum`
    key: str | None = None  # the generator for an array of PRNG keys, whose data are on disk
    weak: bool = False  # JAX's weak type: without it training would continue with different dtypes


Leaves = dict[Name, Leaf]


def write(directory: Path, step: int, leaves: Leaves) -> None:
    """Write the manifest of an otherwise complete checkpoint, and flush it to disk."""
    rows = [[name, *leaf] for name, leaf in leaves.items()]
    content = json.dumps({"step": step, "leaves": rows}, default=repr)  # complex numbers as text
    with (directory / FILE).open("x") as file:
        json.dump({"digest": hashlib.sha256(content.encode()).hexdigest(), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path, step: int | None) -> Leaves:
    """Return a checkpoint's leaves."""
    file = directory / FILE
    try:
        if file.exists() and not file.is_file():  # opening a pipe would wait for a writer
            raise ValueError("not a file")
        outer = json.loads(file.read_bytes())
        content = outer["content"]
        if outer["digest"] != hashlib.sha256(content.encode()).hexdigest():
            raise ValueError("wrong digest")
        found = json.loads(content)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        if not directory.is_dir():
            raise FileNotFoundError(f"checkpoint {directory} was removed") from None
        raise unreadable(f"file {file}", error) from None
    if step not in (None, found["step"]):
        raise DamagedError(f"checkpoint {directory} should be step {step}, but {file} says step {found['step']}")
    return {tuple(name): Leaf(*leaf)._replace(shape=tuple(leaf[2])) for name, *leaf in found["leaves"]}


def unreadable(what: str, error: Exception) -> CheckpointError:
    """Return the error about a file or leaf: damage, unless the system failed (a disk, rights, too many open files)."""
    found = _SYSTEM_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number in _DAMAGE and not isinstance(error, MemoryError):
        return DamagedError(f"{what} is damaged: {in_words(error)}")
    return CheckpointError(f"{what} can't be read: {in_words(error)}. This is not damage: fix the cause, then restore")


def named(state: Any) -> dict[Name, Any]:
    """Return the leaves of a state by their names."""
    leaves, labels = dict[Name, Any](), set[str]()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("state",)
        if (label := ".".join(name).removesuffix("/")) in labels:  # see `arrays`
            raise ValueError(f"two leaves would both be named {label}: keep dots out of one of the keys")
        labels.add(label)
        leaves[name] = x
    return leaves


def refusal(x: Any) -> str:
    """Return the reason why a leaf cannot be restored unchanged, or an empty string."""
    kind = type(x)
    if kind in PYTHON:
        return ""
    if isinstance(x, Tracer):
        return "it has no value inside a function that JAX traces: save the function's result"
    numpy = kind in (np.ndarray, np.memmap) or (isinstance(x, np.generic) and kind is x.dtype.type)
    if not numpy and not isinstance(x, (jax.Array, Padded)):
        return (
            f"{kind.__name__} is not a JAX or NumPy array, a number or a string, so it cannot be restored "
            "unchanged: save int(x), str(x) or np.asarray(x); of a masked array, data and mask"
        )
    if not is_keys(x) and x.dtype.name not in STORABLE:
        return f"the format on disk does not support {x.dtype}: save a different dtype, or the bits (x.view)"
    return ""


def kind_of(x: Any) -> str:
    """Return type and shape of a leaf in words; byte order in memory does not count."""
    if type(x) in PYTHON:
        return "str" if isinstance(x, str) else type(x).__name__
    return f"{x.dtype if is_keys(x) else np.dtype(x.dtype).name}{list(np.shape(x))}"


def stored_form(x: Any) -> Any:
    """Return the array to store: a key's data; a `Padded` leaf unchanged, or whole if padded inside."""
    if is_keys(x):
        return jax.random.key_data(x)
    return unshard(x) if type(x) is Padded and is_padded_inside(x) else x


def is_padded_inside(x: Padded) -> bool:
    """Check whether an axis cuts and pads slices that an earlier axis made of a dimension."""
    cuts = x.layout.cuts
    return any(cut.pad and cut.dim in (before.dim for before in cuts[:i]) for i, cut in enumerate(cuts))


def on_host(x: Any) -> np.ndarray:
    """Return an array that this process has whole, in native byte order."""
    value = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) and not x.is_fully_addressable else x)
    return value.astype(value.dtype.newbyteorder("="), copy=False)
