"""A rank that does not come, stops, or runs another program: the others end with an error that names it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jobs
import pytest

from jaxdist.runtime import context

pytestmark = pytest.mark.slow  # together

SCRIPT = str(Path(__file__).with_name("bad_calls.py"))
WHO = r"rank 1 \(\S+, pid \d+\)"
BOTH = pytest.mark.parametrize("communicator", ["xla", "mpi"])


WAITED = r"step 'step', call 3: rank ([02]) has waited for \d+ s, and not every rank has come to it: "
WHERE = rf"{WHO} has made 2 calls of it and is at \S*bad_calls.py:\d+ in stuck_in_the_loader\. "


def stack(rank: int, output: str) -> str:
    """What a rank printed of its main thread."""
    mine = [line for line in output.splitlines() if line.startswith(f"[jaxdist rank {rank}] ")]
    start = mine.index(f"[jaxdist rank {rank}] its main thread (most recent call last):")
    return "\n".join(mine[start:])


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "communicator"), [("stuck", "xla"), ("spins", "mpi"), ("stops", "xla"), ("stops", "mpi")]
)
def test_who_does_not_come_to_a_call_is_named_and_where_it_is(mode: str, communicator: str) -> None:
    result = jobs.mpirun(3, [SCRIPT, mode, communicator], {"JAXDIST_TIMEOUT": "2"})
    assert result.returncode != 0
    where = rf"{WHO} does not answer: stopped, swapping" if mode == "stops" else WHERE
    found = re.search(WAITED + where, result.output)
    assert found, result.output
    # Of the rank that found out; mpirun may kill the others before they have printed theirs.
    assert "in main: " in stack(int(found[1]), result.output), result.output


def test_every_rank_prints_its_stack() -> None:
    results = jobs.spawn_env(3, [SCRIPT, "stuck"], {"JAXDIST_TIMEOUT": "2"})
    for rank, result in enumerate(results):
        assert result.returncode != 0
        assert re.search(rf"\[jaxdist rank {rank}\] {WAITED}{WHERE}", result.stderr), result.output
        at = "in stuck_in_the_loader: " if rank == 1 else "/jaxdist/"
        assert at in stack(rank, result.stderr), result.output


def test_who_does_not_come_to_the_first_call_is_named_on_all() -> None:
    results = jobs.spawn_env(3, [SCRIPT, "stuck first"], {"JAXDIST_TIMEOUT": "6"})  # to start, too
    for rank in (0, 2):
        assert results[rank].returncode != 0
        assert re.search(
            rf"exchange step 'step' .*timed out on rank [02] after 6 s.* not there: {WHO}.* in stuck_in_the_loader",
            results[rank].stderr,
        ), results[rank].output


@pytest.mark.mpi
@BOTH
def test_who_is_late_is_waited_for(communicator: str) -> None:
    # LATE=40 by hand: longer than gloo gives its processes to connect
    late = {"LATE": os.environ.get("LATE", "1.5")}
    result = jobs.mpirun(2, [SCRIPT, "late", communicator], late, timeout=240)
    assert result.returncode == 0, result.output
    assert len(re.findall(r"OK \d", result.stdout)) == 2


@pytest.mark.mpi
def test_a_slow_step_is_no_error() -> None:
    result = jobs.mpirun(2, [SCRIPT, "slow"], {"JAXDIST_TIMEOUT": "1", "LATE": "4"})
    assert result.returncode == 0, result.output
    assert re.search(r"rank 0 has waited for \d+ s, and no rank is missing", result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize(("mode", "communicator"), [("differs", "xla"), ("differs", "mpi"), ("differs unseen", "xla")])
def test_different_programs_end_the_job(mode: str, communicator: str) -> None:
    result = jobs.mpirun(2, [SCRIPT, mode, communicator])
    assert result.returncode != 0
    assert re.search(
        r"call \d: the ranks have different programs, and none has run\. The first operation that differs:\n"
        r".*rank 0: \w+ float32\S* .*, at \S*/bad_calls.py:\d+\n.*rank 1: \w+ float32\S* .*, at \S*/bad_calls.py:30\n",
        result.output,
    ), result.output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_other_operations_between_the_same_collectives_end_the_job(communicator: str) -> None:
    result = jobs.mpirun(2, [SCRIPT, "differs inside", communicator])
    assert result.returncode != 0
    assert re.search(
        r"rank 0: tanh float32\[3\], at \S*/bad_calls.py:\d+\n.*rank 1: sin float32\[3\], at \S*/bad_calls.py:\d+\n",
        result.output,
    ), result.output


@pytest.mark.mpi
def test_a_rank_that_traces_alone_is_left_alone_and_lower_sends_nothing() -> None:
    result = jobs.mpirun(2, [SCRIPT, "traces alone"])
    assert result.returncode == 0, result.output
    assert len(re.findall(r"OK \d", result.stdout)) == 2
    assert "SENT" not in result.stdout


@pytest.mark.mpi
def test_a_call_that_fails_on_one_rank_alone_is_found_out() -> None:
    result = jobs.mpirun(2, [SCRIPT, "fails alone"], {"JAXDIST_TIMEOUT": "2"})
    assert result.returncode != 0
    found = rf"{WHO} left it with KeyError|timed out on rank 1|different calls. rank 0 at 'broadcast'; rank 1 at step"
    assert re.search(found, result.output), result.output


@pytest.mark.parametrize("given", ["0", "-1", "inf", "nan", "soon"])
def test_a_timeout_is_a_number_of_seconds(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_TIMEOUT", given)
    with pytest.raises(ValueError, match=f"JAXDIST_TIMEOUT='{given}': expected a positive number of seconds"):
        context._timeout(None)
    assert context._timeout(5) == 5.0
    monkeypatch.delenv("JAXDIST_TIMEOUT")
    assert context._timeout(None) == 300.0
