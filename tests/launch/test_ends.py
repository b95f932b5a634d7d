"""How a job of `jaxdist run` ends, by exit code and signals, and starts again, from its last checkpoint."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import training
from harness.errors import missing
from harness.listening import listening
from harness.started import Jaxdist, started

RANK = Path(__file__).parent / "scripts" / "rank.py"
FAULTS = RANK.parents[2] / "jobs" / "scripts" / "faults.py"
TRAINING = training.__file__
MPI = pytest.mark.mpi
WaitGone = Callable[[str, float], list[int]]


def lines(job: subprocess.Popen[str], count: int) -> list[str]:
    assert job.stdout is not None
    return [job.stdout.readline() for _ in range(count)]


@pytest.mark.parametrize(
    ("launcher", "what", "codes", "tokens"),
    [
        pytest.param("env", "fails", [7], ["rank 1", "exit code 7"], id="env fails"),
        pytest.param(
            "mpirun", "fails", [7], ["rank 1", "exit code 7"], marks=[MPI, pytest.mark.slow], id="mpirun fails"
        ),
        pytest.param("env", "is killed", [137], ["rank 1", "137"], id="env is killed"),
        pytest.param("mpirun", "is killed", [137, 9], [], marks=MPI, id="mpirun is killed"),  # MPICH says 9
        pytest.param("env", "leaves one", [0], [], id="leaves a process"),
        pytest.param("mpirun", "leaves one", [0], [], marks=MPI, id="mpirun leaves a process"),
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
    assert missing(tokens, "".join(done.stderr.splitlines()[-1:])) == []  # its last line says why
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


@pytest.mark.parametrize(
    ("launcher", "fault", "tokens"),
    [
        ("env", "raises", ("rank 1", "ValueError: boom on purpose", "faults.py:")),
        pytest.param("mpirun", "raises", ("rank 1", "ValueError: boom on purpose", "faults.py:"), marks=MPI),
        pytest.param("env", "operation", ("rank 0", "rank 1", "sin", "tanh", "faults.py:"), marks=pytest.mark.slow),
        ("env", "unshards_on_the_root", ("rank 0", "rank 1", "'jaxdist.unshard'", "'inner'", "faults.py:")),
    ],
    indirect=["launcher"],
)
def test_the_last_line_of_a_failed_job_says_why(
    jaxdist: Jaxdist, launcher: str, fault: str, tokens: tuple[str, ...]
) -> None:
    done = jaxdist("run", "-n", 2, "--launcher", launcher, FAULTS, fault, env={"JAXDIST_TIMEOUT": "30"})
    assert done.returncode == 1, done.stderr
    assert missing(tokens, done.stderr.splitlines()[-1]) == [], done.stderr
    assert "prterun" not in done.stderr


def test_the_last_line_has_the_line_of_the_script_if_all_is_read_at_once(jaxdist: Jaxdist, tmp_path: Path) -> None:
    script, what = tmp_path / "both.py", "ValueError: the ranks make different calls"
    text = f"[jaxdist rank 0] {what}\n[jaxdist rank 0] rank 0 (vm, pid 1) failed: {what} (a.py:7)\n"
    script.write_text(f"import os, sys\nos.write(2, {text.encode()!r})\nsys.exit(1)\n")
    done = jaxdist("run", "-n", 2, "--launcher", "env", script)
    assert done.stderr.splitlines()[-1].endswith(f"failed: {what} (a.py:7)"), done.stderr


@MPI
@pytest.mark.slow
def test_a_rank_that_is_killed_while_mpirun_is_stopped_ends_the_job(jaxdist: Jaxdist) -> None:
    done = jaxdist("run", "-n", 2, "--launcher", "mpirun", FAULTS, "dies_below_one_that_is_stopped", timeout=60)
    assert done.returncode not in (0, None)
    assert missing(("rank 1", "died"), done.stderr.splitlines()[-1]) == [], done.stderr


@MPI
@pytest.mark.slow
@pytest.mark.usefixtures("mpirun_there")
def test_a_stranger_on_its_ports_stops_mpirun_and_not_the_job() -> None:
    with started("-n", 2, "--launcher", "mpirun", RANK, "ends", stderr=subprocess.PIPE) as job, ExitStack() as held:
        assert lines(job, 2) == ["ready\n"] * 2
        for child in psutil.Process(job.pid).children():
            for _, port in listening(child.pid):
                held.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(bytes(4))
        assert job.wait(timeout=30) != 0
        assert job.stderr is not None
        assert "mpirun has not noticed" in job.stderr.read()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_rank_sees_the_signal_and_may_finish(sent: signal.Signals, code: int, launcher: str, tmp_path: Path) -> None:
    """Also one that takes longer than another which ends with a code. What it prints is kept."""
    with started("-n", 2, "--launcher", launcher, RANK, "saves", cwd=tmp_path) as job:
        assert lines(job, 2) == ["ready\n"] * 2
        job.send_signal(sent)
        assert job.wait(timeout=30) == code
        assert lines(job, 1) == ["saved\n"]  # of rank 0; mpirun may lose what comes later
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


def found(output: str) -> dict[str, Any]:
    line = re.search(r"FOUND (.*)", output)
    assert line, output
    return json.loads(line[1])


def restarts(errors: str) -> list[tuple[int, ...]]:
    """(which, of how many, with so many ranks), as is said."""
    return [tuple(map(int, said)) for said in re.findall(r"restart (\d+) of (\d+), with (\d+) rank", errors)]


@pytest.mark.parametrize(("most", "tries"), [(2, 3), pytest.param(20, 6, marks=pytest.mark.slow)])
def test_no_more_than_asked_for_nor_if_it_fails_at_once_again_and_again(
    jaxdist: Jaxdist, most: int, tries: int
) -> None:
    done = jaxdist("run", "--launcher", "env", "--max-restarts", most, RANK, "tries", timeout=120)
    assert done.returncode == 3
    assert re.findall(r"TRY (\d)", done.stdout) == [str(i) for i in range(tries)]
    assert restarts(done.stderr) == [(i, most, 1) for i in range(1, tries)]
    assert ("of --max-restarts 20" in done.stderr) == (most == 20)


@pytest.mark.slow
def test_with_fewer_ranks_and_with_all_again(jaxdist: Jaxdist) -> None:
    run = ["run", "-n", 2, "--launcher", "env", "--max-restarts", 2, "--elastic"]
    assert restarts(jaxdist(*run, RANK, "tries").stderr) == [(1, 2, 1), (2, 2, 2)]


def test_not_again_after_the_user_has_ended_it() -> None:
    with started("--launcher", "env", "--max-restarts", 3, RANK, "waits") as job:
        assert lines(job, 1) == ["ready\n"]
        job.send_signal(signal.SIGINT)
        assert job.communicate(timeout=60)[0] == ""
    assert job.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "run", "more", "steps", "die_at", "said"),
    [
        pytest.param("mpirun", ["-n", 2], ["--max-restarts", 1], 12, [7], [(1, 1, 2)], marks=MPI, id="mpirun"),
        # 4 lanes: alone; and on 4 ranks, without the one that is killed on 2, after another kill on 4 again.
        pytest.param("env", ["--lanes", 4], ["-n", 4, "--max-restarts", 2, "--elastic"], 17, [7, 12],
                     [(1, 2, 2), (2, 2, 4)], id="lanes"),
    ],
    indirect=["launcher"],
)  # fmt: skip
def test_a_killed_rank_costs_not_a_bit(
    jaxdist: Jaxdist, tmp_path: Path, launcher: str, run: Any, more: Any, steps: int, die_at: list[int], said: Any
) -> None:
    run = ["run", "--launcher", launcher, *run]
    straight = jaxdist(*run, TRAINING, tmp_path / "straight", steps, 3, timeout=180)
    assert straight.returncode == 0, straight.stderr
    args = [TRAINING, tmp_path / "cut", steps, 3, "--die-at", *die_at, "--rank", 1]
    done = jaxdist(*run, *more, *args, timeout=180)
    assert done.returncode == 0, done.stderr
    assert restarts(done.stderr) == said
    assert found(done.stdout)["bits"] == found(straight.stdout)["bits"]
