"""Gloo's word that it has connected is not in a script's output, all else is (of whole jobs: test_context.py)."""

from __future__ import annotations

import os

import pytest

from jaxdist.runtime import gloo


def test_only_the_one_line_is_dropped_and_only_at_first(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n")
        os.write(1, b"[Gloo] Rank 0 is NOT connected to: [1]\n")
        os.write(1, b"from a thread of the user's\n")
        return 3

    assert gloo.quietly((901, 902), run) == 3
    assert capfd.readouterr().out == "[Gloo] Rank 0 is NOT connected to: [1]\nfrom a thread of the user's\n"
    gloo.quietly((901, 902), run)
    assert "is connected to 1 peer ranks" in capfd.readouterr().out


def test_what_was_held_comes_out_when_the_program_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        os.write(1, b"before\n")
        raise RuntimeError("on purpose")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            gloo.quietly((903,), run)
    assert capfd.readouterr().out == "before\n" * 2
