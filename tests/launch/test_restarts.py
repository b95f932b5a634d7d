"""`jaxdist run --max-restarts`: a job that starts again, from its last checkpoint."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import training
from harness.started import CLI, Jaxdist

RANK = Path(__file__).parent / "scripts" / "rank.py"
TRAINING = training.__file__


def found(output: str) -> dict[str, Any]:
    line = re.search(r"FOUND (.*)", output)
    assert line, output
    return json.loads(line[1])


def restarts(errors: str) -> list[tuple[int, ...]]:
    """(which, of how many, with so many ranks), as is said."""
    return [tuple(map(int, said)) for said in re.findall(r"restart (\d+) of (\d+), with (\d+) rank", errors)]


def hear_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_no_more_than_asked_for(jaxdist: Jaxdist) -> None:
    done = jaxdist("run", "--launcher", "env", "--max-restarts", 2, RANK, "tries")
    assert done.returncode == 3
    assert re.findall(r"TRY (\d)", done.stdout) == ["0", "1", "2"]
    assert restarts(done.stderr) == [(1, 2, 1), (2, 2, 1)]


def test_with_fewer_ranks_and_with_all_again(jaxdist: Jaxdist) -> None:
    run = ["run", "-n", 2, "--launcher", "env", "--max-restarts", 2, "--shrink"]
    assert restarts(jaxdist(*run, RANK, "tries").stderr) == [(1, 2, 1), (2, 2, 1)]
    assert restarts(jaxdist(*run, "--grow", RANK, "tries").stderr) == [(1, 2, 1), (2, 2, 2)]


def test_not_after_the_user_has_ended_it() -> None:
    command = [*CLI, "run", "--launcher", "env", "--max-restarts", "3", str(RANK), "waits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGINT)
        rest, _ = job.communicate(timeout=60)
    assert (job.returncode, rest) == (130, "")


@pytest.mark.slow
def test_a_job_that_fails_at_once_again_and_again_is_given_up(jaxdist: Jaxdist) -> None:
    done = jaxdist("run", "--launcher", "env", "--max-restarts", 20, RANK, "tries", timeout=120)
    assert done.returncode == 3
    assert re.findall(r"TRY (\d)", done.stdout) == ["0", "1", "2", "3", "4", "5"]
    assert "--max-restarts 20" in done.stderr


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("mpirun_there")
def test_a_killed_rank_costs_not_a_bit(jaxdist: Jaxdist, tmp_path: Path) -> None:
    run = ["run", "-n", 2, "--launcher", "mpirun"]
    straight = jaxdist(*run, TRAINING, tmp_path / "straight", 12, 3, timeout=120)
    assert straight.returncode == 0, straight.stderr
    args = [TRAINING, tmp_path / "cut", 12, 3, "--die-at", 7, "--rank", 1]
    done = jaxdist(*run, "--max-restarts", 1, *args, timeout=180)
    assert done.returncode == 0, done.stderr
    assert restarts(done.stderr) == [(1, 1, 2)]
    assert found(done.stdout)["bits"] == found(straight.stdout)["bits"]


@pytest.mark.slow
def test_with_the_ranks_that_remain(jaxdist: Jaxdist, tmp_path: Path) -> None:
    args = [TRAINING, tmp_path / "cut", 12, 2, "--x64", "--die-at", 7, "--rank", 1]
    done = jaxdist("run", "-n", 2, "--launcher", "env", "--max-restarts", 2, "--shrink", *args, timeout=180)
    assert done.returncode == 0, done.stderr
    assert restarts(done.stderr) == [(1, 2, 1)]
    got = found(done.stdout)
    assert got["devices"] == 1
    alone = training.run(str(tmp_path / "alone"), 12, 0)
    assert max(np.abs(np.subtract(got["params"][k], v)).max() for k, v in alone["params"].items()) <= 1e-10


@pytest.mark.slow
def test_in_lanes_a_killed_rank_costs_not_a_bit_on_fewer_and_on_more_ranks(jaxdist: Jaxdist, tmp_path: Path) -> None:
    """4 lanes: alone; and on 3 ranks, without the one that is killed on 2, after another kill on 3 again."""
    run = ["run", "--lanes", 4, "--launcher", "env"]
    alone = jaxdist(*run, TRAINING, tmp_path / "alone", 17, 3, timeout=180)
    assert alone.returncode == 0, alone.stderr
    args = [TRAINING, tmp_path / "cut", 17, 3, "--die-at", 7, 12, "--rank", 1]
    done = jaxdist(*run, "-n", 3, "--max-restarts", 2, "--shrink", "--grow", *args, timeout=180)
    assert done.returncode == 0, done.stderr
    assert restarts(done.stderr) == [(1, 2, 2), (2, 2, 3)]
    assert found(done.stdout)["bits"] == found(alone.stdout)["bits"]
