"""How a job of `jaxdist run` ends: the exit code, signals, what is left behind, output that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.started import CLI, Jaxdist

RANK = Path(__file__).parent / "scripts" / "rank.py"
MPI = pytest.mark.mpi
WaitGone = Callable[[str, float], list[int]]


def started(*args: object, **how: Any) -> subprocess.Popen[Any]:
    """A `jaxdist run` that goes on, with its output in a pipe, or as is said; it hears Ctrl-C."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "preexec_fn": hear_ctrl_c} | how
    return subprocess.Popen([*CLI, "run", *map(str, args)], **how)


def hear_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def lines(job: subprocess.Popen[str], count: int) -> list[str]:
    assert job.stdout is not None
    return [job.stdout.readline() for _ in range(count)]


@pytest.mark.parametrize(
    ("launcher", "what", "codes", "tokens"),
    [
        pytest.param("env", "fails", [7], ["rank 1", "exit code 7"], id="env fails"),
        pytest.param("mpirun", "fails", [7], [], marks=MPI, id="mpirun fails"),
        pytest.param("env", "is killed", [137], ["rank 1", "137"], id="env is killed"),
        pytest.param("mpirun", "is killed", [137, 9], [], marks=MPI, id="mpirun is killed"),  # MPICH says 9
        pytest.param("env", "leaves one", [0], [], id="leaves a process"),
    ],
    indirect=["launcher"],
)
def test_the_first_failing_exit_code_is_the_jobs_and_nothing_is_left(
    jaxdist: Jaxdist, launcher: str, wait_gone: WaitGone, what: str, codes: list[int], tokens: list[str]
) -> None:
    mark = f"mark-{os.getpid()}-{what[:4]}-{launcher}"
    begin = time.monotonic()
    done = jaxdist("run", "-n", 2, "--launcher", launcher, RANK, what, mark)
    assert done.returncode in codes, done.stderr
    assert [token for token in tokens if token not in done.stderr] == []
    assert time.monotonic() - begin < 30  # although ranks ignore SIGTERM
    assert wait_gone(mark, 1) == []


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        ("env", signal.SIGINT, 130),
        ("env", signal.SIGKILL, -9),
        pytest.param("mpirun", signal.SIGTERM, 143, marks=MPI),
        pytest.param("mpirun", signal.SIGKILL, -9, marks=MPI),
    ],
    indirect=["launcher"],
)
def test_signals_end_the_job_without_orphans(
    launcher: str, wait_gone: WaitGone, number: signal.Signals, code: int
) -> None:
    mark = f"mark-{os.getpid()}-{number.name}-{launcher}"
    with started("-n", 2, "--launcher", launcher, RANK, "waits", mark) as job:
        assert lines(job, 2) == ["ready\n"] * 2
        job.send_signal(number)
        assert job.wait(timeout=30) == code
    assert wait_gone(mark, 5) == []


def test_a_rank_sees_the_signal_and_may_finish(tmp_path: Path) -> None:
    with started("-n", 2, "--launcher", "env", RANK, "saves", cwd=tmp_path) as job:
        assert lines(job, 2) == ["ready\n"] * 2
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 143
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_is_ignored_stays_ignored_here_and_in_the_ranks(name: str) -> None:
    """`nohup jaxdist run ... &`; what a shell's script starts in the background ignores SIGINT."""
    ignored = signal.Signals[name]
    ignoring = {"preexec_fn": lambda: signal.signal(ignored, signal.SIG_IGN)}
    with started("-n", 1, "--launcher", "env", "--prefix", RANK, "ignores", **ignoring) as job:
        assert name in lines(job, 1)[0]
        job.send_signal(ignored)
        time.sleep(0.2)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 143


def test_ctrl_c_while_the_command_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('READY', flush=True)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with started("train.py", stderr=subprocess.PIPE, env=environment) as process:
        assert lines(process, 1) == ["READY\n"]
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
    assert (out, errors.count("\n"), "interrupted" in errors) == ("", 1, True)
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "how"),
    [("env", "killed"), ("env", "INT twice"), pytest.param("mpirun", "INT", marks=MPI)],
    indirect=["launcher"],
)
def test_output_that_nobody_reads_keeps_no_job(tmp_path: Path, launcher: str, wait_gone: WaitGone, how: str) -> None:
    """A paused `less`, Ctrl-S, a stuck `tee`."""
    mark = f"mark-{os.getpid()}-unread-{launcher}-{how[-3:]}"
    reading, writing = os.pipe()
    streams: Any = {"stdout": writing, "stderr": writing, "cwd": tmp_path}
    with started("-n", 2, "--launcher", launcher, RANK, "floods", mark, **streams) as job:
        os.close(writing)
        try:
            begin = time.monotonic()
            while sum(bool(file.read_text()) for file in tmp_path.glob(f"{mark}-*")) < 2:
                assert time.monotonic() < begin + 60
                time.sleep(0.05)
            time.sleep(1.5)  # until all pipes are full
            if how == "killed":
                os.kill(int((tmp_path / f"{mark}-1").read_text()), signal.SIGKILL)
            else:
                job.send_signal(signal.SIGINT)
                if how == "INT twice":
                    time.sleep(0.5)
                    job.send_signal(signal.SIGINT)
            assert job.wait(timeout=30) == (137 if how == "killed" else 130)
            assert wait_gone(mark, 5) == []
        finally:
            job.kill()
            os.close(reading)


def test_the_next_job_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("--launcher", "env", RANK, "waits") as job:
        assert lines(job, 1) == ["ready\n"]
        job.kill()
    assert len(list(tmp_path.glob("jaxdist-run-*"))) == 1
    subprocess.run([sys.executable, "-m", "jaxdist", "run", "--launcher", "env", "echo"], timeout=60, check=True)
    assert list(tmp_path.glob("jaxdist-run-*")) == []
