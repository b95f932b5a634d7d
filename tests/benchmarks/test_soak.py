"""The load and the soak in a small form, and what is called flat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness import jobs

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "soak.py")
sys.path.insert(0, str(Path(SCRIPT).parent))


@pytest.mark.slow
@pytest.mark.mpi
def test_load(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    done = jobs.mpirun(2, [SCRIPT, "load", "--times", "3", "--mib", "0.5", "--json", str(path)])
    assert done.returncode == 0, done.output
    found = json.loads(path.read_text())
    assert (found["ranks"], found["times"], found["wrong"]) == (2, 3, 0)


@pytest.mark.slow
def test_cycles_of_training_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    path, checkpoints = tmp_path / "found.json", tmp_path / "checkpoints"
    args = ["train", "--cycles=2", "--save-every=0", f"--checkpoints={checkpoints}", f"--json={path}"]
    found = []
    for _ in range(2):
        for result in jobs.spawn_env(2, [SCRIPT, *args]):
            assert result.returncode == 0, result.output
        found.append(json.loads(path.read_text()))
    first, second = found
    assert (first["from"], second["from"], second["wrong"]) == (0, 2, 0)
    assert second["loss"] < first["loss"]
    assert [len(samples) for samples in second["samples"]] == [2, 2]
    assert all(memory > 50 and descriptors > 3 for of in second["samples"] for _, memory, descriptors, *_ in of)
