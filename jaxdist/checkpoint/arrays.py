"""Reads arrays of a checkpoint: tensorstore alone, a leaf at a time, so that an error is about one leaf.

Orbax has written them in zarr's format into one database of its own (OCDBT). It can read them too, but runs all reads
in an event loop, which it closes when one fails, with a traceback from each of those that are still under way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint import plain
from jaxdist.checkpoint.agreement import brief
from jaxdist.checkpoint.record import DamagedError, LeafRecord, unreadable
from jaxdist.errors import CheckpointError

Bounds = tuple[tuple[int, int], ...]  # of a slice: where it begins and ends along each axis
_NODES_IN_MEMORY = 100_000_000  # bytes of the database's index; nothing is kept without a limit


class ArrayReader:
    """Reads the arrays of one checkpoint; a context, in which all reads are waited for."""

    def __init__(self, directory: Path, item: str):
        import tensorstore as ts

        self._ts, self._directory, self._item = ts, directory, item
        self._descriptor, folder = plain.opened(directory)
        self._base = _in_folder(folder / item)
        self._context = ts.Context({"cache_pool#index": {"total_bytes_limit": _NODES_IN_MEMORY}})

    def __enter__(self) -> ArrayReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def open(self, name: tuple[str, ...]) -> Any:
        """Begin to open an array; for `read`."""
        path = f"{'.'.join(name)}/"
        database = {"driver": "ocdbt", "base": self._base, "path": path, "cache_pool": "cache_pool#index"}
        spec = {"driver": "zarr3", "kvstore": database}
        return self._ts.open(spec, open=True, read=True, context=self._context)

    def read(
        self, name: tuple[str, ...], leaf: LeafRecord, opened: Any, wanted: list[Bounds]
    ) -> Callable[[], list[Any]]:
        """Begin to read slices of an array; what is returned waits for them."""

        def careful(what: Callable[[], Any]) -> Any:
            try:
                return what()
            except (DamagedError, MemoryError):
                raise
            except Exception as error:
                found = unreadable(f"leaf {'.'.join(name)} of checkpoint {self._directory}", error)
                if isinstance(found, DamagedError):
                    found = self._damaged(name, f"can't be read: {brief(error)}")
                raise found from None

        def begin() -> list[Any]:
            array = opened.result()
            if tuple(array.shape) != leaf.shape or array.dtype.numpy_dtype != dtype:
                raise self._damaged(name, f"is {array.dtype.name}{list(array.shape)} on disk, and was "
                                          f"{leaf.dtype}{list(leaf.shape)}")  # fmt: skip
            return [array[tuple(slice(a, b) for a, b in bounds)].read() for bounds in wanted]

        dtype = np.dtype(leaf.dtype).newbyteorder("=")  # older versions wrote down the order of bytes
        if 0 in leaf.shape:  # orbax refuses them
            return lambda: [np.zeros([b - a for a, b in bounds], dtype) for bounds in wanted]
        reads = careful(begin)
        return lambda: careful(lambda: [np.asarray(read.result()) for read in reads])

    def _damaged(self, name: tuple[str, ...], what: str) -> DamagedError:
        return damaged(self._directory, self._item, name, what)


def damaged(directory: Path, item: str, name: tuple[str, ...], what: str) -> DamagedError:
    """The error about a leaf."""
    files = files_of(directory, item, name)
    where = f"in {', '.join(files)}" if files else f"somewhere below {directory / item}"
    return DamagedError(f"leaf {'.'.join(name)} of checkpoint {directory} is damaged: it {what}. Its data are {where}")


def files_of(directory: Path, item: str, name: tuple[str, ...]) -> list[str]:
    """The files that hold an array's data, as far as the database's index can still be read."""
    import tensorstore as ts

    try:
        descriptor, folder = plain.opened(directory)
    except (OSError, CheckpointError):  # it was removed meanwhile
        return []
    try:
        base = ts.KvStore.open(_in_folder(folder / item)).result()
        root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
        entries = ts.ocdbt.dump(base, root).result()["entries"]
        prefix = f"{'.'.join(name)}/".encode()
        places = {e.get("indirect_value", root) for e in entries if e.get("key", b"").startswith(prefix)}
    except Exception:  # it is damaged itself
        return []
    finally:
        os.close(descriptor)
    found = [re.fullmatch(r"\w+:(.*):\d+:\d+", place) for place in sorted(places)]
    return [str(directory / item / m[1].replace(":", "")) for m in found if m]


def _in_folder(folder: Path) -> dict[str, str]:
    return {"driver": "file", "path": f"{folder}/"}
