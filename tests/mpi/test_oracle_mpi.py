"""The one promise, between processes: every case of `oracle` on 2 and 3 ranks, over both communicators.

With 3 ranks half of the cases over one, half over the other; with JAXDIST_FULL set, all over both.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import launch
import oracle
import pytest

SCRIPT = str(Path(__file__).with_name("run_oracle.py"))


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device computes in each case, in a file: the ranks need not compute it again."""
    path = tmp_path_factory.mktemp("oracle") / "expected.pickle"
    path.write_bytes(pickle.dumps({name: oracle.expected(name) for name in oracle.CASES}))
    return str(path)


def check(report: dict[str, float], names: list[str]) -> None:
    in_shards = {f"{name} at level {level}" for name, level in oracle.IN_SHARDS.items() if name in names}
    assert set(report) == set(names) | in_shards
    wrong = {name: gap for name, gap in report.items() if gap > oracle.case(name.split(" at ")[0]).tolerance}
    assert not wrong


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_n_processes_compute_what_one_would(ranks: int, communicator: str, expected: str) -> None:
    names = list(oracle.CASES)
    if ranks == 3 and "JAXDIST_FULL" not in os.environ:
        names = names[communicator == "mpi" :: 2]
    result = launch.mpirun(ranks, [SCRIPT, communicator, expected, ",".join(names)], timeout=540)
    assert result.returncode == 0, result.output
    found = re.search(r"^.*REPORT (.*)$", result.stdout, re.MULTILINE)
    assert found, result.output
    report = json.loads(found[1])
    assert (report["communicator"], report["size"]) == (communicator, ranks)
    check(report["gaps"], names)
