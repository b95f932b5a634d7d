"""Ranks that disagree, do not come, stop, or run another program: an error that names it, on the others or on all.

Each kind of fault over each communicator; with JAXDIST_FULL set, each fault over both.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from harness import jobs

from jaxdist.runtime import context

pytestmark = pytest.mark.slow  # together

FULL = "JAXDIST_FULL" in os.environ
WIRES = ("xla", "mpi")
WHO = r"rank 1 \(\S+, pid \d+\)"
WAITED = r"step 'step', call 3: rank ([02]) has waited for \d+ s, and not every rank has come to it: "
WHERE = rf"{WHO} has made 2 calls of it and is at \S*bad_calls.py:\d+ in stuck_in_the_loader\. "
CAUGHT = {
    "shape": r"leaf batch\['x'\] is float32\[4,3\] \(batch\) on rank 0, 2; float32\[3,3\] \(batch\) on rank 1",
    "dtype": r"leaf state\['b'\] is float32\[2\].* on rank 0, 2; bfloat16\[2\].* on rank 1",
    "tree": r"leaf state\['extra'\] is absent on rank 0, 2; float32\[3\] \(state\) on rank 1",
    "state shape": r"leaf state\['w'\] is float32\[3,2\].* on rank 0, 2; float32\[3,5\] \(state\) on rank 1",
    "empty": r"batch leaf batch\['x'\] is empty",
    "scalar": r"leaf batch\['x'\] is float32\[4,3\] \(batch\) on rank 0, 2; float32\[\] \(state\) on rank 1",
    "type": r"batch leaf batch\['x'\] is 'text', not an array",
    "nan": r"call 1: result\[0\]\['b'\] is not finite",
    "read only": r"state leaf offset is not the same on rank 0 and rank 1.*does not return it.*batch_argnums",
    "in jit": r"each of the \d processes would train by itself",
}


def call(mode: str) -> str:
    return f'bad_calls:main["{mode}"]'


def order(mode: str, culprit: int) -> str:
    return f"orders:main{json.dumps([mode, culprit])}"


# --- ranks that disagree


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", WIRES)
def test_jobs_that_go_on(communicator: str, tmp_path: Path) -> None:
    """Errors on all ranks lose nothing; who is late is waited for; a rank may trace alone, and patterns are learnt."""
    more = [order("pattern", 1)] if communicator == "xla" else [call("traces alone")]
    result, _ = jobs.cases(3, communicator, tmp_path, call("late"), call("caught"), *more)
    for name, said in CAUGHT.items():
        for rank in range(3):
            assert re.search(rf"CAUGHT {rank} {name}: .*{said}", result.stdout), (name, rank, result.output)
        losses = re.findall(rf"OK \d {name} (\S+)", result.stdout)
        assert len(losses) == 3
        assert len(set(losses)) == 1
    assert "hook of the control channel failed" not in result.stderr
    assert result.stdout.count("the root's") == 3, "weights of the root are everyone's: no error"
    for rank in (0, 2):
        assert re.search(rf"CAUGHT {rank} type: step 'step#\d+', on rank 1: TypeError: batch leaf", result.stdout)
    assert "SENT" not in result.stdout


@pytest.mark.mpi
def test_a_slow_step_is_no_error(tmp_path: Path) -> None:
    env = {"JAXDIST_TIMEOUT": "1", "LATE": "2.5"}
    result, _ = jobs.cases(2, "auto", tmp_path, call("slow"), env=env, timeout=120)
    assert re.search(r"rank 0 has waited for \d+ s, and no rank is missing", result.output), result.output


SHAPE = (r"step 'step'", r"call \d+ of rank \d is step 'step'.* and rank \d came with|different arguments|not an array")
PROGRAMS = (
    r"call \d: the ranks have different programs, and none has run\. The first operation that differs:\n"
    r".*rank 0: \w+ float32\S* .*, at \S*/bad_calls.py:\d+\n.*rank 1: \w+ float32\S* .*, at \S*/bad_calls.py:\d+\n"
)
ORDER = "different calls|different arguments"
ORIGIN = "the origin of \\w+ is what the call before returned on rank 0; {0}|\\({0}\\)"
OUTSIDE = ORIGIN.format(
    "(no recent call of a decorated step|leaf . of what step 'train.<locals>.step' returned on rank 1)"
)
"""One leaf is of elsewhere, the other one of the call before alone: either is said."""
ENDS: dict[str, tuple[int, tuple[str, ...]]] = {
    call("shape later"): (2, SHAPE),
    call("late shape"): (2, SHAPE),
    call("type later"): (2, SHAPE),
    order("other shapes", 0): (2, (ORDER, "step 'towards_1'", "step 'towards_-5'")),
    order("equal shapes", 1): (2, (ORDER, "step 'towards_1'", "step 'towards_-5'")),
    order("models", 1): (
        2, (ORDER, "step 'towards_1'", r"a state of other types|leaf w is float\d\d\[3,2\].* float\d\d\[3,700\]")),
    order("batch", 2): (3, (ORDER, r"x (is )?float\d\d\[4,3\]", r"float\d\d\[3,3\]")),
    order("sum", 1): (2, (ORDER, "step 'towards_1'", "allreduce")),
    order("barrier", 0): (2, (ORDER, "step 'towards_1'", "'barrier'")),
    'copies:train["key"]': (2, (OUTSIDE,)),
    'copies:train["w"]': (2, (OUTSIDE,)),
    'copies:train["exchange"]': (2, (ORIGIN.format("leaf 1 of what step 'exchange' returned"),)),
    order("x64", 1): (2, (ORDER, "setting jax_enable_x64 is False on rank 0", "True on rank 1")),
    call("leaves early"): (2, (r"rank 1 has finished after 2 calls, and rank 0 is in call 3, step 'step'",)),
    call("differs unseen"): (2, ()),
}  # fmt: skip
"""What one of some ranks does, and what a line says of it."""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("word", "communicator"),
    [
        (word, wire)
        for i, word in enumerate(ENDS)
        for k, wire in enumerate(WIRES)
        if FULL or k == i % 2 or "leaves" in word
    ],
)
def test_the_job_ends(word: str, communicator: str, tmp_path: Path) -> None:
    """Before any rank is through, unless it is that which leaves."""
    ranks, said = ENDS[word]
    result = jobs.mpirun(ranks, [jobs.RUNNER, communicator, str(tmp_path), word])
    assert result.returncode != 0, result.output
    through = sum(bool(file.read_text()) for file in tmp_path.glob("rank*.json"))
    assert through <= ("leaves" in word), result.output
    lines = result.output.splitlines()
    assert any(all(re.search(part, line) for part in said) for line in lines), result.output
    assert "unseen" not in word or re.search(PROGRAMS, result.output), result.output
    assert "Aborted" not in result.output, result.output  # nor did gloo or MPI end it
    assert "truncated" not in result.output, result.output


def by_hand(ranks: int, folder: Path, mode: str, timeout: str = "60") -> list[jobs.Result]:
    """Without a launcher: each process has its own output."""
    results = jobs.spawn_env(ranks, [jobs.RUNNER, "auto", str(folder), call(mode)], {"JAXDIST_TIMEOUT": timeout})
    assert all(result.returncode for result in results), results
    return results


def test_by_hand_the_error_is_on_every_rank(tmp_path: Path) -> None:
    for result in by_hand(2, tmp_path, "shape first"):
        assert re.search(CAUGHT["shape"].replace(", 2", ""), result.output), result.output


# --- ranks that do not come


def stack(rank: int, output: str) -> str:
    """What a rank printed of its main thread."""
    mine = [line for line in output.splitlines() if line.startswith(f"[jaxdist rank {rank}] ")]
    start = mine.index(f"[jaxdist rank {rank}] its main thread (most recent call last):")
    return "\n".join(mine[start:])


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "communicator"),
    [(m, w) for m, k in (("spins", "mpi"), ("stops", "xla")) for w in (WIRES if FULL else [k])],
)
def test_who_does_not_come_to_a_call_is_named_and_where_it_is(mode: str, communicator: str, tmp_path: Path) -> None:
    result = jobs.mpirun(3, [jobs.RUNNER, communicator, str(tmp_path), call(mode)], {"JAXDIST_TIMEOUT": "2"})
    assert result.returncode != 0, result.output
    where = rf"{WHO} does not answer: stopped, swapping" if mode == "stops" else WHERE
    found = re.search(WAITED + where, result.output)
    assert found, result.output
    # Of the rank that found out; mpirun may kill the others before they have printed theirs.
    assert re.search(r"bad_calls\.py.* in main: ", stack(int(found[1]), result.output)), result.output


def test_every_rank_prints_its_stack(tmp_path: Path) -> None:
    for rank, result in enumerate(by_hand(3, tmp_path, "stuck", "2")):
        assert re.search(rf"\[jaxdist rank {rank}\] {WAITED}{WHERE}", result.stderr), result.output
        at = "in stuck_in_the_loader: " if rank == 1 else "/jaxdist/"
        assert at in stack(rank, result.stderr), result.output


def test_who_does_not_come_to_the_first_call_is_named_on_all(tmp_path: Path) -> None:
    results = by_hand(3, tmp_path, "stuck first", "4")  # to start, too
    for rank in (0, 2):
        assert re.search(
            rf"exchange step 'step' .*timed out on rank [02] after 4 s.* not there: {WHO}.* in stuck_in_the_loader",
            results[rank].stderr,
        ), results[rank].output


@pytest.mark.parametrize("given", ["0", "-1", "inf", "nan", "soon"])
def test_a_timeout_is_a_number_of_seconds(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_TIMEOUT", given)
    with pytest.raises(ValueError, match=f"JAXDIST_TIMEOUT='{given}': expected a positive number of seconds"):
        context._timeout(None)
    assert context._timeout(5) == 5.0
    monkeypatch.delenv("JAXDIST_TIMEOUT")
    assert context._timeout(None) == 300.0
