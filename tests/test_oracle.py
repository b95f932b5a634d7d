"""The one promise, on virtual devices: every case of `oracle` on 1, 2, 3, 4 and 8 of them."""

from __future__ import annotations

import jax
import oracle
import pytest
from jax.sharding import Mesh


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", list(oracle.CASES))
def test_n_devices_compute_what_one_would(name: str, devices: int) -> None:
    case = oracle.case(name)
    got = oracle.run_decorated(case, mesh=Mesh(jax.devices()[:devices], ("data",)))
    assert oracle.difference(oracle.expected(name), got) <= case.tolerance
