"""The one promise, on virtual devices: every case of `oracle` on 1, 2, 3, 4 and 8 of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import oracle
import pytest
import quick
from jax.sharding import Mesh

EVERYTHING = "JAXDIST_FULL" in os.environ
LEVELS = [(level, n) for level in (1, 2, 3) for n in (2, 3, 4, 8)] if EVERYTHING else [(1, 2), (2, 4), (3, 3)]
"""Of ZeRO, and numbers of devices."""


@pytest.fixture
def compiled(devices: int) -> Iterator[None]:
    """On one device and on all it is compiled as a user's step is; on the others faster."""
    with quick.compilation(devices not in (1, 8)):
        yield


def check(case: oracle.Case, expected: list[Any], devices: int) -> None:
    got = oracle.run_decorated(case, mesh=Mesh(jax.devices()[:devices], ("data",)))
    assert oracle.difference(expected, got) <= case.tolerance


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", list(oracle.CASES))
def test_n_devices_compute_what_one_would(name: str, devices: int) -> None:
    check(oracle.case(name), oracle.expected(name), devices)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("level", "devices"), LEVELS)
@pytest.mark.parametrize("name", list(oracle.CASES))
def test_in_shards_too(name: str, level: int, devices: int) -> None:
    check(oracle.case(name, level), oracle.expected(name), devices)
