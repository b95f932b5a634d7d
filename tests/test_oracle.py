"""The one promise, on virtual devices: each case of `oracle` on some of 1, 2, 3, 4 and 8 of them.

Each by itself and at a level of ZeRO, by turns on one number of devices or another, with a batch that these divide or
not; with JAXDIST_FULL set, in all ways.
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
WAYS = [
    (8, oracle.BATCH),
    (2, oracle.BATCH),
    (3, oracle.UNEVEN),
    (4, oracle.BATCH),
    (8, oracle.UNEVEN),
    (3, oracle.BATCH),
]
"""Numbers of devices, and examples."""


def by_turns(ways: Sequence[Any]) -> list[Any]:
    """Each case with one of the ways, the next with the next; or with all."""
    if EVERYTHING:
        return list(itertools.product(NAMES, ways))
    assert len(ways) % 5, "all cases would have the first one"
    return [(name, ways[i * 5 % len(ways)]) for i, name in enumerate(NAMES)]


def check(name: str, devices: int, rows: int, level: int = 0) -> None:
    case, mesh = oracle.case(name, level), parity.mesh(devices)
    got = oracle.run_decorated(case, rows=rows, mesh=mesh)
    assert oracle.difference(oracle.expected(name, rows), got) <= case.tolerance


@pytest.mark.slow  # together
@pytest.mark.parametrize(("name", "way"), by_turns([*WAYS, (1, oracle.BATCH)]))
def test_n_devices_compute_what_one_would(name: str, way: tuple[int, int]) -> None:
    """Each fourth compiled as a user's step is."""
    with quick.compilation(not EVERYTHING and NAMES.index(name) % 4 > 0):
        check(name, *way)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if i % 3 else [])  # together; some are among the quick tests
        for i, case in enumerate(by_turns([(*way, level) for level in (3, 1, 2) for way in WAYS]))
    ],
)
def test_in_shards_too(name: str, way: tuple[int, int, int]) -> None:
    check(name, *way)
