"""The one promise, on virtual devices: every case of `oracle` on 1, 2, 3, 4 and 8 of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

import oracle


@functools.cache
def _case(name: str) -> oracle.Case:
    return oracle.CASES[name]()


@functools.cache
def _expected(name: str) -> Any:
    return oracle.run_plain(_case(name))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", list(oracle.CASES))
def test_n_devices_compute_what_one_would(name: str, devices: int) -> None:
    case = _case(name)
    mesh = Mesh(jax.devices()[:devices], ("data",))
    got = oracle.run_decorated(case, mesh=mesh)
    assert oracle.difference(_expected(name), got) <= case.tolerance
