"""How a leaf of the state is kept between steps: whole on every device, or in shards, one slice a device.

A shard is a slice along one dimension. Where the devices don't divide that dimension its end is padded: JAX has no
arrays with shards of different sizes. Such a leaf is a `Padded`, which looks like the array without the padding.

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

from jaxdist.mesh import AXIS, in_groups
from jaxdist.placements.values import REPLICATED, Placement, Split, tile, tiles

HOST = "pinned_host"
"""JAX's name for the host's memory that a device reads and writes by itself."""
_WORTH_AVOIDING = 0.1


@dataclass(frozen=True)
class Layout:
    """The shards of a leaf: slices along `dim`, after `pad` entries were added at its end. Made by `layout`.

    Each of `groups` of devices has all slices (see `jaxdist.mesh.in_groups`). `host`: they are in the host's memory.
    """

    dim: int
    pad: int = 0
    groups: int = 1
    host: bool = False

    @property
    def spec(self) -> P:
        """Which dimension of the physical array is split."""
        return P(*[None] * self.dim, AXIS)

    @property
    def is_plain(self) -> bool:
        """Whether the physical array is the leaf."""
        return not self.pad

    def splits(self, size: int, axes: Sequence[int]) -> list[Placement]:
        """The placements of a leaf with so many entries along `dim`, over each axis of so many devices."""
        if self.groups == 1 or len(axes) == 1:
            return [*tiles(self.dim, size, axes, stored=True)]
        return [REPLICATED, tile(self.dim, size, axes[-1], stored=True)]

    def physical(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape with its padding."""
        return (*shape[: self.dim], shape[self.dim] + self.pad, *shape[self.dim + 1 :])

    def logical(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape without its padding."""
        return (*shape[: self.dim], shape[self.dim] - self.pad, *shape[self.dim + 1 :])

    def padded(self, x: np.ndarray) -> np.ndarray:
        """The physical array of a leaf; its padding holds zeros."""
        return np.pad(x, [(0, self.pad if d == self.dim else 0) for d in range(x.ndim)]) if self.pad else x

    def trimmed(self, x: Any) -> Any:
        """The leaf of a physical array."""
        return x if self.is_plain else x[(slice(None),) * self.dim + (slice(self.logical(x.shape)[self.dim]),)]


def layout(dim: int, pad: int, groups: int = 1, host: bool = False) -> Layout:
    """The one `Layout` of these values: they are compared by identity in every call of a step."""
    return _layout(dim, pad, groups, host)  # the cache tells calls with and without a default apart


_layout = functools.cache(Layout)


def layout_of(split: Split, devices: int, groups: int = 1) -> Layout:
    """Of what is kept as it is placed, over so many devices in each of some groups; the inverse of `Layout.splits`."""
    return layout(split.dim, split.chunk * devices - split.size, groups)


def choose(shape: Sequence[int], devices: int, avoid: Collection[int] = (), groups: int = 1) -> Layout | None:
    """The layout of a leaf that is to be kept in shards: along the dimension that pads least, the largest of these.

    Args:
      shape: of the leaf.
      devices: how many share it.
      groups: of so many devices, each of which has all of it.
      avoid: dimensions to leave alone if another one pads little: those along which a loop takes slices.

    Returns:
      None if it has fewer entries than there are devices: it stays whole on each.

    Example:
      >>> choose((50257, 64), 8), choose((1023, 1023), 8), choose((3,), 8)
      (Layout(dim=1, pad=0, groups=1, host=False), Layout(dim=0, pad=1, groups=1, host=False), None)
    """
    if devices == 1 or math.prod(shape) < devices:
        return None

    def cost(d: int) -> tuple[float, int, int]:
        return -shape[d] % devices / shape[d] + _WORTH_AVOIDING * (d in avoid), -shape[d], d

    dim = min(range(len(shape)), key=cost)
    return layout(dim, -shape[dim] % devices, groups)


def on_host(how: Layout | None, shape: Sequence[int], devices: int) -> Layout | None:
    """The layout of a leaf that is to be kept so, in the host's memory.

    What each of several devices has whole stays with them, for it is small, and so do numbers, of which XLA wants some
    on the device.

    Example:
      >>> on_host(choose((6, 4), 2), (6, 4), 2)
      Layout(dim=0, pad=0, groups=1, host=True)
      >>> on_host(None, (6, 4), 1), on_host(None, (6, 4), 2), on_host(None, (), 1)
      (Layout(dim=0, pad=0, groups=1, host=True), None, None)
    """
    if how is not None:
        return layout(how.dim, how.pad, how.groups, True)
    return layout(0, 0, 1, True) if devices == 1 and math.prod(shape) > 1 and shape else None  # one slice, all of it


def memory_apart(mesh: Mesh) -> bool:
    """Whether the devices have a memory of their own, beside the host's. CPU devices have none.

    Raises:
      ValueError: they have, and can't use the host's.
    """
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    device = own[0] if own else mesh.devices.flat[0]
    if device.platform == "cpu":
        return False
    if HOST not in (kinds := [memory.kind for memory in device.addressable_memories()]):
        raise ValueError(
            f"zero(offload=True) keeps state in the host's memory ({HOST}), which {device.platform} devices "
            f"({device.device_kind}) can't use: they have {', '.join(kinds)}"
        )
    return True


class Padded:
    """A leaf of the state in shards of equal size, of which the last ones hold padding.

    It has the shape that the leaf has for you, and is a leaf of its pytree as the array would be. It is what a
    decorated step takes and returns; for anything else make an array of it with `jaxdist.unshard`. ``numpy.asarray``
    and ``jax.numpy`` functions do that by themselves where this process has all the shards.

    Attributes:
      array: the global array with its padding.
      layout: how it is split.
    """

    __slots__ = ("_sharding", "array", "layout", "shape")

    def __init__(self, array: jax.Array, layout: Layout):
        self.array, self.layout = array, layout
        self.shape = layout.logical(array.shape)
        self._sharding = _padded_sharding(array.sharding, layout)  # the name that `compat.sharding_of` looks at

    @property
    def sharding(self) -> Any:
        return self._sharding

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def weak_type(self) -> bool:
        return self.array.weak_type

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

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
        dims = [f"{n}/{AXIS}" if d == self.layout.dim else str(n) for d, n in enumerate(self.shape)]
        groups = f", groups={self.layout.groups}" if self.layout.groups > 1 else ""
        return f"Padded({self.dtype}[{','.join(dims)}], pad={self.layout.pad}{groups})"


@functools.cache
def _padded_sharding(sharding: NamedSharding, layout: Layout) -> NamedSharding:
    """An object of its own for each layout: a step tells by the sharding's identity how a leaf is kept."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=sharding.memory_kind)


def physical(x: Any) -> Any:
    """The global array of a leaf."""
    return x.array if type(x) is Padded else x


def sharding(mesh: Mesh, how: Layout | None) -> NamedSharding:
    """Of a leaf's physical array."""
    if how is None or mesh.size == 1:  # as XLA says it of results
        return NamedSharding(mesh, P(), memory_kind=HOST if how and how.host else None)
    return NamedSharding(in_groups(mesh, how.groups), how.spec, memory_kind=HOST if how.host else None)


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
