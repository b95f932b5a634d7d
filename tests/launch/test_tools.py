"""`jaxdist info` and `test`: alone, on several ranks, and what they refuse."""

import json
import re
from pathlib import Path

import jax
import pytest
from harness.commands import command
from harness.errors import missing
from harness.started import Jaxdist

from jaxdist import get_context


@pytest.mark.slow
def test_info_alone() -> None:
    code, text = command("info")
    assert (code, missing(("processes: 1", jax.__version__, "jaxlib", "mpirun"), text)) == (0, []), text


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
    fixes = {one["name"]: one["fix"] for one in json.loads(done.stdout)["findings"] if not one["ok"]}
    assert fixes.get("mpi4py"), done.stdout
    assert all(fixes.values())


@pytest.mark.slow
def test_info_of_two_ranks_by_the_root(jaxdist: Jaxdist, launcher: str) -> None:
    done = jaxdist("run", "-n", 2, "--launcher", launcher, "-m", "jaxdist", "info", "--json", timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one object: only the root writes
    assert report["job"]["processes"] == report["job"]["devices"] == 2
    assert report["job"]["connector"] == {"env": "env", "mpirun": "mpi"}[launcher]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]


@pytest.mark.slow
def test_all_is_well_here(jaxdist: Jaxdist) -> None:
    done = jaxdist("test", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = re.findall(r"communicator (\w+): 2 x cpu|ok  ZeRO level (\d)|MPI|mpi is not available", done.stdout)
    assert [level for _, level in seen].count("3") == [name != "" for name, _ in seen].count(True) >= 1, done.stdout
    assert done.stdout.endswith("All is well.\n")


@pytest.mark.slow
def test_all_is_well_with_two_devices_each(jaxdist: Jaxdist) -> None:
    done = jaxdist("test", "--devices", "2", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert missing(("communicator xla: 4 x cpu", "ok  ZeRO level 3", "All is well."), done.stdout) == []


@pytest.mark.slow
def test_your_own_step_is_verified(jaxdist: Jaxdist) -> None:
    script = Path(__file__).parent / "scripts" / "planned.py"
    done = jaxdist("test", f"{script}:make", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert missing(("communicator xla: 2 x cpu", "planned.py:make: equal: "), done.stdout) == []
    assert "no decorated step" not in done.stderr


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    get_context()
    monkeypatch.setattr("jaxdist.cli.selftest._TOLERANCE", -1.0)  # private: none is wrong here
    monkeypatch.setattr("jaxdist.connectors.choose", lambda: "env://")  # private: but this process is alone
    code, said = command("test")
    assert code == 1
    assert said.count("fix ZeRO level") == 4
    assert missing(("expected", "jaxdist info"), said) == []
