"""Each operation of `operations_of_a_batch` on several devices is that on one, whether or not these divide the batch.

Those that move dimensions or reduce on a number of devices that divides the batch and on one that does not, the others
on one or the other; which one, by turns. With JAXDIST_FULL set, all on all.
"""

from __future__ import annotations

import itertools
import os

import parity
import pytest
from operations_of_a_batch import OPERATIONS, batch, state

EVEN = [(2, 8), (3, 6), (4, 8), (8, 8), (8, 16)]
ODD = [(2, 7), (3, 7), (4, 5), (8, 13), (8, 5), (4, 9)]
"""Devices, examples."""
BOTH = ("shape", "reduce")
CASES = (
    list(itertools.product(OPERATIONS, EVEN + ODD))
    if "JAXDIST_FULL" in os.environ
    else [
        (name, ways[i % len(ways)])
        for i, name in enumerate(OPERATIONS)
        for k, ways in enumerate((EVEN, ODD))
        if name.startswith(BOTH) or k == bool(i % 3)
    ]
)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_as_on_one_device(name: str, way: tuple[int, int]) -> None:
    devices, rows = way
    parity.check(OPERATIONS[name], state(), batch(rows), devices=devices)
