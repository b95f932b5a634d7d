"""Layouts of leaves on a mesh, of state and of the batch: whole on every device, or one slice per device.

JAX requires shards of equal size, so the end is padded; a `Padded` looks like the array without the padding.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.mesh import AXIS, GROUP, SEQUENCE, Axis, automatic, data_size, in_groups
from jaxdist.placements.model.values import REPLICATED, Aval, Placement, Split, is_narrow, tiles

HOST = "pinned_host"  # JAX's name for host memory that a device accesses directly
_WORTH_AVOIDING = 0.1  # the cost of a dimension to avoid, as a fraction of the leaf that is padding
_Array = TypeVar("_Array", bound=np.ndarray | jax.Array)


@dataclass(frozen=True)
class Cut:
    """The cut of a leaf along one axis of a mesh."""

    axis: str  # its name
    parts: int  # slices; if fewer than the devices, each group of this many devices in a row has the whole leaf
    dim: int  # the dimension to cut
    pad: int = 0  # padding entries added at its end first


@dataclass(frozen=True)
class Layout:
    """The slices of a leaf, one per device. Made by `layout`."""

    cuts: tuple[Cut, ...]  # one per axis, in the order of the passes; each divides the slices of the cut before
    host: bool = False  # the slices are in the host's memory

    @property
    def is_plain(self) -> bool:
        """Check whether the physical array equals the leaf, without padding."""
        return not any(cut.pad for cut in self.cuts)

    @property
    def dims(self) -> list[int]:
        """Return the dimensions that are cut."""
        return sorted({cut.dim for cut in self.cuts})

    def axes(self, dim: int) -> tuple[str, ...]:
        """Return the names of the axes that cut a dimension, in order."""
        return tuple(cut.axis for cut in self.cuts if cut.dim == dim)

    def by(self, axis: str) -> Cut | None:
        """Return the cut of an axis, if any."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def with_cut(self, cut: Cut | None) -> "Layout":
        """Return this layout with one more cut."""
        return self if cut is None else layout(*self.cuts, cut, host=self.host)

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a slice."""
        sizes = list(shape)
        for cut in self.cuts:
            sizes[cut.dim] = (sizes[cut.dim] + cut.pad) // cut.parts
        return tuple(sizes)

    def physical(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape with its padding."""
        sizes = list(self.local(shape))
        for cut in self.cuts:
            sizes[cut.dim] *= cut.parts
        return tuple(sizes)

    def logical(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape without its padding."""
        sizes = list(shape)
        for cut in self.cuts:
            sizes[cut.dim] //= cut.parts
        for cut in reversed(self.cuts):
            sizes[cut.dim] = sizes[cut.dim] * cut.parts - cut.pad
        return tuple(sizes)

    def padded(self, x: _Array, mode: Literal["constant", "edge"] = "constant") -> _Array:
        """Return the physical array of a leaf, padded with zeros, or with copies of the last entries (``"edge"``)."""
        return x if self.is_plain else _padded(x, self.cuts, mode)

    def trimmed(self, x: _Array) -> _Array:
        """Return the leaf of a physical array."""
        return x if self.is_plain else _trimmed(x, self.cuts)

    def placements(self, shape: Sequence[int], axes: Sequence[Axis], of_state: bool = True) -> list[Placement]:
        """Return a leaf's placement in each pass; `axes` are in the order of the passes."""
        placements: list[Placement] = [REPLICATED] * len(axes)
        sizes = list(shape)
        for cut in (cut for cut in self.cuts if cut.parts > 1):
            names = (GROUP, AXIS) if cut.axis == AXIS else (cut.axis,)
            along = [k for k, axis in enumerate(axes) if axis.name in names]
            if axes[along[-1]].size == cut.parts:  # each group has the whole leaf
                along = along[-1:]
            slices = tiles(cut.dim, sizes[cut.dim], [axes[k].size for k in along], of_state)
            for k, split in zip(along, slices, strict=True):
                placements[k] = split
            sizes[cut.dim] = slices[-1].chunk
        return placements


def _padded(x: _Array, cuts: Sequence[Cut], mode: Literal["constant", "edge"]) -> _Array:
    if not cuts:
        return x
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    cut, *inners = cuts
    x = numpy.pad(x, [(0, cut.pad if d == cut.dim else 0) for d in range(x.ndim)], mode=mode)
    if all(inner.pad == 0 for inner in inners):
        return x
    return numpy.concatenate([_padded(part, inners, mode) for part in numpy.split(x, cut.parts, cut.dim)], cut.dim)


def _trimmed(x: _Array, cuts: Sequence[Cut]) -> _Array:
    if not cuts:
        return x
    cut, *inners = cuts
    if any(inner.pad for inner in inners):
        numpy: Any = np if isinstance(x, np.ndarray) or is_narrow(x.dtype) else jnp
        rows = x.shape[cut.dim] // cut.parts
        outer = (slice(None),) * cut.dim
        parts = [x[(*outer, slice(k * rows, (k + 1) * rows))] for k in range(cut.parts)]
        x = numpy.concatenate([_trimmed(part, inners) for part in parts], cut.dim)
    return x[(slice(None),) * cut.dim + (slice(x.shape[cut.dim] - cut.pad),)]  # type: ignore[return-value]


def layout(*cuts: Cut, host: bool = False) -> Layout:
    """Return the unique `Layout` for these values: calls of steps compare layouts by identity."""
    return _layout(cuts, host)


_layout = functools.cache(Layout)


def choose(shape: Sequence[int], devices: int, avoid: Collection[int] = ()) -> Cut | None:
    """Choose how to shard a leaf: along the largest dimension with least padding; `avoid` counts as a tenth of it."""
    if devices == 1 or math.prod(shape) < devices:
        return None
    cost = lambda d: (-shape[d] % devices / shape[d] + _WORTH_AVOIDING * (d in avoid), -shape[d], d)
    dim = min(range(len(shape)), key=cost)
    return Cut(AXIS, devices, dim, -shape[dim] % devices)


def layout_of(placement: Placement, axis: Axis) -> Layout | None:
    """Return the layout of a leaf that an axis placed so, or None for a whole leaf."""
    if not isinstance(placement, Split):
        return None
    return layout(Cut(axis.name, axis.size, placement.dim, placement.chunk * axis.size - placement.size))


def of_batch(shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return the layout of a batch leaf: examples over data, the second dimension over sequence."""
    cuts, n = list[Cut](), mesh.shape.get(SEQUENCE, 1)
    if n > 1 and len(shape) > 1 and shape[1] >= n:
        cuts.append(Cut(SEQUENCE, n, 1, -shape[1] % n))
    if AXIS in mesh.shape:
        n = data_size(mesh)
        cuts.append(Cut(AXIS, n, 0, -shape[0] % n))
    return layout(*cuts)


def on_host(device_layout: Layout | None, shape: Sequence[int], devices: int) -> Layout | None:
    """Return the layout for keeping a leaf in host memory, or None if it stays on the device."""
    if device_layout is not None:
        return layout(*device_layout.cuts, host=True)
    # Leaves that each of several devices has whole are small. XLA wants some scalars on the device.
    return layout(host=True) if devices == 1 and math.prod(shape) > 1 and shape else None


def check_host_memory(mesh: Mesh) -> None:
    """Refuse devices that cannot access their host's memory."""
    device = next((d for d in mesh.devices.flat if d.process_index == jax.process_index()), mesh.devices.flat[0])
    if HOST not in (kinds := [memory.kind for memory in device.addressable_memories()]):
        raise ValueError(
            f"zero(offload=True) keeps state in the host's memory ({HOST}), which {device.platform} devices "
            f"({device.device_kind}) can't use: they have {', '.join(kinds)}"
        )


class Padded:
    """A leaf of the state in equal shards; the last ones may hold padding.

    It has the leaf's logical shape. Decorated steps take and return it; elsewhere, `jaxdist.unshard` converts it. If
    this process has all shards, JAX, NumPy, operators, and an array's methods get its value, a plain array.
    """

    __slots__ = ("_sharding", "array", "aval", "dtype", "layout", "ndim", "shape", "size", "weak_type")

    def __init__(self, array: jax.Array, layout: Layout):
        self.array, self.layout, self.aval = array, layout, _logical_type(array.aval, layout)
        self.dtype, self.weak_type, self.shape = array.dtype, array.weak_type, self.aval.shape
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self._sharding = _padded_sharding(array.sharding, layout)  # read by `compat.sharding_of`

    @property
    def sharding(self) -> NamedSharding:
        return self._sharding

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_fully_addressable(self) -> bool:
        return self.array.is_fully_addressable

    def is_deleted(self) -> bool:
        """Check whether a step has donated its memory."""
        return self.array.is_deleted()

    def block_until_ready(self) -> "Padded":
        """Wait for the computation of its value."""
        self.array.block_until_ready()
        return self

    @property
    def _refusal(self) -> str:
        where = "" if self.is_fully_addressable else " on several processes"
        return (
            f"an array of shape {self.shape} is in shards with a padded end{where} (jaxdist.zero, level 3, or "
            "jaxdist.shard): decorated functions take it as an argument; elsewhere, jaxdist.unshard(x), called by "
            "every rank, makes it complete"
        )

    _committed = False  # so that `jnp.zeros_like` makes a plain array
    __array_priority__ = 100  # NumPy leaves operators to it, as to a `jax.Array`
    __hash__ = None  # type: ignore[assignment]  # as of an array

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name, name=name, obj=self)
        # What NumPy's arrays have too is about the value; the rest, about devices.
        if self.is_fully_addressable and name != "device" and (name == "at" or hasattr(np.ndarray, name)):
            return getattr(self.__jax_array__(), name)
        raise AttributeError(f"{name}: {self._refusal}", name=name, obj=self)

    def __copy__(self) -> "Padded":
        return self

    def __deepcopy__(self, memo: object) -> "Padded":
        return Padded(copied(self.array, self.array.sharding), self.layout)

    def __reduce__(self) -> tuple[Any, ...]:  # to a plain array, as an array in shards is pickled
        return jnp.asarray, (np.asarray(self),)

    def __jax_array__(self) -> jax.Array:
        return compat.with_weak_type(jnp.asarray(np.asarray(self)), self.weak_type)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.is_fully_addressable:
            raise ValueError(self._refusal)
        return np.asarray(self.layout.trimmed(np.asarray(self.array)), dtype)

    def __repr__(self) -> str:
        dims = ["/".join([str(n), *self.layout.axes(d)]) for d, n in enumerate(self.shape)]
        pads = ",".join(str(cut.pad) for cut in self.layout.cuts)
        parts = math.prod(cut.parts for cut in self.layout.cuts)
        groups = self.array.sharding.mesh.size // parts  # type: ignore[attr-defined]
        return f"Padded({self.dtype}[{','.join(dims)}], pad={pads}{f', groups={groups}' if groups > 1 else ''})"


def _of_value(name: str) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: getattr(x.__jax_array__(), name)(*args, **kwargs)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor",
              "lshift", "rshift"):  # fmt: skip
    setattr(Padded, f"__{_name}__", _of_value(f"__{_name}__"))
    setattr(Padded, f"__r{_name}__", _of_value(f"__r{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round", "getitem", "setitem", "iter",
              "len", "float", "int", "complex", "bool", "index", "dlpack", "dlpack_device"):  # fmt: skip
    setattr(Padded, f"__{_name}__", _of_value(f"__{_name}__"))


def _type_of(x: Padded) -> Aval:
    if not x.is_fully_addressable:  # before `jax.jit` compiles
        raise ValueError(x._refusal)
    return x.aval


compat.stands_for_arrays(Padded, _type_of)


@functools.cache
def _logical_type(aval: Aval, layout: Layout) -> Aval:
    """Return one object per type and layout: a step recognizes its state by the identity of types."""
    return jax.typeof(jax.ShapeDtypeStruct(layout.logical(aval.shape), aval.dtype, weak_type=aval.weak_type))


@functools.cache
def _padded_sharding(sharding: NamedSharding, layout: Layout) -> NamedSharding:
    """Return one object per layout: a step recognizes layouts by the sharding's identity."""
    # Over Explicit axes JAX would make a type of it, for a shape that it does not divide.
    return compat.UnevenSharding(automatic(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def physical(x: Any) -> Any:
    """Return the global array of a leaf."""
    return x.array if type(x) is Padded else x


Bounds = tuple[tuple[int, int], ...]  # a slice's begin and end along each dimension


def bounds(index: Sequence[slice] | None, shape: Sequence[int]) -> Bounds:
    """Return the bounds of a device's slice of an array; for keys, `index` has one more dimension."""
    return tuple(span.indices(shape[d])[:2] for d, span in enumerate((index or ())[: len(shape)]))


@functools.cache
def sharding(mesh: Mesh, layout: Layout | None) -> NamedSharding:
    """Return the sharding of a leaf's physical array."""
    kind = HOST if layout and layout.host else None
    if layout is None or mesh.size == 1:  # as XLA reports it for results
        return NamedSharding(mesh, P(), memory_kind=kind)
    data = layout.by(AXIS)
    over = mesh if data is None else in_groups(mesh, mesh.shape[AXIS] // data.parts)
    dims = range(1 + max(layout.dims, default=-1))
    return NamedSharding(over, spec([layout.axes(d) for d in dims]), memory_kind=kind)


def spec(dims: Sequence[tuple[str, ...]]) -> P:
    """Return JAX's spec for the axes that cut each dimension."""
    return P(*[axes if len(axes) > 1 else next(iter(axes), None) for axes in dims])


def copied(x: jax.Array, place: Sharding) -> jax.Array:
    """Copy an array's shards into the memory of `place`, without a program across processes."""
    shards = []
    for shard in x.addressable_shards:
        target = SingleDeviceSharding(shard.device, memory_kind=place.memory_kind)
        # Copy through NumPy if either memory is the host's: `device_put` may alias.
        away = HOST in (place.memory_kind, x.sharding.memory_kind)
        shards.append(jax.device_put(np.array(shard.data), target) if away else jnp.copy(shard.data))
    return jax.make_array_from_single_device_arrays(x.shape, place, shards)


def on_device(x: jax.Array) -> jax.Array:
    """Return an array that is on the device already, or copy it there from host memory."""
    return copied(x, x.sharding.with_memory_kind("device")) if x.sharding.memory_kind == HOST else x
