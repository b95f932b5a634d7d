"""Ranks that disagree, do not come, stop, or run another program: an error that names it, on the others or on all.

Each kind of fault over each communicator; with JAXDIST_FULL set, each fault over both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import pytest

from jaxdist.runtime import context

pytestmark = pytest.mark.slow  # together

WHO = r"rank 1 \(\S+, pid \d+\)"
BOTH = pytest.mark.parametrize("communicator", ["xla", "mpi"])
WAITED = r"step 'step', call 3: rank ([02]) has waited for \d+ s, and not every rank has come to it: "
WHERE = rf"{WHO} has made 2 calls of it and is at \S*bad_calls.py:\d+ in stuck_in_the_loader\. "
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


def by_turns(cases: Sequence[Any]) -> list[Any]:
    """Each with one of the communicators, the next with the other; or with both."""
    both = ("xla", "mpi")
    return [(*case, wire) for i, case in enumerate(cases) for wire in (both if FULL else both[i % 2 :][:1])]


FULL = "JAXDIST_FULL" in os.environ


def words(folder: Path, mode: str, communicator: str = "auto") -> list[str]:
    return [jobs.RUNNER, communicator, str(folder), f'bad_calls:main["{mode}"]']


def ended(
    n: int, folder: Path, what: str, communicator: str = "auto", env: dict[str, str | None] | None = None
) -> jobs.Result:
    """A job that must fail before any rank is through."""
    result = jobs.mpirun(n, [jobs.RUNNER, communicator, str(folder), what], env)
    assert result.returncode != 0, result.output
    assert not any(file.read_text() for file in folder.glob("rank*.json")), result.output
    return result


def bad(n: int, folder: Path, mode: str, *more: Any) -> jobs.Result:
    return ended(n, folder, f'bad_calls:main["{mode}"]', *more)


# --- ranks that disagree


@pytest.mark.mpi
@BOTH
def test_an_error_on_all_ranks_says_what_differs_and_loses_nothing(communicator: str, tmp_path: Path) -> None:
    result, _ = jobs.cases(3, communicator, tmp_path, 'bad_calls:main["caught"]')
    for name, said in MESSAGES.items():
        for rank in range(3):
            assert re.search(rf"CAUGHT {rank} {name}: .*{said}", result.stdout), (name, rank, result.output)
        losses = re.findall(rf"OK \d {name} (\S+)", result.stdout)
        assert len(losses) == 3
        assert len(set(losses)) == 1
    assert "hook of the control channel failed" not in result.stderr
    assert result.stdout.count("the root's") == 3, "weights of the root are everyone's: no error"
    for rank in (0, 2):
        assert re.search(rf"CAUGHT {rank} type: step 'step#\d+', on rank 1: TypeError: batch leaf", result.stdout)


@pytest.mark.mpi
def test_constants_that_differ_end_the_job(tmp_path: Path) -> None:
    result = bad(2, tmp_path, "constants")
    assert result.stdout.count("OK ") == 2, result.output
    held = r"rank {}: \w+ .*, at \S*\.py:\d+\n.*"
    assert re.search(held.format(0) + held.format(1), result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize(("mode", "communicator"), by_turns([("shape later",), ("late shape",), ("type later",)]))
def test_one_rank_with_a_new_shape_ends_the_job(mode: str, communicator: str, tmp_path: Path) -> None:
    result = bad(2, tmp_path, mode, communicator)
    assert re.search(r"step 'step'", result.output), result.output
    assert re.search(
        r"call \d+ of rank \d is step 'step'.* and rank \d came with|different arguments|not an array", result.output
    ), result.output


@pytest.mark.mpi
@BOTH
def test_a_rank_that_leaves_early_ends_the_job(communicator: str, tmp_path: Path) -> None:
    result = jobs.mpirun(2, words(tmp_path, "leaves early", communicator))
    assert result.returncode != 0
    assert re.search(r"rank 1 has finished after 2 calls, and rank 0 is in call 3, step 'step'", result.output), (
        result.output
    )


def test_by_hand_without_a_launcher(tmp_path: Path) -> None:
    results = jobs.spawn_env(2, words(tmp_path, "shape first"))
    for result in results:  # here each process has its own output: the error is on every rank
        assert result.returncode != 0
        assert re.search(MESSAGES["shape"], result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "culprit", "calls", "communicator"),
    by_turns(
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
        ]
    ),
)
def test_known_calls_in_another_order_on_one_rank_end_the_job(
    mode: str, culprit: int, calls: tuple[str, str], communicator: str, tmp_path: Path
) -> None:
    result = ended(max(2, culprit + 1), tmp_path, f"orders:main{json.dumps([mode, culprit])}", communicator)
    told = [line for line in result.output.splitlines() if "different calls" in line or "different arguments" in line]
    assert any(all(re.search(call, line) for call in calls) for line in told), result.output
    assert "Aborted" not in result.output, result.output  # nor did gloo or MPI end it
    assert "truncated" not in result.output, result.output


@pytest.mark.mpi
def test_calls_that_repeat_a_pattern_are_not_compared(tmp_path: Path) -> None:
    jobs.cases(2, "xla", tmp_path, 'orders:main["pattern", 1]')


# --- ranks that do not come


def stack(rank: int, output: str) -> str:
    """What a rank printed of its main thread."""
    mine = [line for line in output.splitlines() if line.startswith(f"[jaxdist rank {rank}] ")]
    start = mine.index(f"[jaxdist rank {rank}] its main thread (most recent call last):")
    return "\n".join(mine[start:])


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "communicator"),
    [("stuck", "xla"), ("spins", "mpi"), ("stops", "xla"), ("stops", "mpi")][: 4 if FULL else 3],
)
def test_who_does_not_come_to_a_call_is_named_and_where_it_is(mode: str, communicator: str, tmp_path: Path) -> None:
    result = bad(3, tmp_path, mode, communicator, {"JAXDIST_TIMEOUT": "2"})
    where = rf"{WHO} does not answer: stopped, swapping" if mode == "stops" else WHERE
    found = re.search(WAITED + where, result.output)
    assert found, result.output
    # Of the rank that found out; mpirun may kill the others before they have printed theirs.
    assert re.search(r"bad_calls\.py.* in main: ", stack(int(found[1]), result.output)), result.output


def test_every_rank_prints_its_stack(tmp_path: Path) -> None:
    results = jobs.spawn_env(3, words(tmp_path, "stuck"), {"JAXDIST_TIMEOUT": "2"})
    for rank, result in enumerate(results):
        assert result.returncode != 0
        assert re.search(rf"\[jaxdist rank {rank}\] {WAITED}{WHERE}", result.stderr), result.output
        at = "in stuck_in_the_loader: " if rank == 1 else "/jaxdist/"
        assert at in stack(rank, result.stderr), result.output


def test_who_does_not_come_to_the_first_call_is_named_on_all(tmp_path: Path) -> None:
    results = jobs.spawn_env(3, words(tmp_path, "stuck first"), {"JAXDIST_TIMEOUT": "6"})  # to start, too
    for rank in (0, 2):
        assert results[rank].returncode != 0
        assert re.search(
            rf"exchange step 'step' .*timed out on rank [02] after 6 s.* not there: {WHO}.* in stuck_in_the_loader",
            results[rank].stderr,
        ), results[rank].output


@pytest.mark.mpi
@BOTH
def test_who_is_late_is_waited_for(communicator: str, tmp_path: Path) -> None:
    # LATE=40 by hand: longer than gloo gives its processes to connect
    late = {"LATE": os.environ.get("LATE", "1.5")}
    jobs.cases(2, communicator, tmp_path, 'bad_calls:main["late"]', env=late, timeout=240)


@pytest.mark.mpi
def test_a_slow_step_is_no_error(tmp_path: Path) -> None:
    env = {"JAXDIST_TIMEOUT": "1", "LATE": "4"}
    result, _ = jobs.cases(2, "auto", tmp_path, 'bad_calls:main["slow"]', env=env, timeout=120)
    assert re.search(r"rank 0 has waited for \d+ s, and no rank is missing", result.output), result.output


@pytest.mark.mpi
@pytest.mark.parametrize(("mode", "communicator"), [("differs", "xla"), ("differs", "mpi"), ("differs unseen", "xla")])
def test_different_programs_end_the_job(mode: str, communicator: str, tmp_path: Path) -> None:
    result = bad(2, tmp_path, mode, communicator)
    assert re.search(
        r"call \d: the ranks have different programs, and none has run\. The first operation that differs:\n"
        r".*rank 0: \w+ float32\S* .*, at \S*/bad_calls.py:\d+\n.*rank 1: \w+ float32\S* .*, at \S*/bad_calls.py:29\n",
        result.output,
    ), result.output


@pytest.mark.mpi
@pytest.mark.parametrize(("mode", "communicator"), by_turns([("differs inside",)]))
def test_other_operations_between_the_same_collectives_end_the_job(
    mode: str, communicator: str, tmp_path: Path
) -> None:
    result = bad(2, tmp_path, mode, communicator)
    assert re.search(
        r"rank 0: tanh float32\[3\], at \S*/bad_calls.py:\d+\n.*rank 1: sin float32\[3\], at \S*/bad_calls.py:\d+\n",
        result.output,
    ), result.output


@pytest.mark.mpi
def test_a_rank_that_traces_alone_is_left_alone_and_lower_sends_nothing(tmp_path: Path) -> None:
    result, _ = jobs.cases(2, "auto", tmp_path, 'bad_calls:main["traces alone"]', timeout=120)
    assert "SENT" not in result.stdout


@pytest.mark.mpi
def test_a_call_that_fails_on_one_rank_alone_is_found_out(tmp_path: Path) -> None:
    result = bad(2, tmp_path, "fails alone", "auto", {"JAXDIST_TIMEOUT": "2"})
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
