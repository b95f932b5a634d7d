"""The load and the soak in a small form, and what is called flat."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import jobs
import pytest

HERE = Path(__file__).parents[2] / "benchmarks"


def run(folder: Path, *args: str, start: Any = jobs.mpirun) -> dict[str, Any]:
    path = folder / "found.json"
    results = start(2, [str(HERE / "soak.py"), *args, "--json", str(path)])
    for result in [results] if isinstance(results, jobs.Result) else results:
        assert result.returncode == 0, result.output
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.mpi
def test_load(tmp_path: Path) -> None:
    found = run(tmp_path, "load", "--times", "3", "--mib", "0.5")
    assert (found["ranks"], found["times"], found["wrong"]) == (2, 3, 0)


@pytest.mark.slow
def test_cycles_of_training_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    args = ["train", "--cycles", "2", "--save-every", "0", "--checkpoints", str(tmp_path / "checkpoints")]
    first, second = (run(tmp_path, *args, start=jobs.spawn_env) for _ in range(2))
    assert (first["from"], second["from"], second["wrong"]) == (0, 2, 0)
    assert second["loss"] < first["loss"]
    assert [len(samples) for samples in second["samples"]] == [2, 2]
    assert all(memory > 50 and descriptors > 3 for of in second["samples"] for _, memory, descriptors, *_ in of)


def test_what_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    soak = importlib.import_module("soak")
    noise = random.Random(0)
    seconds = [float(i) for i in range(300)]

    def verdict(growth: float, deviation: float) -> str:
        return soak.trend(seconds, [400 + growth * t / 200 + noise.gauss(0, deviation) for t in seconds], 4.0).verdict

    assert verdict(0, 1) == verdict(1, 1) == verdict(-50, 1) == "flat"
    assert verdict(10, 1) == verdict(100, 20) == "grows"
    assert verdict(4, 20) == "not known"
    warm = [400 - 300 * max(0, 1 - t / 50) for t in seconds]  # the first third is left out
    assert soak.trend(seconds, warm, 4.0).growth == pytest.approx(0)
    assert soak.trend(seconds[:50], warm[:50], 4.0) is None

    samples = [[[t, 400 + t, 900.0, 30.0, 40.0, 500 + t] for t in seconds]] * 2
    found = {
        "cycles": 300,
        "saves": 5,
        "minutes": 5.0,
        "ranks": 2,
        "communicator": "mpi",
        "level": 1,
        "wrong": 0,
        "loss": 0.5,
    }
    said = soak.markdown({**found, "samples": samples})
    assert "| 1 | allocated, MiB | 500 | +199.00 ± 0.00 | +3600.0 ± 0.0 | grows |" in said
    assert said.count("| flat |") == 6
    assert said.endswith("Resident memory of each rank, MiB: 600 to 799, 600 to 799.")
