"""`parallel(mesh="auto")` between processes: each passes rows of its own, and all choose the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.slow  # together
SCRIPT = str(Path(__file__).with_name("run_auto.py"))


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_ranks_choose_the_same(communicator: str) -> None:
    result = jobs.mpirun(2, [SCRIPT, communicator], timeout=300)
    assert result.returncode == 0, result.output
    found = [json.loads(text) for text in re.findall(r"REPORT (.*)$", result.stdout, re.MULTILINE)]
    assert {one["rank"] for one in found} == {0, 1}, result.output
    for one in found:
        assert one["communicator"] == communicator
        assert one["small"]["mesh"] == {"data": 2 * devices}
        assert one["wide"]["mesh"] == ({"data": 2} if devices == 1 else {"data": 2, "model": devices})
        assert max(one["small"]["gap"], one["wide"]["gap"]) < 1e-10
        assert "on this rank" in one["failed"]
        assert "ValueError" in one["unlike"], one
    assert found[0]["wide"]["why"] == found[1]["wide"]["why"]
