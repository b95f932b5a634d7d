"""The loaders of a job's ranks, without starting processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxdist.data.loader import Loader


def job(rank: int, size: int, exchange: Callable[[str, Any, float], list[Any]]) -> Any:
    """A context, as far as a loader needs one."""
    return SimpleNamespace(
        rank=rank,
        size=size,
        timeout=1.0,
        control=SimpleNamespace(exchange=exchange),
        parts=lambda mesh: ((rank,), size),
    )


def make(source: Any, batch_size: int, rank: int = 0, size: int = 1, **settings_: Any) -> Loader:
    """The loader of one rank of several, that finds the others agree."""
    settings_ = {"shuffle": True, "seed": 0, "tail": "drop", "transform": None} | settings_
    return Loader(job(rank, size, lambda _, mine, __: [mine] * size), source, batch_size, **settings_)


def ranks(n: int, size: int, batch_size: int, **settings_: Any) -> list[Loader]:
    return [make(np.arange(n), batch_size, rank, size, **settings_) for rank in range(size)]


def epoch(loaders: Sequence[Loader], steps: int | None = None) -> list[list[int]]:
    """The real examples of each global batch, of one loop of all ranks, or the first steps of it."""
    loops = [iter(loader) for loader in loaders]
    out = []
    for parts in zip(*loops, strict=True):  # strict: the same number of steps
        batch: list[int] = []
        for loader, part in zip(loaders, parts, strict=True):
            x, weight = part if loader._reading.sampling.pad else (part, np.ones(len(part)))
            assert len(x) == loader._reading.sampling.batch_size or loader._reading.sampling.keep
            batch += x[weight > 0].tolist()
        # A smaller last batch: parts of one length, filled up with copies of the last example.
        total = getattr(parts[0], "total", len(batch))
        assert all(x == batch[total - 1] for x in batch[total:])
        out.append(batch[:total])
        if len(out) == steps:
            break
    return out


def flat(batches_: list[list[int]]) -> list[int]:
    return [i for batch in batches_ for i in batch]
