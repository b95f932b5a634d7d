"""The arrays of a checkpoint: orbax writes them; tensorstore reads slices and puts them in place.

Orbax can read them too, but a failed read closes its event loop, and all others print tracebacks.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist import compat
from jaxdist.checkpoint.checksum import share_of
from jaxdist.checkpoint.directory import ITEM
from jaxdist.checkpoint.manifest import DamagedError, Leaf, Leaves, Name, is_padded_inside, unreadable
from jaxdist.errors import CheckpointError
from jaxdist.placements.layouts import Padded, physical
from jaxdist.step.batch import is_keys

Bounds = tuple[tuple[int, int], ...]  # a slice's begin and end along each dimension
_INDEX_IN_MEMORY = 100_000_000  # bytes of the database's index; without a limit nothing is cached


def write(arrays: dict[Name, Any], item: Path, rank: int) -> None:
    """Write this process's part of a checkpoint into an existing folder."""
    import orbax.checkpoint as ocp
    from etils import epath

    tree: dict[str, Any] = {}
    for (*above, last), value in arrays.items():
        functools.reduce(lambda node, key: node.setdefault(key, {}), above, tree)[last] = value
    # Orbax's other processes wait ten minutes for the root to make this folder, even if the root has failed.
    (item / "array_metadatas").mkdir(exist_ok=True)
    _handler(rank).save(epath.Path(item), args=ocp.args.PyTreeSave(tree))


def finalize(item: Path, padded: dict[Name, tuple[int, ...]]) -> None:
    """Merge the files of all processes into one database, and cut padded arrays to their shapes."""
    import tensorstore as ts
    from etils import epath

    _handler(0).finalize(epath.Path(item))
    if not (item / "manifest.ocdbt").exists():  # orbax has found nothing, without an error
        raise CheckpointError(f"the arrays are not in {item}: do all ranks see the same directory?")
    opened = {name: ts.open(_spec(item, name), open=True, read=True, write=True) for name in padded}
    cut = [opened[name].result().resize(exclusive_max=shape, resize_metadata_only=True)
           for name, shape in padded.items()]  # fmt: skip
    for one in cut:
        one.result()


def _handler(rank: int) -> Any:
    """Return a handler for this process alone: no barriers. The root writes metadata."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={rank}, barrier_sync_key_prefix=f"rank{rank}"
    )
    # Weights hardly compress, and writing would take three times as long.
    plain = functools.partial(ocp.PyTreeCheckpointHandler, use_ocdbt=True, use_zarr3=True, use_compression=False)
    return plain(multiprocessing_options=alone)


def _spec(item: Path, name: Name) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{item}/"}
    path = ".".join(name).removesuffix("/") + "/"  # orbax does not add a second slash
    return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}


def read(directory: Path, leaves: Leaves, like: dict[Name, Any]) -> tuple[dict[Name, Any], dict[Name, int]]:
    """Return arrays like their counterparts, and this process's shares in digests of partly read ones."""
    import tensorstore as ts

    def result(future: Any, name: Name) -> Any:
        try:
            return future.result()
        except MemoryError:
            raise
        except Exception as error:
            raise unreadable(f"leaf {'.'.join(name)} of checkpoint {directory}", error) from None

    context = ts.Context({"cache_pool": {"total_bytes_limit": _INDEX_IN_MEMORY}})
    stored = {name: leaf for name, leaf in leaves.items() if 0 not in leaf.shape}  # orbax refuses empty arrays
    opened = {name: ts.open(_spec(directory / ITEM, name), open=True, read=True, context=context) for name in stored}
    begun: dict[Name, dict[Bounds, Any]] = {}
    for name, leaf in stored.items():
        array = result(opened.pop(name), name)
        if tuple(array.shape) != leaf.shape or array.dtype.numpy_dtype != leaf.dtype:
            raise differs(directory, name)
        bounds = _own_bounds(like[name], leaf.shape)
        begun[name] = {one: array[tuple(slice(a, b) for a, b in one)].read() for one in bounds}
    values: dict[Name, Any] = {}
    shares: dict[Name, int] = {}
    for name, leaf in leaves.items():
        blocks = {one: np.asarray(result(block, name)) for one, block in begun.pop(name, {}).items()}
        for one in () if name in stored else _own_bounds(like[name], leaf.shape):
            blocks[one] = np.zeros([b - a for a, b in one], leaf.dtype)
        values[name] = placed(blocks, like[name], leaf)
        on_mesh = _on_mesh(like[name])
        share = share_of(physical(values[name]) if on_mesh else next(iter(blocks.values())), leaf.shape, True)
        if on_mesh and not (on_mesh[0].is_fully_addressable or on_mesh[0].is_fully_replicated):
            shares[name] = share
        elif share != leaf.digest:
            raise differs(directory, name)
    return values, shares


def differs(directory: Path, name: Name) -> DamagedError:
    """Return the error about a leaf that differs from the saved one."""
    return DamagedError(f"leaf {'.'.join(name)} of checkpoint {directory} is damaged: its digest does not match")


def _on_mesh(x: Any) -> tuple[NamedSharding, tuple[int, ...]] | None:
    """Return a leaf's sharding and padded shape on the mesh, or None if this process alone has the whole leaf."""
    if type(x) is Padded:
        return None if is_padded_inside(x) else (x.array.sharding, x.array.shape)  # type: ignore[return-value]
    own = getattr(x, "sharding", None)
    return (own, tuple(x.shape)) if isinstance(own, NamedSharding) and not is_keys(x) else None


def _own_bounds(x: Any, shape: tuple[int, ...]) -> list[Bounds]:
    """Return this process's slices of an array with this shape, placed like `x`."""
    if not (on_mesh := _on_mesh(x)):
        return [tuple((0, n) for n in shape)]
    sharding, padded = on_mesh
    return list({_bounds(index, shape): None for index in sharding.addressable_devices_indices_map(padded).values()})


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """Return the part of a slice that is not padding."""
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))


def placed(blocks: dict[Bounds, np.ndarray], x: Any, leaf: Leaf) -> Any:
    """Return an array in the form and place of its counterpart `x`."""
    if on_mesh := _on_mesh(x):
        sharding, padded = on_mesh

        def block(index: Any) -> np.ndarray:
            real, sizes = blocks[_bounds(index, leaf.shape)], [b - a for a, b in _bounds(index, padded)]
            padding = [(0, n - have) for n, have in zip(sizes, real.shape, strict=True)]
            return np.pad(real, padding) if any(after for _, after in padding) else real

        value = jax.make_array_from_callback(padded, sharding, block)
    else:
        value = _off_mesh(next(iter(blocks.values())), x, leaf)
    if isinstance(value, jax.Array) and not is_keys(value):
        value = compat.with_weak_type(value, leaf.weak)
    return Padded(value, x.layout) if type(x) is Padded else value


def _off_mesh(value: np.ndarray, x: Any, leaf: Leaf) -> Any:
    if isinstance(x, (np.generic, np.ndarray)):
        value = value.astype(x.dtype, copy=False)
        return value[()] if isinstance(x, np.generic) else value
    sharding = x.array.sharding if type(x) is Padded else getattr(x, "sharding", None)
    value = x.layout.padded(value) if type(x) is Padded else value
    # Not device_put, which refuses a mesh of several processes.
    on_mesh = isinstance(sharding, NamedSharding)
    array = jax.make_array_from_callback(value.shape, sharding, value.__getitem__) if on_mesh else jnp.asarray(value)
    return jax.random.wrap_key_data(array, impl=leaf.key) if is_keys(x) else array
