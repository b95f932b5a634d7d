"""The one promise, on virtual devices: each case of `oracle` on some of 1, 2, 3, 4 and 8 of them.

Each on 8, on another number, at a level of ZeRO and with a batch that the devices don't divide, by turns one way of
these or the other; with JAXDIST_FULL set, all ways.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import oracle
import parity
import pytest
import quick

EVERYTHING = "JAXDIST_FULL" in os.environ
NAMES = list(oracle.CASES)
LEVELS = list(itertools.product((1, 2, 3), (2, 3, 4, 8)))
"""Of ZeRO, and numbers of devices."""


def by_turns(ways: Sequence[Any]) -> list[Any]:
    """Each case with one of the ways, the next with the next; or with all."""
    if EVERYTHING:
        return list(itertools.product(NAMES, ways))
    assert len(ways) % 5, "all cases would have the first one"
    return [(name, ways[i * 5 % len(ways)]) for i, name in enumerate(NAMES)]


def check(name: str, devices: int, level: int = 0, rows: int = oracle.BATCH) -> None:
    case, mesh = oracle.case(name, level), parity.mesh(devices)
    got = oracle.run_decorated(case, rows=rows, mesh=mesh)
    assert oracle.difference(oracle.expected(name, rows), got) <= case.tolerance


@pytest.mark.slow  # together
@pytest.mark.parametrize("name", NAMES)
def test_n_devices_compute_what_one_would(name: str) -> None:
    """Each fourth compiled as a user's step is."""
    with quick.compilation(not EVERYTHING and NAMES.index(name) % 4 > 0):
        check(name, 8)


@pytest.mark.slow  # together
@pytest.mark.parametrize(("name", "devices"), by_turns([1, 2, 3, 4]))
def test_on_other_numbers_of_them(name: str, devices: int) -> None:
    check(name, devices)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), by_turns(LEVELS))
def test_in_shards_too(name: str, way: tuple[int, int]) -> None:
    level, devices = way
    check(name, devices, level)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if i % 3 else [])  # together; some are among the quick tests
        for i, case in enumerate(by_turns([(0, 8), (3, 3), (0, 3), (1, 8), (2, 8), (1, 3)]))
    ],
)
def test_with_batches_that_they_do_not_divide(name: str, way: tuple[int, int]) -> None:
    level, devices = way
    check(name, devices, level, oracle.UNEVEN)
