"""State in the host's memory between processes: each moves its own shards, and all compute what one device does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).with_name("run_offload.py"))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "communicator"), [(2, "xla"), (3, "mpi")])
def test_as_on_one_device(ranks: int, communicator: str, tmp_path: Path) -> None:
    result = jobs.mpirun(ranks, [SCRIPT, communicator, str(tmp_path)], timeout=200)
    assert result.returncode == 0, result.output
    assert "is not the same" not in result.output
    found = re.search(r"^.*REPORT (.*)$", result.stdout, re.MULTILINE)
    assert found, result.output
    report = json.loads(found[1])
    assert report["gap"] < 1e-10
    assert report["kinds"] == [["device"]] + [["device", "pinned_host"]] * 4
