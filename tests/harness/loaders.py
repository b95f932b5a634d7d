"""The loaders of a job's ranks, without starting processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from jaxdist.data import loader as data  # private: hypothesis runs hundreds of jobs of several ranks in one process


@dataclass(frozen=True)
class Device:
    """What a mesh and its map ask of a device."""

    id: int
    process_index: int
    platform: str = "cpu"


def devices(processes: int, each: int = 1) -> list[Device]:
    """The devices of a job with so many in each process."""
    return [Device(i, i // each) for i in range(processes * each)]


def make(source: Any, batch_size: int, rank: int = 0, size: int = 1, prefetch: int = 0, **settings: Any) -> data.Loader:
    """The loader of one rank of several, that finds the others agree."""
    context: Any = SimpleNamespace(
        rank=rank, size=size, is_root=rank == 0, timeout=1.0, divided={}, devices=devices(size),
        control=SimpleNamespace(exchange=lambda name, mine, timeout: [mine] * size),
    )  # fmt: skip
    with mock.patch.object(data, "get_context", return_value=context):
        return data.loader(source, batch_size, prefetch=prefetch, **settings)


def ranks(source: Any, size: int, batch_size: int, **settings: Any) -> list[data.Loader]:
    """The loaders of all ranks; the source may be made anew for each, by a function."""
    each = source if callable(source) else lambda: source
    return [make(each(), batch_size, rank, size, **settings) for rank in range(size)]


def epoch(loaders: Sequence[data.Loader], steps: int | None = None) -> list[list[int]]:
    """The examples of each global batch, of one loop of all ranks, or the first steps of it."""
    loops = [iter(loader) for loader in loaders]
    found: list[list[int]] = []
    while steps is None or len(found) < steps:
        parts = [next(loop, None) for loop in loops]
        if any(part is None for part in parts):
            assert all(part is None for part in parts), "the ranks make other numbers of steps"
            break
        batch = np.concatenate([part for part in parts if part is not None]).tolist()
        each = -(-len(batch) // len(loops))  # on each rank; the last ones have what is left
        sizes = [min(each, max(0, len(batch) - rank * each)) for rank in range(len(loops))]
        assert [len(part) for part in parts if part is not None] == sizes
        found.append(batch)
    return found


def flat(batches: list[list[int]]) -> list[int]:
    """The examples, one after the other."""
    return [i for batch in batches for i in batch]
