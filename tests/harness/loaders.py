"""The loaders of a job's ranks, without starting processes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from jaxdist.data import loader as data  # private: hypothesis runs hundreds of jobs of several ranks in one process


def make(source: Any, batch_size: int, rank: int = 0, size: int = 1, prefetch: int = 0, **settings: Any) -> data.Loader:
    """The loader of one rank of several, that finds the others agree."""
    context: Any = SimpleNamespace(
        rank=rank, size=size, is_root=rank == 0, timeout=1.0, parts=lambda mesh: ((rank,), size),
        control=SimpleNamespace(exchange=lambda name, mine, timeout: [mine] * size),
    )  # fmt: skip
    with mock.patch.object(data, "get_context", return_value=context):
        return data.loader(source, batch_size, prefetch=prefetch, **settings)


def ranks(source: Any, size: int, batch_size: int, **settings: Any) -> list[data.Loader]:
    """The loaders of all ranks; the source may be made anew for each, by a function."""
    each = source if callable(source) else lambda: source
    return [make(each(), batch_size, rank, size, **settings) for rank in range(size)]


def epoch(loaders: Sequence[data.Loader], steps: int | None = None) -> list[list[int]]:
    """The real examples of each global batch, of one loop of all ranks, or the first steps of it.

    The examples differ: a smaller last batch may end with copies of its last one, for parts of one length.
    """
    loops = [iter(loader) for loader in loaders]
    found: list[list[int]] = []
    while steps is None or len(found) < steps:
        parts = [next(loop, None) for loop in loops]
        if any(part is None for part in parts):
            assert all(part is None for part in parts), "the ranks make other numbers of steps"
            break
        pairs = [part if isinstance(part, tuple) else (part, np.ones(len(part))) for part in parts if part is not None]
        assert len({len(x) for x, _ in pairs}) == 1
        batch = [int(i) for x, weight in pairs for i in x[weight > 0].tolist()]
        while batch[1:] and batch[-1] == batch[-2]:
            batch.pop()
        found.append(batch)
    return found


def flat(batches: list[list[int]]) -> list[int]:
    """The examples, one after the other."""
    return [i for batch in batches for i in batch]
