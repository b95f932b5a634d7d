"""`jaxdist test`: on this installation all is well, and what is not is said."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import jaxdist
from jaxdist.cli import app
from jaxdist.cli.doctor import Finding
from jaxdist.launch.mpi import find_mpirun

selftest: Any = importlib.import_module("jaxdist.cli.selftest")


@pytest.mark.slow
def test_all_is_well_here(jaxdist) -> None:
    there = find_mpirun() is not None and importlib.util.find_spec("mpi4jax") is not None
    communicator = "mpi" if there else "xla"
    done = jaxdist("test", "--communicator", communicator, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All is well." in done.stdout
    assert "outside a step" not in done.stderr  # jaxdist's own alarm about what is not trained together
    assert f"communicator {communicator}: 2 x cpu" in done.stdout
    assert [f"step, ZeRO level {level}" in done.stdout for level in range(4)] == [True] * 4
    assert "GB/s on the bus" in done.stdout


def test_checks_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(selftest._checks(jaxdist.init(), 0.0))
    assert [row.name for row in rows] == ["connector", "software", *(f"step, ZeRO level {i}" for i in range(4))]
    assert all(row.ok for row in rows), rows
    monkeypatch.setattr(selftest, "_TOLERANCE", -1.0)
    wrong = selftest._parity(jaxdist.init(), 0)
    assert not wrong.ok
    assert "expected -1.0" in wrong.seen
    monkeypatch.setattr(selftest, "_checks", lambda ctx, start: iter([wrong]))
    done = CliRunner().invoke(app, ["test", "--as-rank"])
    assert done.exit_code == 1
    assert "report both" in " ".join(done.output.split())


def test_hosts_with_other_software(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [({"jax": "1", "numpy": "2"}, []), ({"jax": "3", "numpy": "2"}, [("/dev/shm", "64 MiB", "mount it")])]
    said = [({**dict.fromkeys(("python", "jaxdist", "jaxlib", "optax", "mpi4jax"), ""), **a}, b) for a, b in said]
    ctx = SimpleNamespace(
        rank=1, is_root=False, root_rank=0, control=SimpleNamespace(exchange=lambda tag, mine: said)
    )  # fmt: skip
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    monkeypatch.setattr(selftest, "findings", list)
    software, shm = selftest._alike(ctx, ["a", "b"])
    assert (software.ok, software.seen) == (False, "b has jax 3, a 1")
    assert (shm.ok, shm.name, shm.seen) == (True, "b, /dev/shm", "64 MiB (mount it)")


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that failed, a communicator that can't be started, one that is not here, a note."""
    jobs: list[Any] = []

    def run(script: Any, ranks: Any, launcher: Any, connector: Any, communicator: Any, **hosts: Any) -> None:
        jobs.append((str(launcher), str(communicator), ranks, hosts))
        if communicator == "mpi":
            raise typer.BadParameter("other MPIs; to load its library: export MPI4PY_LIBMPI=x")
        raise typer.Exit(code)

    code = 0
    notes: list[Finding] = []
    monkeypatch.setattr(selftest, "run", run)
    monkeypatch.setattr(selftest, "findings", lambda: notes)
    monkeypatch.setattr(selftest, "_not_there", lambda: "no mpi4jax. To have it: pip install it")

    def said(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["test", *arguments])
        return done.exit_code, " ".join(done.output.split())

    exit_code, output = said()
    assert exit_code == 0
    assert "communicator mpi is not here: no mpi4jax. To have it: pip install it" in output
    assert "All is well." in output
    exit_code, output = said("--communicator", "mpi", "--hosts", "a:1,b:1", "--launcher", "env")
    assert exit_code == 1
    assert "wrong communicator mpi: other MPIs; to load its library: export MPI4PY_LIBMPI=x" in output
    code, notes = 7, [Finding("/dev/shm", False, "64 MiB", "mount it"), Finding("GPU", False, "no plugin", "pip it")]
    exit_code, output = said("-n", "3")
    assert exit_code == 1
    assert "wrong communicator xla: exit code 7, see above" in output
    assert "note /dev/shm: 64 MiB mount it" in output
    assert "pip it" in output
    assert jobs[1:] == [
        ("env", "mpi", None, {"hosts": "a:1,b:1", "hostfile": None}),
        ("env", "xla", 3, {"hosts": None, "hostfile": None}),
    ]
    assert said("--communicator", "nccl")[0] == 2
