"""The one promise, on virtual devices: every case of `oracle` on 1, 2, 3, 4 and 8 of them."""

from __future__ import annotations

import os

import jax
import oracle
import pytest
from jax.sharding import Mesh

EVERYTHING = "JAXDIST_FULL" in os.environ
LEVELS = [(level, n) for level in (1, 2, 3) for n in (2, 3, 4, 8)] if EVERYTHING else [(1, 2), (2, 4), (3, 3)]
"""Of ZeRO, and numbers of devices."""


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", list(oracle.CASES))
def test_n_devices_compute_what_one_would(name: str, devices: int) -> None:
    case = oracle.case(name)
    got = oracle.run_decorated(case, mesh=Mesh(jax.devices()[:devices], ("data",)))
    assert oracle.difference(oracle.expected(name), got) <= case.tolerance


@pytest.mark.parametrize(("level", "devices"), LEVELS)
@pytest.mark.parametrize("name", list(oracle.CASES))
def test_in_shards_too(name: str, level: int, devices: int) -> None:
    case = oracle.case(name, level)
    got = oracle.run_decorated(case, mesh=Mesh(jax.devices()[:devices], ("data",)))
    assert oracle.difference(oracle.expected(name), got) <= case.tolerance
