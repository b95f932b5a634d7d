"""The one promise, on virtual devices: each case of `oracle` on some of 1, 2, 3, 4 and 8 of them.

By turns on one number of devices or another, at one level of ZeRO or another, with a batch that these divide or not;
with JAXDIST_FULL set, in all ways.
"""

from __future__ import annotations

import itertools
import os

import pytest
from harness import oracle, parity, quick

EVERYTHING = "JAXDIST_FULL" in os.environ
NAMES = list(oracle.CASES)
SIZES = [
    (8, oracle.BATCH), (2, oracle.UNEVEN), (3, oracle.BATCH), (4, oracle.BATCH), (8, oracle.UNEVEN), (3, oracle.UNEVEN),
    (1, oracle.BATCH),
]  # fmt: skip
"""Numbers of devices, and examples."""
WAYS = list(itertools.product(SIZES, range(4))) if EVERYTHING else []
CASES = [(name, *way) for name in NAMES for way in WAYS] or [
    (name, SIZES[i % len(SIZES)], (i + 1) % 4) for i, name in enumerate(NAMES)
]
"""With the level: all pairs of a size and a level occur within 28 cases."""


@pytest.mark.parametrize(
    ("name", "size", "level"),
    [pytest.param(*case, marks=[pytest.mark.slow] if i % 3 else []) for i, case in enumerate(CASES)],  # together
)
def test_n_devices_compute_what_one_would(name: str, size: tuple[int, int], level: int) -> None:
    """Each fifth compiled as a user's step is."""
    devices, rows = size
    with quick.compilation(not EVERYTHING and NAMES.index(name) % 5 > 0):
        case = oracle.case(name, level)
        got = oracle.run_decorated(case, rows=rows, mesh=parity.mesh(devices))
        assert oracle.difference(oracle.expected(name, rows), got) <= case.tolerance
