"""A map of the devices of a mesh: the process and host of each, and its part of a batch."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxdist.mesh import AXIS, data_size, in_a_row

Device = Any  # of JAX, which has no type for one


class Share(NamedTuple):
    """The parts of each batch that a process passes. They lie next to each other, and all parts are of one size."""

    parts: range
    part_count: int  # of the whole batch, over all processes

    def padded(self, total: int) -> int:
        """Return the rows of a batch of `total` whose parts are all filled up."""
        return -(-total // self.part_count) * self.part_count

    def rows(self, total: int) -> slice:
        """Return the rows that the process passes of a batch of `total`. Parts are equal, or the last ones shorter."""
        each = self.padded(total) // self.part_count
        return slice(min(total, self.parts.start * each), min(total, self.parts.stop * each))

    def size(self, total: int) -> int:
        """Return how many rows the process passes of a batch of `total`."""
        rows = self.rows(total)
        return rows.stop - rows.start


@dataclass(frozen=True)
class DeviceMap:
    """The devices of a mesh, in its order, with the process, the host and the part of a batch of each.

    Meshes, axes and shards are facts about devices; ranks, and data that they pass, compare or write, are facts about
    processes. This turns the former into the latter. For example, on two hosts with two processes of two devices each:

        hosts        a               b
        processes    0       1       2       3
        devices      d0  d1  d2  d3  d4  d5  d6  d7
        parts        0   1   2   3   4   5   6   7     of {"data": 8}
                     0   0   1   1   2   2   3   3     of {"data": 4, "model": 2}
                     0   0   0   0   1   1   1   1     of {"data": 2, "model": 4}

    A part is the rows at one place of the data axis; devices that differ only along other axes hold the same rows. The
    parts of a process's devices are its share, which it passes: process 1 passes parts 2 and 3 on the first mesh, part
    1 on the second, and part 0 on the third, where process 0 must pass the same rows. A single process passes all.
    """

    mesh: Mesh
    hosts: tuple[Hashable, ...]  # of each device; of a TPU its slice

    @classmethod
    def of(cls, mesh: Mesh, hosts: Sequence[Hashable] = ()) -> "DeviceMap":
        """The map of a mesh, given the host of each device. By default each process counts as a host."""
        return _map(in_a_row(mesh), tuple(hosts or (d.process_index for d in mesh.devices.flat)))

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The process of each device."""
        return tuple(d.process_index for d in self.mesh.devices.flat)

    @functools.cached_property
    def parts(self) -> tuple[int, ...]:
        """The part of a batch of each device."""
        places = np.ndindex(self.mesh.devices.shape)
        return tuple(dict(zip(self.mesh.axis_names, place, strict=True)).get(AXIS, 0) for place in places)

    @functools.cached_property
    def process_count(self) -> int:
        """The number of processes with devices of the mesh."""
        return len(set(self.processes))

    @property
    def first_devices(self) -> dict[int, Device]:
        """The first device of each process, which represents it between processes."""
        return dict(zip(reversed(self.processes), reversed(list(self.mesh.devices.flat)), strict=True))

    @property
    def hosts_of_parts(self) -> list[Hashable]:
        """The hosts along the data axis: of the first device of each part."""
        first = dict(zip(reversed(self.parts), reversed(self.hosts), strict=True))
        return [first[part] for part in range(len(first))]

    @functools.cached_property
    def shares(self) -> dict[int, Share]:
        """The share of a batch that each process passes."""
        parts: dict[int, list[int]] = {}
        for part, process in sorted(set(zip(self.parts, self.processes, strict=True))):
            parts.setdefault(process, []).append(part)
        count, different = data_size(self.mesh), set(map(tuple, parts.values()))
        if sum(map(len, different)) > count or len(set(map(len, different))) > 1:
            raise ValueError(
                f"mesh {dict(self.mesh.shape)} on {len(parts)} processes: some have only a part of their examples in "
                f"common. Put {AXIS!r} first in the mesh, or take a size of it that divides the number of processes, "
                "or the other way round"
            )
        if apart := [rank for rank, places in parts.items() if places[-1] - places[0] >= len(places)]:
            raise ValueError(
                f"mesh {dict(self.mesh.shape)}: the devices of rank {apart[0]} are at {parts[apart[0]]} along "
                f"{AXIS!r}, which are not next to each other: build the mesh from the devices in rank order"
            )
        return {rank: Share(range(places[0], places[-1] + 1), count) for rank, places in parts.items()}

    @functools.cached_property
    def sharers(self) -> list[list[int]]:
        """The processes with the same share, for each share in the order of the rows."""
        sharers: dict[Share, list[int]] = {}
        for process, share in self.shares.items():
            sharers.setdefault(share, []).append(process)
        return list(sharers.values())

    def share(self, process: int) -> Share:
        """Return the share of a process: an empty one if none of its devices are in the mesh."""
        return self.shares.get(process, Share(range(0), 1))

    def rows_of_all(self, rows_here: int) -> int:
        """Return the rows of all processes if all shares are as long as this process's."""
        return rows_here * len(self.sharers)


_map = functools.lru_cache(64)(DeviceMap)  # what follows from a map is found once


@functools.lru_cache(1024)
def same_rows_somewhere(device_map: DeviceMap, one: int, other: int) -> bool:
    """Check whether some process passes equally many rows of batches of two different sizes."""
    return one != other and any(share.size(one) == share.size(other) for share in device_map.shares.values())
