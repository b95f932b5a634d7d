"""Buffers of any type and size as bytes, in pieces that MPI takes."""

from __future__ import annotations

import numpy as np

from jaxdist.collectives.call import Group

MESSAGE = 1 << 30  # bytes of one message at most


def as_bytes(x: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array: MPI need not know its dtype."""
    return x.reshape(-1).view(np.uint8)


def pieces_of(raw: np.ndarray) -> list[np.ndarray]:
    return [raw[i : i + MESSAGE] for i in range(0, raw.size, MESSAGE)]


def bounds_of(size: int, n: int) -> list[tuple[int, int]]:
    """Start and end of each of `n` parts of a flat array: equal ones, but for the last."""
    part = -(-size // n)
    return [(min(i * part, size), min((i + 1) * part, size)) for i in range(n)]


def rounds_of(group: Group) -> list[tuple[int, int]]:
    """(to whom, from whom) in each round of an exchange of all with all: nobody is anyone's target twice."""
    return [((group.me + i) % group.n, (group.me - i) % group.n) for i in range(1, group.n)]
