"""`jaxdist run`: what ranks are given, and what is shown of what they write."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.started import Jaxdist, started

SCRIPTS = Path(__file__).parent / "scripts"
RANK = SCRIPTS / "rank.py"


def test_ranks_without_mpirun_get_what_torchrun_would_set(jaxdist: Jaxdist, tmp_path: Path) -> None:
    done = jaxdist("run", "-n", 3, "--launcher", "env", RANK, "environment")
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


def test_their_share_of_cores_one_order_of_sets_a_communicator_and_all_options_after_the_script(
    jaxdist: Jaxdist, launcher: str
) -> None:
    ranks = 2 * len(os.sched_getaffinity(0))
    words = ["-n", "7", "--prefix", "--elastic", "9", "--", "-m", "a b"]
    env = {"PJRT_NPROC": None, "PYTHONHASHSEED": None, "OMP_NUM_THREADS": "5", "JAXDIST_COMMUNICATOR": "xla"}
    run = ["run", "-n", ranks, "--launcher", launcher]
    done = jaxdist(*run, RANK, "given", *words, env=env)
    lines = done.stdout.splitlines()
    assert lines == lines[:1] * ranks, done.stderr
    settings, _, given = json.loads(lines[0])
    assert settings == ["1", "5", "xla"]  # the user's 5 stays
    assert given == words


def test_a_module_of_a_package(jaxdist: Jaxdist, tmp_path: Path, launcher: str) -> None:
    """As under `python -m`: relative imports, this folder first on the path, the module's own options."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("name = 'a model'\n")
    (package / "train.py").write_text(
        "import sys\nfrom .model import name\nprint(__name__, __package__, name, sys.argv[1:], sys.path[0])\n"
    )
    options = ["-n", "3", "--prefix", "-m", "x", "--", "--lr=0.1"]
    done = jaxdist("run", "-n2", "--launcher", launcher, "-m", "package.train", *options)
    assert done.stdout == f"__main__ package a model {options} {tmp_path}\n" * 2, done.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["printf", "%s no newline", "-n"], ["[0] -n no newline", "[1] -n no newline"]),
        (["python", "-c", "import sys; print(sys.executable)"], [f"[{r}] {sys.executable}" for r in range(2)]),
    ],
    ids=["executable", "python"],
)
def test_any_program_of_this_environment(jaxdist: Jaxdist, program: list[str], said: list[str]) -> None:
    done = jaxdist("run", "-n", 2, "--launcher", "env", "--prefix", *program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == said


def test_a_prefix_of_each_line_and_the_users_own_order_of_sets(jaxdist: Jaxdist, launcher: str) -> None:
    env = {"PYTHONHASHSEED": "7"}
    done = jaxdist("run", "-n", 2, "--launcher", launcher, "--prefix", RANK, "words", env=env)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] out 0 7", "[1] out 1 7"]
    first, *errors = done.stderr.splitlines()
    assert first.startswith("jaxdist: 2 ranks on 1 host, ")
    assert sorted(errors) == ["[0] err 0", "[1] err 1"]


def test_lines_of_ranks_do_not_mix(jaxdist: Jaxdist) -> None:
    """Unbuffered, print() writes each argument, space and newline by itself."""
    done = jaxdist("run", "-n", 3, "--launcher", "env", "--prefix", RANK, "lines", env={"PYTHONUNBUFFERED": "1"})
    lines = [f"[{rank}] rank {rank} of 3 line {i}" for rank in range(3) for i in range(300)]
    assert sorted(done.stdout.splitlines()) == sorted(lines)


def test_a_progress_bar_is_seen_before_its_line_ends() -> None:
    with started("--launcher", "env", "--prefix", RANK, "bar", stderr=subprocess.PIPE, text=False) as job:
        assert job.stderr is not None
        assert job.stderr.read(13) == b"[0] \r[0] 10%\r"
        job.terminate()


def test_a_syntax_error_is_said_once(jaxdist: Jaxdist, tmp_path: Path, launcher: str) -> None:
    (tmp_path / "train.py").write_text("x = = 3")
    done = jaxdist("run", "-n", 2, "--launcher", launcher, "train.py")
    assert (done.returncode, done.stderr.count("SyntaxError")) == (1, 1), done.stderr


@pytest.mark.slow
def test_a_slow_reader_gets_long_lines_and_the_last_one() -> None:
    with started("--launcher", "env", RANK, "long") as job:
        time.sleep(1.5)  # a rank's silence is waited for 1 s
        assert job.stdout is not None
        assert job.stdout.readlines() == ["x" * (3 << 20) + "\n", *["y\n"] * 900]
        assert job.wait(timeout=10) == 0


@pytest.mark.parametrize(("program", "code"), [(["echo", "hello"], 120), (["sh", "-c", "echo hello; exit 3"], 3)])
def test_output_that_can_not_be_written_is_told(program: list[str], code: int) -> None:
    """`jaxdist run train.py > log` on a full disk; a job that succeeds does not, then."""
    with Path("/dev/full").open("w") as full:
        job = started("--launcher", "env", "--prefix", *program, stdout=full, stderr=subprocess.PIPE)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == code
    assert "No space left on device" in errors


def test_a_reader_that_has_gone_ends_the_job() -> None:
    """`jaxdist run train.py | head`."""
    with started("--launcher", "env", "--prefix", "yes") as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "[0] y\n"
        job.stdout.close()
        assert job.wait(timeout=30) != 0


@pytest.mark.mpi
@pytest.mark.usefixtures("mpirun_there")
def test_open_mpi_keeps_its_files_in_a_directory_of_the_job(jaxdist: Jaxdist, tmp_path: Path) -> None:
    """Or a killed job leaves /tmp/ompi.PID, and the next mpirun of that number can't start."""
    done = jaxdist("run", "-n", 1, "--launcher", "mpirun", RANK, "kills mpirun")
    assert done.returncode == 137
    assert "mpirun failed with exit code 137" in done.stderr
    folder, existed = json.loads((tmp_path / "seen.json").read_text())
    if folder is None:
        pytest.skip("mpirun IS NOT OPEN MPI 5: where it keeps its files is not tested")
    assert existed
    assert not Path(folder).parent.exists()


@pytest.mark.mpi
def test_open_mpi_without_a_home(jaxdist: Jaxdist) -> None:
    """It does not start, and said so where its version was read."""
    done = jaxdist(
        "run", "-n", 2, "--launcher", "mpirun", RANK, "given", env={"HOME": None, "JAXDIST_COMMUNICATOR": "xla"}
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
    assert "home" not in done.stderr
