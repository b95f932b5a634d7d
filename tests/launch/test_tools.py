"""`jaxdist info` and `test`: alone, on several ranks, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from harness.commands import command
from harness.errors import missing
from harness.started import Jaxdist


def test_info_alone() -> None:
    code, text = command("info", "--json")
    assert code == 0, text
    report = json.loads(text)
    assert report["problem"] == ""
    assert report["job"]["processes"] == 1
    assert report["job"]["connector"] == "local"
    assert [rank["rank"] for rank in report["ranks"]] == [0]
    assert report["versions"]["jax"] == jax.__version__
    assert [finding["name"] for finding in report["findings"] if not finding["ok"] and not finding["fix"]] == []
    code, text = command("info")
    assert code == 0
    assert [word for word in ("1 process", jax.__version__, "jaxlib") if word not in text] == []


@pytest.mark.slow
def test_info_of_a_job_that_can_not_start_still_shows_what_is_missing(jaxdist: Jaxdist) -> None:
    done = jaxdist("info", "--json", env={"RANK": "0", "JAXDIST_CONNECTOR": None, "WORLD_SIZE": None})
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert "WORLD_SIZE" in report["problem"]
    assert report["findings"]


def test_info_without_an_mpi_says_how_to_have_one(jaxdist: Jaxdist, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI library')\n")
    done = jaxdist("info", "--json", env={"PYTHONPATH": str(tmp_path), "JAXDIST_CONNECTOR": "local"})
    missing = {one["name"]: one["fix"] for one in json.loads(done.stdout)["findings"] if not one["ok"]}
    assert missing.get("mpi4py"), done.stdout


@pytest.mark.slow
def test_info_of_two_ranks_by_the_root(jaxdist: Jaxdist, launcher: str) -> None:
    done = jaxdist("run", "-n", 2, "--launcher", launcher, "-m", "jaxdist", "info", "--json", timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one object: only the root writes
    assert report["job"]["processes"] == report["job"]["devices"] == 2
    assert report["job"]["connector"] == {"env": "env", "mpirun": "mpi"}[launcher]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in report["ranks"]}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("communicator", ["xla", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_all_is_well_here(jaxdist: Jaxdist, request: pytest.FixtureRequest, communicator: str) -> None:
    if communicator == "mpi":
        request.getfixturevalue("mpirun_there")
        pytest.importorskip("mpi4jax", reason="NO MPI: pip install 'jaxdist[openmpi]'")
    done = jaxdist("test", "--communicator", communicator, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"communicator {communicator}: 2 x cpu" in done.stdout
    assert [f"ZeRO level {level}" in done.stdout for level in range(4)] == [True] * 4


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.cli.selftest._TOLERANCE", -1.0)  # private: none is wrong here
    code, said = command("test", "--as-rank")
    assert code == 1
    assert said.count("wrong") == 4
    assert missing(("ZeRO level 3", "expected", "jaxdist info --json"), said) == []


@pytest.mark.slow
def test_a_communicator_that_is_not_here_is_said_and_fails_where_it_was_asked_for(jaxdist: Jaxdist) -> None:
    asked = jaxdist("test", "--communicator", "xla", "--launcher", "env", "--hosts", "a:1,a:1")
    assert asked.returncode == 1
    assert missing(("communicator xla", "--hosts", "entry 2"), asked.stdout) == []
    assert command("test", "--communicator", "nccl")[0] == 2
