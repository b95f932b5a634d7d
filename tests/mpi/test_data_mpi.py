"""`jaxdist.loader` between processes: equal steps, exact means and counts, restarts on other ranks, errors on all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jobs
import pytest

pytestmark = pytest.mark.slow  # together

SCRIPT = str(Path(__file__).with_name("run_data.py"))


def run(ranks: int, communicator: str, state: Path, what: str) -> dict[str, Any]:
    result = jobs.mpirun(ranks, [SCRIPT, communicator, str(state), what], timeout=200)
    assert result.returncode == 0, result.output
    found = re.search(r"^.*REPORT (.*)$", result.stdout, re.MULTILINE)
    assert found, result.output
    return json.loads(found[1])


@pytest.mark.mpi
def test_loader(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    for ranks, communicator, what in [(2, "mpi", "all"), (3, "xla", "all"), (1, "xla", "go")]:
        n = 101 + ranks
        report = run(ranks, communicator, state, what)
        assert (report["size"], report["communicator"]) == (ranks, communicator)
        assert report["same states"]
        if what == "go":
            continue
        assert report["steps"] == dict.fromkeys(("False", "True"), -(-n // (8 * ranks)))
        assert report["dropped"] == n // (8 * ranks)
        assert report["gap"] < 1e-10
        assert report["tail"]["counts"] == [8 * ranks, 2 * ranks - 1]
        assert report["tail"]["gap"] < 1e-10
        assert report[f"evaluated {n}"] == [n, True]
        assert report["evaluated 1"] == [1, True]
        for errors in report["errors"]:
            assert len(errors) == 6
            assert errors[0].startswith("loader, on rank 0: batch_size=0: expected an integer of at least 1")
            assert re.search(
                r"len\(source\) is 24 on rank 0(, 2)?; 23 on rank 1|is 24 on rank 0; 23 on rank 1; 22 on rank 2",
                errors[1],
            )
            assert "the checksum of the first and last example is" in errors[2]
            assert "has 0 examples" in errors[3]
            assert "fewer than one batch of all ranks" in errors[4]
            assert re.search("loader state with different arguments: position is 0 on rank 0; 1 on rank 1", errors[5])
    saved = json.loads(state.read_text())  # 3 steps of 10, 3 of 15, 5 of 5
    assert len(saved["seen"]) == 100
    assert sorted(saved["seen"]) == list(range(100))
    assert saved["state"] == {"epoch": 1, "position": 0, "length": 100, "seed": 0, "shuffle": True}
