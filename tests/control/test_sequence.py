"""The one sequence of calls: which are expected, and what a rank concludes from where another one is."""

from __future__ import annotations

import pytest
from harness.channels import job, until

from jaxdist.control.channel import Control
from jaxdist.control.sequence import CallSequence


def compared(calls: str) -> str:
    """The calls, those in upper case that have to be compared."""
    sequence, out = CallSequence(Control(0, 1)), ""
    for what in calls:
        known = sequence.enter(what)
        if not known:
            sequence.commit(what)
        out += what if known else what.upper()
    assert sequence.count == len(calls)
    return out


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("ttttt", "Ttttt"),
        ("ababab", "ABAbab"),
        ("dddgdddgdddg", "DddGDddgdddg"),  # a GAN
        ("tttte" * 3, "TtttE" + "Tttte" + "tttte"),  # an evaluation every four steps
        ("ttetttetttettt", "TtETtTEtttettt"),  # it settles
    ],
)
def test_a_call_that_the_pattern_leads_to_expect_is_not_compared(calls: str, expected: str) -> None:
    assert compared(calls) == expected


def test_a_call_that_was_of_another_kind_is_corrected() -> None:
    right, corrected = CallSequence(Control(0, 1)), CallSequence(Control(0, 1))
    for what in "aababbab":
        right.commit(what)
        corrected.commit("b" if corrected.count % 3 else what)
        corrected.correct(what)
    assert vars(right)["_turns"] == vars(corrected)["_turns"]
    assert (right.count, right._last, right._run) == (corrected.count, corrected._last, corrected._run)
    assert right._named == corrected._named


def in_training(size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Control], list[CallSequence], list[str]]:
    """The ranks of a job after one step, and what they fail with, each with its rank."""
    controls, failed = job(size), []
    sequences = [CallSequence(c) for c in controls]
    for control, sequence in zip(controls, sequences, strict=True):
        monkeypatch.setattr(control, "fail", lambda message, rank=control.rank: failed.append(f"{rank}: {message}"))
        sequence.commit("train")
    return controls, sequences, failed


def test_a_rank_in_another_call_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    controls, sequences, failed = in_training(2, monkeypatch)
    assert sequences[0].enter("train")
    controls[1].post("unrelated", 1)
    assert not sequences[1].enter("evaluate")
    controls[1]._send(("enter", sequences[1].tag, None, (1, "evaluate")))
    until(lambda: failed)
    assert "call 2 of rank 0 is train, and rank 1 came with evaluate" in failed[0]


def test_a_rank_behind_is_waited_for_and_joins_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    controls, sequences, failed = in_training(2, monkeypatch)
    controls[1]._send(("enter", sequences[1].tag, None, (1, "train, changed")))
    until(lambda: controls[0].waiting)
    assert not sequences[0].enter("train"), "rank 1 waits to compare it"
    assert not failed


def test_a_call_announced_matters_to_those_in_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sequences, failed = in_training(3, monkeypatch)
    sequences[0].commit("allreduce")  # it was quicker
    assert sequences[1].enter("train")
    sequences[2].announce("allreduce")
    until(lambda: failed)
    assert len(failed) == 1
    assert failed[0].startswith("1: the ranks make different calls: call 2 of rank 1 is train, and rank 2 came with")


def test_who_left_before_a_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    controls, sequences, failed = in_training(2, monkeypatch)
    controls[1].close()
    until(lambda: "bye" in controls[0].notices)
    with pytest.raises(RuntimeError, match="rank 1 has finished after 1 calls, and rank 0 is in call 2, train"):
        sequences[0].check_all_here("train")
    assert not failed
