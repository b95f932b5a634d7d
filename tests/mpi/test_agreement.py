"""Ranks that disagree get one error, on every rank, that names what differs; none hangs."""

from __future__ import annotations

import re
from pathlib import Path

import launch
import pytest

SCRIPT = str(Path(__file__).with_name("bad_calls.py"))

MESSAGES = {
    "shape first": r"batch leaf batch\['x'\] is float32\[4,3\] on rank 0(, 2)?; float32\[3,3\] on rank 1",
    "dtype": r"state leaf state\['b'\] is float32\[2\] on rank 0(, 2)?; bfloat16\[2\] on rank 1",
    "tree": r"state leaf state\['extra'\] is absent on rank 0(, 2)?; float32\[3\] on rank 1",
    "state shape": r"state leaf state\['w'\] is float32\[3,2\] on rank 0(, 2)?; float32\[3,5\] on rank 1",
    "empty": r"on rank 1: batch leaf batch\['x'\] is empty",
    "scalar": r"on rank 1: batch leaf batch\['x'\] is a scalar",
    "nan": r"call 2: result\[0\]\['b'\] is not finite",
}


@pytest.mark.mpi
@pytest.mark.parametrize("mode", list(MESSAGES))
def test_every_rank_says_what_differs(mode: str) -> None:
    ranks = 3 if mode == "shape first" else 2
    result = launch.mpirun(ranks, [SCRIPT, mode])
    assert result.returncode != 0
    assert re.search(MESSAGES[mode], result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_an_error_on_all_ranks_can_be_caught_and_loses_nothing(communicator: str) -> None:
    result = launch.mpirun(3, [SCRIPT, "caught", communicator])
    assert result.returncode == 0, result.output
    for rank in range(3):
        assert re.search(
            rf"CAUGHT {rank} .*batch\['x'\] is float32\[4,3\] on rank 0, 2; float32\[3,3\]",
            result.stdout,
        )
    losses = re.findall(r"OK \d (\S+)", result.stdout)
    assert len(losses) == 3
    assert len(set(losses)) == 1


@pytest.mark.mpi
def test_an_error_of_one_rank_alone_is_everyones() -> None:
    result = launch.mpirun(2, [SCRIPT, "caught type"])
    assert result.returncode == 0, result.output
    assert re.search(
        r"CAUGHT 0 step 'step', on rank 1: TypeError: batch leaf batch\['x'\] is 'text', not an array", result.stdout
    )
    assert re.search(r"CAUGHT 1 batch leaf batch\['x'\] is 'text', not an array", result.stdout)
    losses = re.findall(r"OK \d (\S+)", result.stdout)
    assert len(losses) == 2
    assert len(set(losses)) == 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("read only", r"state leaf offset is not the same on rank 0 and rank 1.*does not return it.*batch_argnums"),
        ("in jit", r"each of the 2 processes would train by itself"),
    ],
)
def test_what_would_differ_in_silence_is_an_error_on_all(mode: str, words: str) -> None:
    result = launch.mpirun(2, [SCRIPT, mode])
    assert result.returncode == 0, result.output
    for rank in range(2):
        assert re.search(rf"CAUGHT {rank} .*{words}", result.stdout), result.output
        assert f"OK {rank}" in result.stdout


@pytest.mark.mpi
def test_constants_that_differ_end_the_job() -> None:
    result = launch.mpirun(2, [SCRIPT, "constants"])
    assert result.returncode != 0
    assert result.stdout.count("OK ") == 2, result.output
    assert re.search("different programs|constant", result.output), result.output


@pytest.mark.mpi
def test_ranks_that_agree_again_and_again_are_left_alone() -> None:
    result = launch.mpirun(3, [SCRIPT, "many shapes"])
    assert result.returncode == 0, result.output
    assert len(re.findall(r"OK \d", result.stdout)) == 3


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("mode", ["shape later", "late shape", "type later"])
def test_one_rank_with_a_new_shape_ends_the_job(mode: str, communicator: str) -> None:
    result = launch.mpirun(2, [SCRIPT, mode, communicator])
    assert result.returncode != 0
    assert re.search(r"step 'step'", result.output), result.output
    assert re.search(r"structure, shape or dtype|different arguments|not an array", result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_a_rank_that_leaves_early_ends_the_job(communicator: str) -> None:
    result = launch.mpirun(2, [SCRIPT, "leaves early", communicator])
    assert result.returncode != 0
    assert re.search(r"rank 1 has finished after 2 calls of step 'step', and rank 0 is in call 3", result.output), (
        result.output
    )


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_the_roots_weights_are_everyones(communicator: str) -> None:
    result = launch.mpirun(3, [SCRIPT, "sync", communicator])
    assert result.returncode == 0, result.output
    assert len(re.findall(r"OK \d", result.stdout)) == 3


def test_by_hand_without_a_launcher() -> None:
    results = launch.spawn_env(2, [SCRIPT, "shape first"])
    for result in results:  # here each process has its own output: the error is on every rank
        assert result.returncode != 0
        assert re.search(MESSAGES["shape first"], result.output), result.output
