"""How the devices hold a value that is logically one array: its placement.

| placement | each device holds |
|---|---|
| `Replicated` | all of it |
| `Split` | its slice along one dimension, the end padded where the devices don't divide it |
| `Partial` | a summand |
| `Deferred` | nothing yet: it is cheap to make, whole or in slices |

References:
  Xu et al., *GSPMD*, arXiv 2105.04663; the placements of ``torch.distributed.tensor`` (Shard, Replicate, Partial).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Replicated:
    """The same on every device."""

    const: Any = None  # the value of each entry, if the program says so (a literal)


@dataclass(frozen=True)
class Split:
    """One slice a device: the dimension is `outer` blocks of `size`, and device i has of each block the entries from
    ``i * chunk`` to ``(i + 1) * chunk``.

    One block is the usual case. There are more where a batch was merged with a dimension before it, as in a time-major
    reshape, or in two views of a batch one after the other. What reaches beyond a block is padding: entries of the last
    real one (of what is stored between steps: anything).
    """

    dim: int  # that is split
    size: int  # of a block
    chunk: int  # of a block on a device
    outer: int = 1  # number of blocks
    # it is kept so between steps (`jaxdist.zero`), or is computed from nothing else; else it is of the batch
    stored: bool = False
    requested: bool = False  # `jaxdist.shard` or the optimizer's `init` wants it so
    whole: bool = False  # all of it is on each device as well, so nothing has to move for that

    @property
    def rows(self) -> int:
        """Entries along the dimension on a device."""
        return self.outer * self.chunk

    def at(self, dim: int) -> Split:
        """The same slices of another array's dimension `dim`."""
        return self if dim == self.dim else replace(self, dim=dim)

    def is_padded(self, devices: int) -> bool:
        """Whether some device holds padding."""
        return self.chunk * devices != self.size

    def is_tile(self, devices: int) -> bool:
        """Whether these are the usual slices: those that a reduce-scatter makes, and that are kept between steps."""
        return self.outer == 1 and self.chunk == -(-self.size // devices)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the slice."""
        return (*shape[: self.dim], self.rows, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Partial:
    """A summand a device; 16-bit floats are kept in 32 bits until they are added up."""

    gradient: bool = False  # it was made by differentiation, and may travel compressed
    made: bool = True  # False of what a loop carries, until a summand is added to it
    # axes over which the program is placed already, and over which it is a summand as well: the reduction that was to
    # be there is made with that over this axis
    owed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deferred:
    """Cheap to make in any form."""

    const: Any = None  # the value of each entry, if the program says so


Placement = Replicated | Split | Partial | Deferred
Form = Replicated | Split | Partial
"""A placement that a device can hold, without what else is known of the value."""

REPLICATED, PARTIAL, DEFERRED = Replicated(), Partial(), Deferred()


@functools.lru_cache(maxsize=65536)
def form(placement: Placement) -> Form:
    """What a device holds of a value; of a deferred one all."""
    if isinstance(placement, Split):
        return Split(placement.dim, placement.size, placement.chunk, placement.outer)
    return Partial(owed=placement.owed) if isinstance(placement, Partial) else REPLICATED


def tile(dim: int, size: int, devices: int, stored: bool = False) -> Split:
    """The usual slices of a dimension."""
    return Split(dim, size, -(-size // devices), stored=stored)


def tiles(dim: int, size: int, axes: Sequence[int], stored: bool = False) -> list[Split]:
    """The slices of a dimension over several axes of so many devices, the outermost first: as over one that has all of
    their devices, one after another."""
    found: list[Split] = []
    for k in range(len(axes)):
        chunk = -(-size // math.prod(axes[k:])) * math.prod(axes[k + 1 :])
        found.append(Split(dim, size, chunk, stored=stored))
        size = chunk
    return found


def local_shape(shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
    """Of what a device holds."""
    return placement.shape(shape) if isinstance(placement, Split) else tuple(shape)


def wide(dtype: Any) -> Any:
    """The dtype in which summands are kept: 16-bit floats may overflow where their sum doesn't."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4:
        return jnp.dtype("float32")
    return dtype


def is_wide(dtype: Any) -> bool:
    """Whether summands of a dtype can be added up in any order: numbers, not booleans or keys."""
    return jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jnp.integer)


def reshaped(split: Split, shape: Sequence[int], new: Sequence[int]) -> Split | None:
    """The slices after a reshape, if each device's stay contiguous there; the rest is a matter of the same entries."""
    for (a, b), (c, d) in _groups(shape, new):
        if not a <= split.dim < b:
            continue
        after = math.prod(shape[split.dim + 1 : b])
        outer, size, chunk = math.prod(shape[a : split.dim]) * split.outer, split.size * after, split.chunk * after
        for k in range(c, d):
            before, behind = math.prod(new[c:k]), math.prod(new[k + 1 : d])
            if not before * behind or outer % before or size % behind or chunk % behind:
                continue
            if new[k] == outer // before * (size // behind) and size // behind > 0:
                return replace(split, dim=k, outer=outer // before, size=size // behind, chunk=chunk // behind)
    return None


def _groups(shape: Sequence[int], new: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Runs of dimensions, [a, b) of one shape and [c, d) of the other, that hold the same entries."""
    i = j = 0
    while i < len(shape) or j < len(new):
        a, c = i, j
        left = right = 1
        if i < len(shape):
            left, i = shape[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while left != right:
            if left < right and i < len(shape):
                left, i = left * shape[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            else:
                break
        while i < len(shape) and shape[i] == 1 and j >= len(new):
            i += 1
        while j < len(new) and new[j] == 1 and i >= len(shape):
            j += 1
        yield (a, i), (c, j)


def related(shape: Sequence[int], new: Sequence[int], dim: int) -> list[int]:
    """The dimensions after a reshape that hold the entries of dimension `dim` before it."""
    return next((list(range(c, d)) for (a, b), (c, d) in _groups(shape, new) if a <= dim < b), [])
