"""Ranks that disagree get one error, on every rank, that names what differs; none hangs."""

from __future__ import annotations

import re
from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.slow  # together

SCRIPT = str(Path(__file__).with_name("bad_calls.py"))
ORDER = str(Path(__file__).with_name("another_order.py"))

MESSAGES = {
    "shape": r"leaf batch\['x'\] is float32\[4,3\] \(batch\) on rank 0(, 2)?; float32\[3,3\] \(batch\) on rank 1",
    "dtype": r"leaf state\['b'\] is float32\[2\].* on rank 0(, 2)?; bfloat16\[2\].* on rank 1",
    "tree": r"leaf state\['extra'\] is absent on rank 0(, 2)?; float32\[3\] \(state\) on rank 1",
    "state shape": r"leaf state\['w'\] is float32\[3,2\].* on rank 0(, 2)?; float32\[3,5\] \(state\) on rank 1",
    "empty": r"batch leaf batch\['x'\] is empty",
    "scalar": r"leaf batch\['x'\] is float32\[4,3\] \(batch\) on rank 0, 2; float32\[\] \(state\) on rank 1",
    "type": r"batch leaf batch\['x'\] is 'text', not an array",
    "nan": r"call 1: result\[0\]\['b'\] is not finite",
    "read only": r"state leaf offset is not the same on rank 0 and rank 1.*does not return it.*batch_argnums",
    "in jit": r"each of the \d processes would train by itself",
}


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_an_error_on_all_ranks_says_what_differs_and_loses_nothing(communicator: str) -> None:
    result = jobs.mpirun(3, [SCRIPT, "caught", communicator])
    assert result.returncode == 0, result.output
    for name, words in MESSAGES.items():
        for rank in range(3):
            assert re.search(rf"CAUGHT {rank} {name}: .*{words}", result.stdout), (name, rank, result.output)
        losses = re.findall(rf"OK \d {name} (\S+)", result.stdout)
        assert len(losses) == 3
        assert len(set(losses)) == 1
    assert "hook of the control channel failed" not in result.stderr
    assert result.stdout.count("the root's") == 3, "weights of the root are everyone's: no error"
    for rank in (0, 2):
        assert re.search(rf"CAUGHT {rank} type: step 'step#\d+', on rank 1: TypeError: batch leaf", result.stdout)


@pytest.mark.mpi
def test_constants_that_differ_end_the_job() -> None:
    result = jobs.mpirun(2, [SCRIPT, "constants"])
    assert result.returncode != 0
    assert result.stdout.count("OK ") == 2, result.output
    held = r"rank {}: \w+ .*, at \S*\.py:\d+\n.*"
    assert re.search(held.format(0) + held.format(1), result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("mode", ["shape later", "late shape", "type later"])
def test_one_rank_with_a_new_shape_ends_the_job(mode: str, communicator: str) -> None:
    result = jobs.mpirun(2, [SCRIPT, mode, communicator])
    assert result.returncode != 0
    assert re.search(r"step 'step'", result.output), result.output
    assert re.search(
        r"call \d+ of rank \d is step 'step'.* and rank \d came with|different arguments|not an array", result.output
    ), result.output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_a_rank_that_leaves_early_ends_the_job(communicator: str) -> None:
    result = jobs.mpirun(2, [SCRIPT, "leaves early", communicator])
    assert result.returncode != 0
    assert re.search(r"rank 1 has finished after 2 calls, and rank 0 is in call 3, step 'step'", result.output), (
        result.output
    )


def test_by_hand_without_a_launcher() -> None:
    results = jobs.spawn_env(2, [SCRIPT, "shape first"])
    for result in results:  # here each process has its own output: the error is on every rank
        assert result.returncode != 0
        assert re.search(MESSAGES["shape"], result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize(
    ("mode", "culprit", "calls"),
    [
        ("equal shapes", 1, (r"step 'towards_1'", r"step 'towards_-5'")),
        ("other shapes", 0, (r"step 'towards_1'", r"step 'towards_-5'")),
        ("batch", 2, (r"x (is )?float\d\d\[4,3\]", r"float\d\d\[3,3\]")),
        (
            "models",
            1,
            (r"step 'towards_1'", r"a state of other types|leaf w is float\d\d\[3,2\].* float\d\d\[3,700\]"),
        ),
        ("x64", 1, ("setting jax_enable_x64 is False on rank 0", "True on rank 1")),
        ("sum", 1, (r"step 'towards_1'", "allreduce")),
        ("barrier", 0, (r"step 'towards_1'", "'barrier'")),
    ],
)
def test_known_calls_in_another_order_on_one_rank_end_the_job(
    mode: str, culprit: int, calls: tuple[str, str], communicator: str
) -> None:
    result = jobs.mpirun(3, [ORDER, mode, str(culprit), communicator])
    assert result.returncode != 0, result.output
    assert "END" not in result.stdout, result.output
    told = [line for line in result.output.splitlines() if "different calls" in line or "different arguments" in line]
    assert any(all(re.search(call, line) for call in calls) for line in told), result.output
    assert "Aborted" not in result.output, result.output  # nor did gloo or MPI end it
    assert "truncated" not in result.output, result.output


@pytest.mark.mpi
def test_calls_that_repeat_a_pattern_are_not_compared() -> None:
    result = jobs.mpirun(2, [ORDER, "pattern", "1", "xla"])
    assert result.returncode == 0, result.output
    assert result.stdout.count("OK") == 2
