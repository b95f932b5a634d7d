"""Who passes which rows of a batch, and which of them a device holds."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxdist.mesh import by_rank, parts_of_batch

Device = Any  # of JAX, which has no type for one


@dataclass(frozen=True)
class BatchParts:
    """Which process passes which rows of a batch. There is one part for each place on the data axis of the mesh.

    For example, 8 rows on 8 devices of 4 processes, and the mesh {"data": 2, "model": 4}: the devices along the model
    axis hold the same rows, so two processes pass each part, and both must pass the same:

        part          0                       1
        rows          0 1 2 3                 4 5 6 7
        devices       d0   d1   d2   d3       d4   d5   d6   d7
        processes     0    0    1    1        2    2    3    3

        passed_by is ((0, 1), (2, 3)); here is (0,) on processes 0 and 1, (1,) on processes 2 and 3

    On the mesh {"data": 8}, the same processes pass two parts each: `passed_by` is ((0,), (0,), (1,), (1,), ...), and
    `here` (2, 3) on process 1. One process passes all rows as a single part, whatever the mesh.
    """

    passed_by: tuple[tuple[int, ...], ...]  # for each part, the processes that pass it
    here: tuple[int, ...]  # the parts that this process passes, in order and next to each other

    @classmethod
    def on(cls, mesh: Mesh) -> "BatchParts":
        """The parts of batches that are passed for this mesh."""
        passed_by = parts_of_batch(mesh)
        return cls(passed_by, tuple(by_rank(passed_by).get(jax.process_index(), ())))

    @functools.cached_property
    def count(self) -> int:
        """The number of parts."""
        return len(self.passed_by)

    @functools.cached_property
    def readers(self) -> frozenset[int]:
        """One process for each part: together they pass each row once."""
        return frozenset(ranks[0] for ranks in self.passed_by)

    def rows_of_all(self, rows_here: int) -> int:
        """Return the rows of all processes if the parts are as long as this process's."""
        return rows_here * self.count // max(1, len(self.here))


class DeviceSlice(NamedTuple):
    """The entries of this process's part of a batch that one of its devices holds."""

    device: Device
    entries: tuple[slice, ...] | None  # None: all of them, without a copy


@functools.lru_cache(1024)
def local_slices(
    joined_sharding: NamedSharding, shape: tuple[int, ...], rows_per_part: int, parts_here: tuple[int, ...]
) -> list[DeviceSlice]:
    """Return what each device of this process holds, as slices of the rows that this process passes.

    JAX tells the slice of the whole batch. The parts of this process lie one after the other in what it passes: with
    two rows in each of four parts, of which it passes 2 and 3, the row 6 of the batch is its own row 2.
    """
    slices = list[DeviceSlice]()
    local_shape = (rows_per_part * len(parts_here), *shape[1:])
    for device, index in joined_sharding.addressable_devices_indices_map(shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True)]
        first, end = bounds[0]
        part = first // rows_per_part if rows_per_part else 0
        shift = (parts_here.index(part) - part) * rows_per_part if rows_per_part else 0
        bounds[0] = first + shift, end + shift
        is_whole = bounds == [(0, n) for n in local_shape]
        slices.append(DeviceSlice(device, None if is_whole else tuple(slice(*ends) for ends in bounds)))
    return slices
