"""The axes of a job's mesh, and groups of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AXIS = "data"
"""The name of the axis that splits the batch."""


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh.

    Attributes:
      name: that collectives say.
      size: the number of devices along it.
    """

    name: str
    size: int


def bound(axes: Sequence[Axis]) -> list[tuple[str, int]]:
    """The axes as `jax.make_jaxpr` takes them: ``axis_env``."""
    return [(axis.name, axis.size) for axis in axes]


Groups = tuple[tuple[int, ...], ...]


def within(devices: int, group: int) -> Groups | None:
    """The groups of so many devices in a row; None: all are one.

    Example:
      >>> within(4, 2), across(4, 2), within(4, 0)
      (((0, 1), (2, 3)), ((0, 2), (1, 3)), None)
    """
    return tuple(tuple(range(i, i + group)) for i in range(0, devices, group)) if group else None


def across(devices: int, group: int) -> Groups:
    """The devices that have the same place in their groups."""
    return tuple(tuple(range(i, devices, group)) for i in range(group))


def on_each_host(hosts: Sequence[Any]) -> int:
    """How many devices in a row each host has; 0: not as many on each, or not in a row.

    Args:
      hosts: of each device, in order, the host.

    Example:
      >>> on_each_host(["a", "a", "b", "b"]), on_each_host(["a", "b", "a", "b"]), on_each_host(["a", "a", "b"])
      (2, 0, 0)
    """
    each = Counter(hosts)
    size = each[hosts[0]]
    in_a_row = all(hosts[i] == hosts[i - i % size] for i in range(len(hosts)))
    return size if set(each.values()) == {size} and in_a_row else 0


def in_host(hosts: Sequence[Any]) -> int:
    """`on_each_host`, if there are several hosts of several devices; else 0."""
    size = on_each_host(hosts)
    return size if 1 < size < len(hosts) else 0
