"""`jaxdist run`: what ranks are given, what is shown, and how a job ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.launch.hosts import Host
from jaxdist.launch.mpi import AbortNotice, Mpirun, split_tag
from jaxdist.launch.program import program_command

pytestmark = pytest.mark.slow  # together

CLI = [sys.executable, "-m", "jaxdist"]

RANK = """
import json, os, signal, subprocess, sys, time
names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(RANK + textwrap.dedent(body))
        return path

    return write


def test_env_ranks_get_what_torchrun_would_set(jaxdist, script, tmp_path):
    path = script("open(f'{rank}.json', 'w').write(json.dumps(dict(os.environ)))")
    done = jaxdist("run", "-n", 3, "--launcher", "env", path)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, env in enumerate(seen):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(env["MASTER_PORT"]) < 65536
        assert env["JAXDIST_CONNECTOR"] == "env://"
    assert len({env["MASTER_PORT"] for env in seen}) == 1
    assert len({env["JAXDIST_SECRET"] for env in seen}) == 1
    assert len(seen[0]["JAXDIST_SECRET"]) >= 32


def test_what_ranks_are_given(jaxdist, script, launcher, monkeypatch):
    """Their share of the cores, one order of sets, a communicator, and all options after the script.

    A published step (numpyro's SVI) loops over a set of strings: each rank traced another program.
    """
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    path = script("""
        names = ("PJRT_NPROC", "OMP_NUM_THREADS", "JAXDIST_COMMUNICATOR")
        print(json.dumps([[os.environ[name] for name in names], [*{f"site {k}" for k in range(20)}], sys.argv[1:]]))
        """)
    ranks = 2 * len(os.sched_getaffinity(0))
    args = ["-n", "7", "--prefix", "--only-rank", "9", "--", "-m", "a b"]
    done = jaxdist("run", "-n", ranks, "--launcher", launcher, "--communicator", "xla", path, *args)
    lines = done.stdout.splitlines()
    assert lines == lines[:1] * ranks, done.stderr
    settings, _, given = json.loads(lines[0])
    assert settings == ["1", "5", "xla"]  # the user's 5 stays
    assert given == args


def test_a_module_of_a_package(jaxdist, tmp_path, launcher):
    """As under `python -m`: relative imports, this folder first on the path, the module's own options."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("name = 'a model'\n")
    (package / "train.py").write_text(
        "import sys\nfrom .model import name\nprint(__name__, __package__, name, sys.argv[1:], sys.path[0])\n"
    )
    (package / "__main__.py").write_text("from . import train\n")
    if launcher == "mpirun":
        options = ["-n", "3", "--prefix", "-m", "x", "--", "--lr=0.1"]
        done = jaxdist("run", "-n", 2, "--launcher", launcher, "-m", "package.train", *options)
        assert done.stdout == f"__main__ package a model {options} {tmp_path}\n" * 2, done.stderr
    else:
        done = jaxdist("run", "-n2", "--launcher", launcher, "--prefix", "-m", "package", "a")
        expected = f"package.train package a model ['a'] {tmp_path}"
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)], done.stderr


def test_executable(jaxdist):
    done = jaxdist("run", "-n", 2, "--launcher", "env", "echo", "hello", "-n")
    assert done.stdout == "hello -n\n" * 2, done.stderr


def test_python_is_the_one_of_this_environment():
    assert program_command(["python", "-c", "1"])[0] == sys.executable


def test_prefix_and_the_users_own_order_of_sets(jaxdist, script, launcher, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    path = script("print('out', os.environ['PYTHONHASHSEED']); print('err', file=sys.stderr)")
    done = jaxdist("run", "-n", 2, "--launcher", launcher, "--prefix", path)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] out 7", "[1] out 7"]
    first, *errors = done.stderr.splitlines()
    how = "without mpirun" if launcher == "env" else "through mpirun"
    assert first.startswith(f"jaxdist: 2 ranks on 1 host, {how}")
    assert sorted(errors) == ["[0] err", "[1] err"]


def test_output_without_a_last_newline_is_not_lost(jaxdist, launcher):
    done = jaxdist("run", "--launcher", launcher, "--prefix", "printf", "no newline")
    assert done.stdout == "[0] no newline\n", done.stderr


def test_only_rank(jaxdist, script, launcher):
    path = script("print('out', rank); print('err', rank, file=sys.stderr)")
    done = jaxdist("run", "-n", 2, "--launcher", launcher, "--only-rank", 1, path)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[1:]) == (0, "out 1\n", ["err 1"])


def test_lines_of_ranks_do_not_mix(jaxdist, script, monkeypatch):
    """Unbuffered, print() writes each argument, space and newline by itself."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    path = script("for i in range(300): print('rank', rank, 'of', 3, 'line', i)")
    done = jaxdist("run", "-n", 3, "--launcher", "env", path)
    assert sorted(done.stdout.splitlines()) == sorted(f"rank {r} of 3 line {i}" for r in range(3) for i in range(300))


def started(*args: object, **how: Any) -> "subprocess.Popen[Any]":
    """A `jaxdist run` that goes on, with its output in a pipe, or as is said."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True} | how
    return subprocess.Popen([*CLI, "run", *map(str, args)], **how)


def lines(job: "subprocess.Popen[str]", count: int) -> list[str]:
    assert job.stdout is not None
    return [job.stdout.readline() for _ in range(count)]


def test_a_progress_bar_is_seen_before_its_line_ends(script):
    path = script("sys.stderr.write('\\r10%\\r20%'); sys.stderr.flush(); time.sleep(60)")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": False}
    with started("--launcher", "env", "--prefix", path, **streams) as job:
        assert job.stderr is not None
        assert job.stderr.read(13) == b"[0] \r[0] 10%\r"
        job.terminate()


def test_a_slow_reader_gets_the_last_line_too(script):
    # More than one pipe holds and less than two: the rank has ended and half of its output waits in its pipe.
    path = script("print(('x' * 99 + '\\n') * 900, end='')")
    with started("--launcher", "env", "--prefix", path) as job:
        time.sleep(2.5)  # a rank's silence is waited for 1 s
        assert job.stdout is not None
        assert len(job.stdout.readlines()) == 900
        assert job.wait(timeout=10) == 0


FAILS = """
if rank == 1:
    time.sleep(0.5)
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: None)  # as if stuck in a collective
while True:
    time.sleep(60)
"""
IS_KILLED = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
LEAVES_ONE = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
"""


MPI = pytest.mark.mpi


@pytest.mark.parametrize(
    ("launcher", "body", "codes", "said"),
    [
        ("env", FAILS, [7], "rank 1 failed with exit code 7; ending the other 1"),
        pytest.param("mpirun", FAILS, [7], "", marks=MPI),
        ("env", IS_KILLED, [137], ""),
        pytest.param("mpirun", IS_KILLED, [137, 9], "", marks=MPI),  # MPICH says 9
        ("env", LEAVES_ONE, [0], ""),
    ],
    indirect=["launcher"],
    ids=["env fails", "mpirun fails", "env is killed", "mpirun is killed", "leaves a process"],
)
def test_the_first_failing_exit_code_is_the_jobs_and_nothing_is_left(
    jaxdist, script, launcher, wait_gone, body: str, codes: list[int], said: str
):
    mark = f"mark-{os.getpid()}-{codes[0]}-{launcher}"
    begin = time.monotonic()
    done = jaxdist("run", "-n", 2, "--launcher", launcher, script(body), mark)
    assert done.returncode in codes, done.stderr
    assert said in done.stderr
    # Ranks that ignore SIGTERM: 2 s of grace here, 1 s at mpirun, 0.5 s of the script itself.
    assert time.monotonic() - begin < 10
    assert wait_gone(mark, 1) == []


FLOOD = """
import threading
threading.Thread(target=lambda: (time.sleep(300), os._exit(0)), daemon=True).start()
open(f"{sys.argv[1]}-{rank}", "w").write(str(os.getpid()))
while True:
    if rank == 0:
        print("progress " * 10, file=sys.stderr, flush=True)
    else:
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("launcher", "how"),
    [("env", "killed"), ("env", "INT twice"), pytest.param("mpirun", "INT", marks=MPI)],
    indirect=["launcher"],
)
def test_output_that_nobody_reads_keeps_no_job(script, tmp_path, launcher, wait_gone, how: str):
    """A paused `less`, Ctrl-S, a stuck `tee`."""
    mark = f"mark-{os.getpid()}-unread-{launcher}-{how[-3:]}"
    path = script(FLOOD)
    reading, writing = os.pipe()
    streams: Any = {"stdout": writing, "stderr": writing, "cwd": tmp_path, "preexec_fn": _hear_ctrl_c}
    with started("-n", 2, "--launcher", launcher, path, mark, **streams) as job:
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


def _hear_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_next_job_removes_what_a_killed_one_left(script, tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with started("--launcher", "env", script("print('ready', flush=True); time.sleep(60)")) as job:
        assert lines(job, 1) == ["ready\n"]
        job.kill()
    assert len(list(temporary.glob("jaxdist-run-*"))) == 1
    subprocess.run([*CLI, "run", "--launcher", "env", "echo"], timeout=60, check=True)
    assert list(temporary.glob("jaxdist-run-*")) == []


def test_the_notice_of_an_abort_is_left_out_once_the_cause_is_there():
    block = [
        b"-" * 74 + b"\n", b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n",
        b"  Proc: [[17267,1],1]\n", b"  Errorcode: 1\n", b"\n",
        b"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n",
        b"You may or may not see output from other processes, depending on\n",
        b"exactly when Open MPI kills them.\n", b"-" * 74 + b"\n",
        b"prterun has exited due to process rank 1 with PID 0 on node vm calling\n",
        b'"abort". This may have caused other processes in the application to be\n',
        b"terminated by signals sent by prterun (as reported here).\n", b"\0\n",
    ]  # fmt: skip
    cause = [b"[jaxdist rank 1] ValueError: boom\n", b"[jaxdist rank 0] rank 1 (vm, pid 7) failed: ValueError: boom\n"]
    killed = b"prterun noticed that process rank 1 with PID 7 on node vm exited on\n"
    notice = AbortNotice()
    assert [line for line in block if notice.is_in(line)] == []  # the script's own MPI_Abort: nothing else says it
    assert [line for line in [*cause, *block, killed] if not notice.is_in(line)] == [*cause, killed]
    ended = [
        b"prterun detected that one or more processes exited with non-zero status,\n",
        b"thus causing the job to be terminated. The first process to do so was:\n", b"\n",
        b"   Process name: [prterun-vm-17271@1,1]\n", b"   Exit code:    3\n",
    ]  # fmt: skip
    assert [line for line in ended if notice.is_in(line)] == ended  # often not the one that failed
    assert not any(AbortNotice().is_in(line) for line in ended if line.strip())


@pytest.mark.mpi
def test_open_mpi_keeps_its_files_in_a_directory_of_the_job(jaxdist, script, tmp_path, mpirun_there):
    """Or a killed job leaves /tmp/ompi.PID, and the next mpirun of that number can't start."""
    path = script("""
        folder = os.environ.get("PMIX_SERVER_TMPDIR")
        with open("seen.json", "w") as file:
            json.dump([folder, folder and os.path.isdir(folder)], file)
        os.kill(os.getppid(), signal.SIGKILL)  # mpirun, which cannot clean up
        time.sleep(60)
        """)
    done = jaxdist("run", "-n", 1, "--launcher", "mpirun", path)
    assert done.returncode != 0
    folder, existed = json.loads((tmp_path / "seen.json").read_text())
    if folder is None:
        pytest.skip("mpirun IS NOT OPEN MPI 5: where it keeps its files is not tested")
    assert existed
    assert Path(folder).parent.name.startswith("jaxdist-")
    assert not Path(folder).parent.exists()


def test_ctrl_c_while_the_command_is_imported_is_one_line(tmp_path):
    (tmp_path / "typer.py").write_text("import time\nprint('READY', flush=True)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "jaxdist", "run", "train.py"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env=environment, text=True) as process:
        assert lines(process, 1) == ["READY\n"]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "jaxdist: interrupted\n")
    assert process.returncode == 130


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
def test_signals_end_the_job_without_orphans(script, launcher, wait_gone, number: signal.Signals, code: int):
    mark = f"mark-{os.getpid()}-{number.name}-{launcher}"
    path = script("print('ready', flush=True); time.sleep(60)")
    with started("-n", 2, "--launcher", launcher, path, mark) as job:
        assert lines(job, 2) == ["ready\n"] * 2
        job.send_signal(number)
        assert job.wait(timeout=10) == code
    assert wait_gone(mark, 5) == []


def test_a_rank_sees_the_signal_and_may_finish(script, tmp_path):
    path = script("""
        def save(*_):
            open(f"saved-{rank}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(60)
        """)
    with started("-n", 2, "--launcher", "env", path, cwd=tmp_path) as job:
        assert lines(job, 2) == ["ready\n"] * 2
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=10) == 143
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nosuch.py"], "no such script: nosuch.py"),
        (["no-such-command"], "no such command: no-such-command"),
        (["-m"], "nothing to start"),
        (["-m", "nosuch.module"], "no such module: nosuch.module (looked in"),
        (["-m", "train.py"], "for a script leave out -m"),
        (["-n", "0", "echo"], "Invalid value for '-n'"),
        (["-n", "2", "--only-rank", "2", "echo"], "--only-rank 2 is not one of the 2 ranks"),
        (["--communicator", "smoke", "echo"], "Invalid value for '--communicator'"),
        (["--launcher", "env", "--communicator", "mpi", "echo"], "know nothing of MPI"),
        (["-n", "3", "--hosts", "a:1,b:1", "echo"], "-n 3, but the hosts have 2 slots (a:1, b:1)"),
        (["--only-rank", "2", "--hosts", "a:1,b:1", "echo"], "--only-rank 2 is not one of the 2 ranks"),
        (["--hosts", "a:1,a:1", "echo"], "--hosts, entry 2: a is there twice"),
    ],
)
def test_bad_input(args: list[str], message: str):
    done = CliRunner().invoke(app, ["run", *args])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"[1,2]<stdout>: hello\n", (2, b"hello\n")),
        (b"[1,0]<stderr>:hello\n", (0, b"hello\n")),  # Open MPI 4
        (b"[prterun-host-1@1,13]<stdout>: [7] x\n", (13, b"[7] x\n")),
        (b"[3] hello\n", (3, b"hello\n")),  # MPICH
        (b"prterun detected that\n", (None, b"prterun detected that\n")),
    ],
)
def test_split_tag(line: bytes, expected: tuple[int | None, bytes]):
    assert split_tag(line) == expected


def test_mpirun_command_lines():
    five = Mpirun(Path("/x/mpirun"), "openmpi", "mpirun (Open MPI) 5.0.11")
    four = Mpirun(Path("/x/mpirun"), "openmpi", "mpirun (Open MPI) 4.1.4")
    mpich = Mpirun(Path("/x/mpirun"), "mpich", "MPICH (hydra) 4.0.2")
    program = ["python", "a.py"]
    hosts = [Host("a", 3), Host("b", 1)]
    assert five.command(2, program, tag=True) == [*["/x/mpirun", "-n", "2", "--output", "tag", "python", "a.py"]]
    assert "--tag-output" in four.command(2, program, tag=True)
    assert "-prepend-rank" in mpich.command(2, program, tag=True)
    assert five.command(4, program, hosts=hosts, export=["PJRT_NPROC"]) == [
        *["/x/mpirun", "-n", "4", "--map-by", "slot:oversubscribe", "--host", "a:3,b:1"],
        *["-x", "PJRT_NPROC", "python", "a.py"],
    ]
    assert mpich.command(4, program, hosts=hosts) == [
        *["/x/mpirun", "-n", "4", "-hosts", "a:3,b:1", "python", "a.py"],
    ]
    assert mpich.environment() == {}
    assert "PRTE_MCA_rmaps_default_mapping_policy" in five.environment()
    assert "PRTE_MCA_rmaps_default_mapping_policy" not in five.environment(hosts)
