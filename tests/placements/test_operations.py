"""Each operation of `operations_of_a_batch` on several devices is that on one, whether or not these divide the batch.

Those that move dimensions or reduce on a number of devices that divides the batch and on one that does not, the others
on one or the other; which one, by turns. Some are in one program: most of the time goes into compiling. With
JAXDIST_FULL set, all on all, each by itself.
"""

from __future__ import annotations

import itertools
import os

import pytest
from catalogue.operations_of_a_batch import OPERATIONS, batch, state
from harness import parity

EVEN = [(2, 8), (3, 6), (4, 8), (8, 8), (8, 16)]
ODD = [(2, 7), (3, 7), (4, 5), (8, 13), (8, 5), (4, 9)]
"""Devices, examples."""
BOTH = ("shape", "reduce")


def cases() -> list[tuple[tuple[int, int], tuple[str, ...]]]:
    """Devices and examples, and operations."""
    if "JAXDIST_FULL" in os.environ:
        return [(way, (name,)) for name, way in itertools.product(OPERATIONS, EVEN + ODD)]
    found: dict[tuple[int, int], list[str]] = {way: [] for way in EVEN + ODD}
    for i, name in enumerate(OPERATIONS):
        for k, ways in enumerate((EVEN, ODD)):
            if name.startswith(BOTH) or k == bool(i % 3):
                found[ways[i % len(ways)]].append(name)
    return [(way, tuple(names[k : k + 12])) for way, names in found.items() for k in range(0, len(names), 12)]


@pytest.mark.parametrize(("way", "names"), cases(), ids=str)
def test_as_on_one_device(way: tuple[int, int], names: tuple[str, ...]) -> None:
    devices, rows = way
    parity.check(lambda w, b: {n: OPERATIONS[n](w, b) for n in names}, state(), batch(rows), devices=devices)
