"""Placements: how the devices hold a value that is logically one array.

References: Xu et al., *GSPMD*, arXiv 2105.04663; the placements of ``torch.distributed.tensor``.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

Number = np.number | np.bool_  # a scalar of NumPy's, which keeps the dtype


class Aval(Protocol):
    """The type of a value: JAX's `ShapedArray`, which has no public name in all versions."""

    shape: tuple[int, ...]
    dtype: np.dtype  # or JAX's own, of keys
    size: int
    ndim: int
    weak_type: bool


def aval_of(atom: Var | Literal) -> Aval:
    """Return the type of a variable or literal."""
    return cast(Aval, atom.aval)  # an `AbstractValue` to the type checker: tokens and refs have no shape


@dataclass(frozen=True)
class Replicated:
    """The same on every device."""

    const: Number | None = None  # the value of each entry, if the program says so (a literal)


@dataclass(frozen=True)
class Split:
    """One slice per device: entries ``i * chunk`` to ``(i + 1) * chunk`` of each of `outer` blocks of a dimension."""

    # There are several blocks if a batch was merged with a dimension before it, as in a time-major reshape, or if two
    # views of a batch were joined. Entries beyond a block are padding: copies of the last real one (if stored, any).

    dim: int  # the split dimension
    size: int  # length of a block
    chunk: int  # length of a block on a device
    outer: int = 1  # number of blocks
    of_state: bool = False  # sharded between steps or computed only from such values; else of the batch
    requested: bool = False  # `jaxdist.shard` or the optimizer's `init` requested this
    whole: bool = False  # each device also has the whole value, so using it needs no communication

    @property
    def rows(self) -> int:
        """Return the number of entries along the dimension on a device."""
        return self.outer * self.chunk

    def along(self, dim: int) -> "Split":
        """Return the same slices of dimension `dim` of a different array."""
        return self if dim == self.dim else replace(self, dim=dim)

    def alone(self) -> "Split":
        """Return the same slices and nothing else: no device has the whole value as well, nobody requested them."""
        return replace(self, whole=False, requested=False) if self.whole or self.requested else self

    def is_padded(self, devices: int) -> bool:
        """Check whether some device holds padding."""
        return self.chunk * devices != self.size

    def is_tile(self, devices: int) -> bool:
        """Check whether these are the slices of a reduce-scatter, as kept between steps."""
        return self.outer == 1 and self.chunk == -(-self.size // devices)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice."""
        return (*shape[: self.dim], self.rows, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Partial:
    """One summand per device; 16-bit floats are kept in 32 bits until they are added up."""

    gradient: bool = False  # differentiation made it, and it may be sent compressed
    made: bool = True  # False for a loop's carry until a summand is added to it
    # axes placed before, along which this is a summand too: one reduction covers all
    unreduced_axes: tuple[str, ...] = ()
    bits: bool = False  # one device's value, and zeros: a move, so the bits are added as integers


@dataclass(frozen=True)
class Deferred:
    """Nothing on a device yet: cheap to make in any form."""

    const: Number | None = None  # the value of each entry, if known from the program


Placement = Replicated | Split | Partial | Deferred
Form = Replicated | Split | Partial  # a placement that a device can hold, without further knowledge of the value

REPLICATED = Replicated()


@functools.lru_cache(maxsize=65536)
def form(placement: Placement) -> Form:
    """Return the form in which a device holds a value; a deferred one is whole."""
    if isinstance(placement, Split):
        return Split(placement.dim, placement.size, placement.chunk, placement.outer)
    if isinstance(placement, Partial):
        return Partial(unreduced_axes=placement.unreduced_axes, bits=placement.bits)
    return REPLICATED


def tile(dim: int, size: int, devices: int, of_state: bool = False) -> Split:
    """Return the usual slices of a dimension."""
    return Split(dim, size, -(-size // devices), of_state=of_state)


def in_one_collective(source: Split | Partial, target: Split, devices: int, dtype: np.dtype) -> bool:
    """Check whether one collective makes slices: a reduce-scatter, or an all-to-all from a different dimension."""
    if isinstance(source, Partial):
        return target.is_tile(devices)
    return (
        # An all-to-all trades equal parts and joins whole chunks: it can neither drop padding nor make it.
        source.dim != target.dim
        and source.outer == target.outer == 1
        and not source.is_padded(devices)
        and not target.is_padded(devices)
        and not jnp.issubdtype(dtype, jax.dtypes.extended)
    )


def tiles(dim: int, size: int, axes: Sequence[int], of_state: bool = False) -> list[Split]:
    """Slice a dimension over axes of these sizes, outermost first, as over one axis with all devices in order."""
    slices: list[Split] = []
    for k in range(len(axes)):
        # 10 rows over axes of 2 and 3: (size 10, chunk 6), then (size 6, chunk 2): 2 rows on each device but the last,
        # as over 6 in a row. Halves of 5 rows would come to 2, 2 and 1, twice.
        chunk = -(-size // math.prod(axes[k:])) * math.prod(axes[k + 1 :])
        slices.append(Split(dim, size, chunk, of_state=of_state))
        size = chunk
    return slices


def local_shape(shape: Sequence[int], placement: Placement | None) -> tuple[int, ...]:
    """Return the shape of a device's part."""
    return placement.shape(shape) if isinstance(placement, Split) else tuple(shape)


@functools.lru_cache(maxsize=64)
def wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype for summands: 16-bit floats may overflow where their sum does not."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4:
        return jnp.dtype("float32")
    return dtype


@functools.lru_cache(maxsize=64)
def is_wide(dtype: np.dtype) -> bool:
    """Check whether a dtype can be summed in any order: numbers of a byte or more, not booleans or keys."""
    if jnp.issubdtype(dtype, jnp.integer):
        return not is_narrow(dtype)
    return jnp.issubdtype(dtype, jnp.inexact)


def is_narrow(dtype: np.dtype) -> bool:
    """Check whether a number takes less than a byte, as int4 does: XLA for CPUs can't join arrays of these."""
    return jnp.issubdtype(dtype, np.number) and jax.dtypes.itemsize_bits(dtype) < 8


def reshaped(split: Split, shape: Sequence[int], new: Sequence[int]) -> Split | None:
    """Return the slices after a reshape, if each device's stay contiguous; else None.

    For two devices; the batch of 8 may come after the time steps::

        (8, 3) -> (24,)     Split(0, size=8, chunk=4) -> Split(0, size=24, chunk=12)
        (3, 8) -> (24,)     Split(1, size=8, chunk=4) -> Split(0, size=8, chunk=4, outer=3)
        (6,)   -> (3, 2)    Split(0, size=6, chunk=3) -> None: a slice would end within a row
    """
    for (a, b), (c, d) in _groups(shape, new):
        if not a <= split.dim < b:
            continue
        # The slices as runs of entries: of each of `outer` runs of `size` entries, a device has `chunk` in a row.
        stride = math.prod(shape[split.dim + 1 : b])
        outer, size, chunk = math.prod(shape[a : split.dim]) * split.outer, split.size * stride, split.chunk * stride
        for k in range(c, d):
            left, right = math.prod(new[c:k]), math.prod(new[k + 1 : d])  # entries that vary slower and faster
            # The chunk must survive the reshape as well as the size: (5, 3) -> (15,) over 4 devices leaves them 6, 6, 3
            # and 0 entries, where the usual slices of 15 are 4, 4, 4 and 3.
            if not left * right or outer % left or size % right or chunk % right:
                continue
            if new[k] == outer // left * (size // right) and size // right > 0:
                return replace(split, dim=k, outer=outer // left, size=size // right, chunk=chunk // right)
    return None


def _groups(shape: Sequence[int], new: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield runs of dimensions, [a, b) and [c, d) of the two shapes, with the same entries."""
    # (2, 3, 4) -> (6, 4): [0, 2) with [0, 1), then [2, 3) with [1, 2). The smaller product grows until both are equal.
    i = j = 0
    while i < len(shape) or j < len(new):
        a, c = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(new))
        while (left := math.prod(shape[a:i])) != (right := math.prod(new[c:j])):
            if left < right and i < len(shape):
                i += 1
            elif j < len(new):
                j += 1
            else:
                break
        # Dimensions of size 1 at the end join the last run: a run of their own would have nothing on the other side.
        while j == len(new) and i < len(shape) and shape[i] == 1:
            i += 1
        while i == len(shape) and j < len(new) and new[j] == 1:
            j += 1
        yield (a, i), (c, j)


def related(shape: Sequence[int], new: Sequence[int], dim: int) -> list[int]:
    """Return the dimensions after a reshape that hold the entries of dimension `dim`."""
    return next((list(range(c, d)) for (a, b), (c, d) in _groups(shape, new) if a <= dim < b), [])


def whole_if_deferred(placement: Placement) -> Placement:
    """Return the placement of a value passed into control flow: a deferred one is made whole."""
    return Replicated(placement.const) if isinstance(placement, Deferred) else placement


def inside(p: Placement) -> Placement:
    """Return the placement of a value inside a body."""
    if isinstance(p, Partial):
        return REPLICATED
    return p.alone() if isinstance(p, Split) else whole_if_deferred(p)


def throughout(p: Placement) -> Placement:
    """Return the placement of a loop constant in a body; a deferred one takes the form used."""
    return p if isinstance(p, Deferred) else inside(p)
