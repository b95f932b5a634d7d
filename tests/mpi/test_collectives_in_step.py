"""Collectives of the user's own inside a step, over both communicators, against `jax.vmap` with a named axis."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_user_collectives(ranks: int, communicator: str) -> None:
    script = str(Path(__file__).with_name("run_collectives.py"))
    result = launch.mpirun(ranks, [script, communicator], timeout=300)
    assert result.returncode == 0, result.output
    assert result.stdout.count(f"OK {communicator} ") == ranks, result.output
