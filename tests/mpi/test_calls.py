"""Steps as they are called elsewhere, on several ranks (run_calls.py)."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "run_calls.py")


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "communicator", "levels"), [(2, "xla", "0,1,2,3"), (3, "mpi", "1")])
def test_calls_mean_on_several_ranks_what_they_mean_on_one_device(ranks: int, communicator: str, levels: str) -> None:
    result = jobs.mpirun(ranks, [SCRIPT, communicator, levels], timeout=500)
    assert result.returncode == 0, result.output
    assert result.stdout.count("END") == ranks, result.output
