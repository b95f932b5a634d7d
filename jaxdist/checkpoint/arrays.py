"""The arrays of a checkpoint: orbax writes them; tensorstore reads slices and puts them in place.

Orbax can read them too, but a failed read closes its event loop, and all others print tracebacks.
"""

import functools
import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist import compat
from jaxdist.checkpoint.checksum import Checksums, checksum, total
from jaxdist.checkpoint.directory import ITEM
from jaxdist.checkpoint.manifest import PYTHON, DamagedError, Leaf, Leaves, Name, is_padded_inside, unreadable
from jaxdist.compilation.signature import is_keys
from jaxdist.errors import CheckpointError
from jaxdist.mesh import from_host
from jaxdist.placements.model.layouts import Bounds, Padded, bounds

# Of orbax, which raises these errors, too.
logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in record.getMessage())
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
    try:
        _handler(rank).save(epath.Path(item), args=ocp.args.PyTreeSave(tree))
    except Exception:
        shards = [s.data for x in arrays.values() for s in getattr(x, "addressable_shards", ())] or arrays.values()
        size, free = sum(x.nbytes for x in shards), shutil.disk_usage(item).free
        if size <= free:
            raise
        room = f"{size:,} bytes to write, {free:,} free, {size - free:,} missing"
        raise CheckpointError(f"no space left for {item}: {room}") from None


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
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, use_compression=False, multiprocessing_options=alone
    )


def _spec(item: Path, name: Name) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{item}/"}
    path = ".".join(name).removesuffix("/") + "/"  # orbax does not add a second slash
    return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}


def read(directory: Path, leaves: Leaves, like: dict[Name, Any]) -> tuple[dict[Name, Any], dict[Name, Checksums]]:
    """Return leaves like their counterparts, and the checksums of the slices that this process has read."""
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": _INDEX_IN_MEMORY}})
    blocks = {name: _blocks(like[name], leaf) for name, leaf in leaves.items()}

    def read_one(name: Name) -> Checksums:
        leaf, mine = leaves[name], blocks[name]
        try:
            if leaf.dtype and 0 not in leaf.shape:  # orbax refuses empty arrays
                array = ts.open(_spec(directory / ITEM, name), open=True, read=True, context=context).result()
                for reading in [_fill(block, at, array) for at, block in mine.items()]:
                    reading.result()
        except Exception as error:
            raise unreadable(f"leaf {'.'.join(name)} of checkpoint {directory}", error) from None
        return {at: checksum(block, [a for a, _ in at]) for at, block in mine.items() if leaf.dtype}

    values, sums = dict[Name, Any](), dict[Name, Checksums]()
    with ThreadPoolExecutor() as pool:
        for name, own in zip(leaves, pool.map(read_one, leaves), strict=True):
            values[name], sums[name] = _placed(blocks.pop(name), like[name], leaves[name]), own
    return values, sums


def compare(directory: Path, leaves: Leaves, everyone: Sequence[dict[Name, Checksums]]) -> None:
    """Raise an error if a digest of the leaves that the ranks have read is not the saved one."""
    for name, leaf in leaves.items():
        if leaf.dtype and total(sums[name] for sums in everyone) != leaf.digest:
            label = ".".join(name)
            raise DamagedError(f"leaf {label} of checkpoint {directory} is damaged: its digest does not match")


def _fill(block: np.ndarray, at: Bounds, array: Any) -> Any:
    """Begin to read a slice of an array; entries past the end of the array are padding and stay zero."""
    import tensorstore as ts

    real = tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(at, array.shape, strict=True))
    return ts.array(block)[tuple(slice(0, s.stop - s.start) for s in real)].write(array[real])


def _place(x: Any, leaf: Leaf) -> tuple[NamedSharding | None, tuple[int, ...]]:
    """Return a leaf's place on the mesh and padded shape; no place if each process has the whole leaf to itself."""
    if type(x) is Padded:
        return (None, leaf.shape) if is_padded_inside(x) else (x.array.sharding, x.array.shape)  # type: ignore[return-value]
    own = getattr(x, "sharding", None)
    return own if isinstance(own, NamedSharding) else None, leaf.shape


def _blocks(x: Any, leaf: Leaf) -> dict[Bounds, np.ndarray]:
    """Return empty arrays for this process's slices of a leaf placed like `x`; for a number or string, the value."""
    sharding, shape = _place(x, leaf)
    indices = sharding.addressable_devices_indices_map(shape).values() if sharding else [(slice(None),) * len(shape)]
    room = lambda at: np.zeros([b - a for a, b in at], leaf.dtype) if leaf.dtype else np.asarray(leaf.value)
    return {at: room(at) for at in dict.fromkeys(bounds(index, shape) for index in indices)}


def _placed(blocks: dict[Bounds, np.ndarray], x: Any, leaf: Leaf) -> Any:
    """Return a leaf in the form and place of its counterpart `x`."""
    whole = next(iter(blocks.values()))
    if type(x) in PYTHON:
        return type(x)(whole if leaf.dtype else leaf.value)
    if isinstance(x, (np.generic, np.ndarray)):
        whole = whole.astype(x.dtype, copy=False)
        return whole[()] if isinstance(x, np.generic) else whole
    sharding, shape = _place(x, leaf)
    if sharding:
        value = from_host(shape, sharding, lambda index: blocks[bounds(index, shape)])
    elif type(x) is Padded:
        whole = x.layout.padded(whole)
        value = from_host(whole.shape, x.array.sharding, whole.__getitem__)
    else:
        value = jax.device_put(whole)
    if is_keys(x):
        return jax.random.wrap_key_data(value, impl=leaf.key)
    value = compat.with_weak_type(value, leaf.weak)
    return Padded(value, x.layout) if type(x) is Padded else value
