"""The axes of a job's mesh, and groups of its devices."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, Sharding, SingleDeviceSharding

AXIS = "data"  # the axis that splits the batch, and along which state is kept in shards
GROUP = "group"  # the axis before it in a mesh whose devices keep all of the state in each of several groups
MODEL, SEQUENCE = "model", "sequence"  # the axes that cut the state, and the second dimension of the batch
NAMES = (MODEL, SEQUENCE, GROUP, AXIS)


class Axis(NamedTuple):
    """One axis of a mesh, as `jax.make_jaxpr` takes it (``axis_env``)."""

    name: str  # that collectives say
    size: int  # the number of devices along it


Groups = tuple[tuple[int, ...], ...]


@functools.cache
def automatic(mesh: Mesh) -> Mesh:
    """Return the mesh with `Auto` axes, over which JAX keeps no sharding in the types of arrays."""
    return _mesh(mesh.devices, mesh.shape)


@functools.cache
def in_groups(mesh: Mesh, groups: int) -> Mesh:
    """Return a mesh with its data axis as two: groups of devices in a row, and the devices of each."""
    if groups == 1:
        return mesh
    cut = lambda name, size: {GROUP: groups, AXIS: size // groups} if name == AXIS else {name: size}
    return _mesh(mesh.devices, {key: n for axis in mesh.shape.items() for key, n in cut(*axis).items()})


@functools.cache
def in_a_row(mesh: Mesh) -> Mesh:
    """Undo `in_groups`; other meshes stay unchanged."""
    if GROUP not in mesh.axis_names:
        return mesh
    return _mesh(mesh.devices, {n: data_size(mesh) if n == AXIS else k for n, k in mesh.shape.items() if n != GROUP})


def _mesh(devices: Any, sizes: Mapping[str, int]) -> Mesh:
    return Mesh(np.reshape(devices, [*sizes.values()]), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


Sizes = Mapping[str, int]  # of axes by name, one of which may be -1 for the remaining devices


def mesh_of(given: Sizes | Mesh, devices: Sequence[Any], owner: object = "the job") -> Mesh:
    """The mesh that a user asks for."""
    valid = (AXIS, MODEL, SEQUENCE)
    names = given.axis_names if isinstance(given, Mesh) else tuple(given)
    if unknown := [name for name in names if name not in valid]:
        raise ValueError(f"mesh: unknown axis {unknown[0]!r}; valid: {', '.join(valid)}")
    if isinstance(given, Mesh):
        return given
    sizes = list(given.values())
    if not sizes or any(type(size) is not int or (size < 1 and size != -1) for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"mesh={dict(given)}: expected the size of each axis, -1 for one of them at most")
    rest = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // rest if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise ValueError(f"mesh={dict(given)}: {owner} has {len(devices)} devices, which these sizes don't make")
    return _mesh(np.array(devices), dict(zip(names, sizes, strict=True)))


def axes_of_mesh(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes of a mesh, the outermost first."""
    return tuple(Axis(name, size) for name, size in mesh.shape.items())


def axes_by_dim(spec: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the axes that divide each dimension."""
    return [tuple(axes) if isinstance(axes, (tuple, list)) else (axes,) if axes else () for axes in spec]


def dim_over(spec: Iterable[object], axis: str) -> int | None:
    """Return the dimension that an axis divides, if any."""
    return next((dim for dim, axes in enumerate(axes_by_dim(spec)) if axis in axes), None)


def passes(mesh: Mesh) -> tuple[Axis, ...]:
    """Return the axes with several devices (one if there is none), in the order in which a step is placed over them."""
    axes = [Axis(name, mesh.shape[name]) for name in NAMES if name in mesh.shape]
    return tuple(axis for axis in axes if axis.size > 1) or tuple(axes[-1:])


def data_size(mesh: Mesh) -> int:
    """Into how many parts a mesh splits the batch."""
    return mesh.shape.get(GROUP, 1) * mesh.shape.get(AXIS, 1)


def along(axes: Sequence[Axis], names: Collection[str]) -> Groups | None:
    """Return the groups of devices, by number, that differ only along some axes; None if they are all one group."""
    if all(axis.name in names for axis in axes if axis.size > 1):
        return None
    numbers = np.arange(math.prod(axis.size for axis in axes)).reshape([axis.size for axis in axes])
    some = [k for k, axis in enumerate(axes) if axis.name in names]
    rows = np.moveaxis(numbers, some, range(-len(some), 0)).reshape(-1, math.prod(axes[k].size for k in some))
    return tuple(tuple(map(int, row)) for row in rows)


def axes_of_groups(groups: Groups | None, axes: Sequence[Axis]) -> tuple[str, ...]:
    """Return the fewest axes along which the devices of each group differ (None: one group of all); () if none do."""
    names, everyone = [axis.name for axis in axes if axis.size > 1], (range(math.prod(axis.size for axis in axes)),)
    for some in (some for n in range(len(names)) for some in itertools.combinations(names, n + 1)):
        rows = list(map(set, along(axes, some) or everyone))
        if all(any(row.issuperset(group) for row in rows) for group in groups or everyone):
            return some
    return ()


def on_each_host(hosts: Sequence[Any]) -> int:
    """Return the number of devices in a row on each host, or 0 if that differs or they are not in a row."""
    each = Counter(hosts)
    size = each[hosts[0]]
    in_a_row = all(hosts[i] == hosts[i - i % size] for i in range(len(hosts)))
    return size if set(each.values()) == {size} and in_a_row else 0


def from_host(shape: Sequence[int], place: Sharding, part: Callable[[Any], np.ndarray]) -> jax.Array:
    """Return a global array, given `part`, which returns a device's slice for its index."""
    # Unlike JAX's own function, this is an explicit transfer, which `jax.transfer_guard("disallow")` allows.
    indices = place.addressable_devices_indices_map(tuple(shape))
    places = [SingleDeviceSharding(device, memory_kind=place.memory_kind) for device in indices]
    parts = jax.device_put([part(index) for index in indices.values()], places)  # may alias host memory
    return jax.make_array_from_single_device_arrays(tuple(shape), place, parts)
