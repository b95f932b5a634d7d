"""The one axis of a job's mesh, and groups of its devices."""

from __future__ import annotations

AXIS = "data"

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
