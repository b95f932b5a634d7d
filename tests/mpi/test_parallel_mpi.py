"""Meshes of several axes between processes: idioms, loaders, checkpoints on 2 and 4 ranks, over both communicators."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import idioms
import jobs
import oracle
import pytest
import quick

pytestmark = pytest.mark.slow  # together

ROWS, STEPS = 24, 2  # as in run_parallel.py
SCRIPT = str(Path(__file__).with_name("run_parallel.py"))
NAMES = list(idioms.IDIOMS) if "JAXDIST_FULL" in os.environ else [
    "infonce", "cnn_batchnorm", "moe_expert_choice", "topk_hard_mining", "gradient_accumulation",
    "flax_batchnorm_dropout", "spearman_double_argsort", "transformer_scanned",
]  # fmt: skip
MESHES = {
    2: ["data=1,model=2", "sequence=2", "model=2,data=1"],
    4: ["data=2,model=2", "model=2,data=2", "data=2,sequence=2", "model=2,sequence=2"],
}


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device computes in each case, in a file."""
    path = tmp_path_factory.mktemp("meshes") / "expected.pickle"
    with quick.compilation():
        found = {name: oracle.leaves(oracle.run_plain(oracle.idiom(name, ROWS), STEPS, ROWS)) for name in NAMES}
    path.write_bytes(pickle.dumps(found))
    return str(path)


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_n_processes_compute_what_one_would(ranks: int, communicator: str, expected: str, tmp_path: Path) -> None:
    turn = ranks // 2 + (communicator == "mpi")
    meshes = MESHES[ranks]
    cases: dict[str, list[str]] = {mesh: [] for mesh in meshes}
    for i, name in enumerate(NAMES):
        cases[meshes[(i + turn) % len(meshes)]].append(f"{name}={(i // 2 + turn) % 4}")
    words = [f"{mesh}:{'+'.join(names)}" for mesh, names in cases.items()]
    result = jobs.mpirun(ranks, [SCRIPT, communicator, expected, str(tmp_path), *words], timeout=540)
    assert result.returncode == 0, result.output
    found = re.search(r"^.*REPORT (.*)$", result.stdout, re.MULTILINE)
    assert found, result.output
    report = json.loads(found[1])
    assert (report["communicator"], report["size"]) == (communicator, ranks)
    assert len(report["gaps"]) == len(NAMES) + len(meshes)
    assert {name: gap for name, gap in report["gaps"].items() if not gap <= 1e-10} == {}


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_places_and_ranks_that_differ(communicator: str) -> None:
    script = str(Path(__file__).with_name("run_places.py"))
    result = jobs.mpirun(4, [script, communicator], timeout=300)
    assert result.returncode == 0, result.output
    assert result.stdout.count("END") == 4, result.output
    assert result.stdout.count("PRINTED") == 4 + 6, result.output  # by each rank without jaxdist, and once a call
    assert "Gloo" not in result.stdout
