"""Collectives inside a step, over both communicators, between processes."""

from __future__ import annotations

import os
from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.slow  # together

SCRIPT = str(Path(__file__).with_name("run_collectives.py"))


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives(ranks: int, communicator: str) -> None:
    parts = {2: ["lax", "nan", "jaxdist"], 3: ["lax", "pieces"], 4: ["jaxdist"]}[ranks]
    result = jobs.mpirun(ranks, [SCRIPT, communicator, *parts], timeout=300)
    assert result.returncode == 0, result.output
    assert result.stdout.count(f"OK {communicator} ") == ranks, result.output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_large_reduce_scatters_are_exact(communicator: str) -> None:
    turns = 200 if "JAXDIST_FULL" in os.environ else 60
    result = jobs.mpirun(2, [SCRIPT, communicator, f"scatter:{turns}"], timeout=300)
    assert result.returncode == 0, result.output
    assert result.stdout.count(f"OK {communicator} {turns}\n") == 2, result.output
