"""What `like` says of a checkpoint that is restored: which leaves it should have, and where each goes."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxdist import compat
from jaxdist.checkpoint.arrays import Bounds
from jaxdist.checkpoint.leaves import PYTHON, TEXT, dtype_of, is_key, named, refusal
from jaxdist.checkpoint.record import LeafRecord
from jaxdist.errors import CheckpointError
from jaxdist.placements.layouts import Padded

Leaves = dict[tuple[str, ...], LeafRecord]


def check_kinds(like: Any) -> None:
    """Refuse what no checkpoint has, before one is looked for."""
    for name, x in zip(*named(like), strict=True):
        if not isinstance(x, jax.ShapeDtypeStruct) and (why := refusal(x)):
            raise TypeError(f"leaf {'.'.join(name)} of `like` is nothing that a checkpoint has: {why}")


def check_leaf(where: Path, name: tuple[str, ...], x: Any, leaves: Leaves) -> None:
    """Whether the checkpoint has a leaf as it is in `like`."""
    label = ".".join(name)
    of = f"leaf {label} of checkpoint {where}"
    if name not in leaves:
        close = ", ".join(".".join(n) for n in itertools.islice(leaves, 3))
        raise CheckpointError(f"checkpoint {where} has no leaf {label}, as `like` has; it has {close}, …")
    leaf = leaves[name]
    if is_key(x):
        if leaf.key is None:
            raise CheckpointError(f"{of} is not a PRNG key, but it is one in `like`")
        if (kind := jax.random.key(0, impl=leaf.key).dtype) != x.dtype:
            raise CheckpointError(f"{of} is a PRNG key {kind}, in `like` {x.dtype}")
        x = jax.eval_shape(jax.random.key_data, x)
    elif leaf.key is not None:
        raise CheckpointError(f"{of} is a PRNG key, but it is not one in `like`")
    if (type(x) in TEXT) != (leaf.dtype == "str"):
        raise CheckpointError(f"{of} and of `like`: one is a string, the other is not")
    if type(x) in TEXT:
        return
    dtype = np.dtype(leaf.dtype)
    if leaf.shape != np.shape(x):
        raise CheckpointError(f"{of} has shape {leaf.shape}, in `like` {np.shape(x)}")
    if type(x) in PYTHON:
        if dtype.kind != np.asarray(x).dtype.kind:
            raise CheckpointError(f"{of} is {dtype.name}, in `like` {type(x).__name__}")
    elif dtype.name != dtype_of(x):
        raise CheckpointError(
            f"{of} is {dtype.name}, in `like` {dtype_of(x)}: restore it as it was saved, and cast it then"
        )
    elif not isinstance(x, (np.ndarray, np.generic)) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CheckpointError(
            f"{of} is {dtype.name}, which JAX has only with jax_enable_x64: set it, or give a NumPy array in `like`"
        )


def on_mesh(x: Any) -> NamedSharding | None:
    """Where on the mesh a leaf goes; None: not there."""
    own = getattr(x, "sharding", None)
    return own if isinstance(own, NamedSharding) and type(x) is not Padded and not is_key(x) else None


def placed(blocks: list[np.ndarray], x: Any, leaf: LeafRecord, place: NamedSharding | None) -> Any:
    """A leaf as its counterpart `x` is, of the slices that `cut` names; of JAX's weak type if it was saved so."""
    if place is None:
        value = _off_mesh(blocks[0], x, leaf)
    else:
        of = dict(zip(cut(place, leaf.shape)[0], blocks, strict=True))
        value = jax.make_array_from_callback(leaf.shape, place, lambda index: of[_bounds(index, leaf.shape)])
    if type(value) is Padded:
        value.array = compat.with_weak_type(value.array, leaf.weak)
    return compat.with_weak_type(value, leaf.weak) if isinstance(value, jax.Array) else value


def _off_mesh(value: np.ndarray, x: Any, leaf: LeafRecord) -> Any:
    if type(x) in PYTHON:
        return type(x)(value.item())
    if type(x) is Padded:
        padded = x.layout.padded(value)
        own = x.array.sharding
        return Padded(jax.make_array_from_callback(padded.shape, own, lambda i: padded[i]), x.layout)
    if is_key(x):
        own = getattr(x, "sharding", None)
        if isinstance(own, NamedSharding):  # not device_put: it refuses a mesh of several processes
            data = jax.make_array_from_callback(value.shape, own, lambda index: value[index])
        else:
            data = jnp.asarray(value)
        return jax.random.wrap_key_data(data, impl=leaf.key)
    if isinstance(x, np.generic):
        return value.astype(x.dtype)[()]
    if isinstance(x, np.ndarray):
        return value.astype(x.dtype, copy=False)
    return jnp.asarray(value, x.dtype)


@functools.lru_cache(maxsize=4096)
def cut(place: Sharding | None, shape: tuple[int, ...]) -> tuple[tuple[Bounds, ...], tuple[bool, ...], bool]:
    """How this process reads an array."""
    whole = tuple((0, n) for n in shape)
    if place is None or place.is_fully_replicated:
        return (whole,), (True,), True
    first: dict[Bounds, Any] = {}
    for device, index in place.devices_indices_map(shape).items():
        first.setdefault(_bounds(index, shape), device)
    local = tuple(dict.fromkeys(_bounds(i, shape) for i in place.addressable_devices_indices_map(shape).values()))
    return local, tuple(first[b] in place.addressable_devices for b in local), place.is_fully_addressable


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
