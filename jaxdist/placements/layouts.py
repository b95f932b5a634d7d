"""How a leaf of the state is kept between steps: whole on every device, or in shards, one slice a device.

Each axis of the mesh cuts a leaf along one dimension, or not. Where the devices don't divide that dimension its end is
padded: JAX has no arrays with shards of different sizes. Such a leaf is a `Padded`, which looks like the array without
the padding.

A slice may lie in the host's memory, from which its device takes it (`jaxdist.zero`, ``offload=True``).

Reference: Rajbhandari et al., *ZeRO*, arXiv 1910.02054, section 5 (partitioning of the states of training).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import AXIS, GROUP, SEQUENCE, Axis, data_size, in_groups
from jaxdist.placements.values import REPLICATED, Placement, Split, tiles

HOST = "pinned_host"
"""JAX's name for the host's memory that a device reads and writes by itself."""
_WORTH_AVOIDING = 0.1


@dataclass(frozen=True)
class Cut:
    """What one axis of a mesh does to a leaf."""

    axis: str  # its name
    # slices, one a device; where they are fewer than the devices, so many in a row share the leaf, and each such group
    # has all of it (see `jaxdist.mesh.in_groups`)
    parts: int
    dim: int  # the dimension that is cut
    pad: int = 0  # entries that were added at its end before


@dataclass(frozen=True)
class Layout:
    """The slices of a leaf, one a device. Made by `layout`."""

    # by one axis after another, in the order of the passes: each cuts what the one before has left
    cuts: tuple[Cut, ...]
    host: bool = False  # the slices are in the host's memory

    @property
    def is_plain(self) -> bool:
        """Whether the physical array is the leaf."""
        return not any(cut.pad for cut in self.cuts)

    @property
    def dims(self) -> list[int]:
        """The dimensions that are cut."""
        return sorted({cut.dim for cut in self.cuts})

    def axes(self, dim: int) -> tuple[str, ...]:
        """The names of the axes that cut a dimension, the first one first."""
        return tuple(cut.axis for cut in self.cuts if cut.dim == dim)

    def by(self, axis: str) -> Cut | None:
        """What an axis does."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def with_cut(self, cut: Cut | None) -> Layout:
        """The same, cut once more."""
        return self if cut is None else layout(*self.cuts, cut, host=self.host)

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a slice."""
        sizes = list(shape)
        for cut in self.cuts:
            sizes[cut.dim] = (sizes[cut.dim] + cut.pad) // cut.parts
        return tuple(sizes)

    def physical(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape with its padding."""
        sizes = list(self.local(shape))
        for cut in self.cuts:
            sizes[cut.dim] *= cut.parts
        return tuple(sizes)

    def logical(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape without its padding."""
        sizes = list(shape)
        for cut in self.cuts:
            sizes[cut.dim] //= cut.parts
        for cut in reversed(self.cuts):
            sizes[cut.dim] = sizes[cut.dim] * cut.parts - cut.pad
        return tuple(sizes)

    def padded(self, x: np.ndarray) -> np.ndarray:
        """The physical array of a leaf; its padding holds zeros."""
        return x if self.is_plain else _padded(x, self.cuts)

    def trimmed(self, x: Any) -> Any:
        """The leaf of a physical array."""
        return x if self.is_plain else _trimmed(x, self.cuts)

    def placements(self, shape: Sequence[int], axes: Sequence[Axis], stored: bool = True) -> list[Placement]:
        """How each pass finds a leaf of this shape, given the axes of the passes in their order."""
        found: list[Placement] = [REPLICATED] * len(axes)
        sizes = list(shape)
        for cut in self.cuts:
            if cut.parts == 1:
                continue
            names = (GROUP, AXIS) if cut.axis == AXIS else (cut.axis,)
            along = [k for k, axis in enumerate(axes) if axis.name in names]
            if axes[along[-1]].size == cut.parts:  # each group has all of it
                along = along[-1:]
            slices = tiles(cut.dim, sizes[cut.dim], [axes[k].size for k in along], stored)
            for k, one in zip(along, slices, strict=True):
                found[k] = one
            sizes[cut.dim] = slices[-1].chunk
        return found


def _padded(x: Any, cuts: Sequence[Cut]) -> Any:
    if not cuts:
        return x
    cut, *rest = cuts
    x = np.pad(x, [(0, cut.pad if d == cut.dim else 0) for d in range(x.ndim)])
    if all(one.pad == 0 for one in rest):
        return x
    return np.concatenate([_padded(part, rest) for part in np.split(x, cut.parts, cut.dim)], cut.dim)


def _trimmed(x: Any, cuts: Sequence[Cut]) -> Any:
    if not cuts:
        return x
    cut, *rest = cuts
    if any(one.pad for one in rest):
        joined = np.concatenate if isinstance(x, np.ndarray) else jnp.concatenate
        rows = x.shape[cut.dim] // cut.parts
        before = (slice(None),) * cut.dim
        parts = [x[(*before, slice(k * rows, (k + 1) * rows))] for k in range(cut.parts)]
        x = joined([_trimmed(part, rest) for part in parts], cut.dim)
    return x[(slice(None),) * cut.dim + (slice(x.shape[cut.dim] - cut.pad),)]


def layout(*cuts: Cut, host: bool = False) -> Layout:
    """The one `Layout` of these values: they are compared by identity in every call of a step."""
    return _layout(cuts, host)


_layout = functools.cache(Layout)


def choose(shape: Sequence[int], devices: int, avoid: Collection[int] = ()) -> Cut | None:
    """How a leaf that is to be kept in shards is cut: along the dimension that pads least, the largest of these."""
    if devices == 1 or math.prod(shape) < devices:
        return None

    def cost(d: int) -> tuple[float, int, int]:
        return -shape[d] % devices / shape[d] + _WORTH_AVOIDING * (d in avoid), -shape[d], d

    dim = min(range(len(shape)), key=cost)
    return Cut(AXIS, devices, dim, -shape[dim] % devices)


def layout_of(placement: Placement, axis: Axis) -> Layout | None:
    """The layout of what is kept as an axis has placed it; None: it is whole."""
    if not isinstance(placement, Split):
        return None
    pad = placement.chunk * axis.size - placement.size
    return layout(Cut(axis.name, axis.size, placement.dim, pad))


def of_batch(shape: Sequence[int], mesh: Mesh) -> Layout:
    """How a leaf of the batch is cut: its examples by the axis of data, their second dimension by that of sequences."""
    cuts, n = list[Cut](), mesh.shape.get(SEQUENCE, 1)
    if n > 1 and len(shape) > 1 and shape[1] >= n:
        cuts.append(Cut(SEQUENCE, n, 1, -shape[1] % n))
    if AXIS in mesh.shape:
        n = data_size(mesh)
        cuts.append(Cut(AXIS, n, 0, -shape[0] % n))
    return layout(*cuts)


def on_host(how: Layout | None, shape: Sequence[int], devices: int) -> Layout | None:
    """The layout of a leaf that is to be kept so, in the host's memory.

    What each of several devices has whole stays with them, for it is small, and so do numbers, of which XLA wants some
    on the device.
    """
    if how is not None:
        return layout(*how.cuts, host=True)
    return layout(host=True) if devices == 1 and math.prod(shape) > 1 and shape else None


def check_host_memory(mesh: Mesh) -> None:
    """Refuse devices that can't use their host's memory."""
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    device = own[0] if own else mesh.devices.flat[0]
    if HOST not in (kinds := [memory.kind for memory in device.addressable_memories()]):
        raise ValueError(
            f"zero(offload=True) keeps state in the host's memory ({HOST}), which {device.platform} devices "
            f"({device.device_kind}) can't use: they have {', '.join(kinds)}"
        )


class Padded:
    """A leaf of the state in shards of equal size, of which the last ones hold padding.

    It has the shape that the leaf has for you, and is a leaf of its pytree as the array would be. It is what a
    decorated step takes and returns; for anything else make an array of it with `jaxdist.unshard`. ``numpy.asarray``
    and ``jax.numpy`` functions do that by themselves where this process has all the shards.
    """

    __slots__ = ("_sharding", "array", "aval", "dtype", "layout", "ndim", "shape", "size", "weak_type")

    def __init__(self, array: jax.Array, layout: Layout):
        self.array, self.layout, self.aval = array, layout, array.aval
        self.dtype, self.weak_type = array.dtype, array.weak_type
        self.shape = layout.logical(array.shape)
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self._sharding = _padded_sharding(array.sharding, layout)  # the name that `compat.sharding_of` looks at

    @property
    def sharding(self) -> Any:
        return self._sharding

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_fully_addressable(self) -> bool:
        return self.array.is_fully_addressable

    def is_deleted(self) -> bool:
        """Whether a step has taken its memory."""
        return self.array.is_deleted()

    def block_until_ready(self) -> Padded:
        """Wait for the computation that makes it."""
        self.array.block_until_ready()
        return self

    def _not_an_array(self, *_: Any) -> Any:
        raise TypeError(
            f"an array of shape {self.shape} is kept in shards (jaxdist.zero, level 3, or jaxdist.shard) and has no "
            "arithmetic outside decorated functions: jaxdist.unshard(tree), called by every rank, makes it complete"
        )

    __getitem__ = __iter__ = __len__ = __float__ = __int__ = __bool__ = _not_an_array
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _not_an_array
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = _not_an_array

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(np.asarray(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.is_fully_addressable:
            raise ValueError(
                f"an array of shape {self.shape} is in shards on several processes: gather the state with "
                "jaxdist.unshard(state), called by every rank"
            )
        return np.asarray(self.layout.trimmed(np.asarray(self.array)), dtype)

    def __repr__(self) -> str:
        dims = ["/".join([str(n), *self.layout.axes(d)]) for d, n in enumerate(self.shape)]
        pads = ",".join(str(cut.pad) for cut in self.layout.cuts)
        parts = math.prod(cut.parts for cut in self.layout.cuts)
        groups = self.array.sharding.mesh.size // parts  # type: ignore[attr-defined]
        return f"Padded({self.dtype}[{','.join(dims)}], pad={pads}{f', groups={groups}' if groups > 1 else ''})"


@functools.cache
def _padded_sharding(sharding: NamedSharding, layout: Layout) -> NamedSharding:
    """An object of its own for each layout: a step tells by the sharding's identity how a leaf is kept."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=sharding.memory_kind)


def physical(x: Any) -> Any:
    """The global array of a leaf."""
    return x.array if type(x) is Padded else x


@functools.cache
def sharding(mesh: Mesh, how: Layout | None) -> NamedSharding:
    """Of a leaf's physical array."""
    kind = HOST if how and how.host else None
    if how is None or mesh.size == 1:  # as XLA says it of results
        return NamedSharding(mesh, P(), memory_kind=kind)
    data = how.by(AXIS)
    over = mesh if data is None else in_groups(mesh, mesh.shape[AXIS] // data.parts)
    return NamedSharding(over, spec([how.axes(d) for d in range(1 + max(how.dims, default=-1))]), memory_kind=kind)


def spec(dims: Sequence[tuple[str, ...]]) -> P:
    """What JAX calls the axes that cut each dimension."""
    return P(*[axes if len(axes) > 1 else next(iter(axes), None) for axes in dims])


def copied(x: jax.Array, place: Sharding) -> jax.Array:
    """An array with copies of its shards, in the memory that `place` says: not a program of all processes."""
    shards = []
    for shard in x.addressable_shards:
        own = SingleDeviceSharding(shard.device, memory_kind=place.memory_kind)
        # By way of NumPy where a memory is the host's: `device_put` may make an alias.
        away = HOST in (place.memory_kind, x.sharding.memory_kind)
        shards.append(jax.device_put(np.array(shard.data), own) if away else jnp.copy(shard.data))
    return jax.make_array_from_single_device_arrays(x.shape, place, shards)


def on_device(x: jax.Array) -> jax.Array:
    """An array as it is, or a copy of one that is in the host's memory."""
    return copied(x, x.sharding.with_memory_kind("device")) if x.sharding.memory_kind == HOST else x
