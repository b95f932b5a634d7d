"""The one promise, on virtual devices: every case of `oracle` on 1, 2, 3, 4 and 8 of them."""

from __future__ import annotations

import jax
import oracle
import pytest
from jax.sharding import Mesh


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", list(oracle.CASES))
def test_n_devices_compute_what_one_would(name: str, devices: int) -> None:
    case, expected = oracle.case(name), oracle.expected(name)
    # On one device and on all it is compiled as a user's step is; on the others faster.
    jax.config.update("jax_disable_most_optimizations", devices not in (1, 8))
    try:
        got = oracle.run_decorated(case, mesh=Mesh(jax.devices()[:devices], ("data",)))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert oracle.difference(expected, got) <= case.tolerance
