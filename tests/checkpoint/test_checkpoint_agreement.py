"""All ranks could do their part, or all learn which could not; with threads as ranks."""

from __future__ import annotations

import functools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist import CheckpointError
from jaxdist.checkpoint.agreement import brief, together
from jaxdist.control.mailbox import Mailbox


class Ranks:
    """Each does its part in a thread."""

    def __init__(self, size: int, timeout: float = 60.0):
        self.said: list[str] = []
        self.errors: list[BaseException | None] = [None] * size
        self.concluded: list[Any] = []
        self.ending = False
        self.size, self.timeout = size, timeout

        self.mail = [Mailbox(functools.partial(self.post, rank)) for rank in range(size)]

    def post(self, rank: int, _: str, value: Any, to: int | None) -> None:
        for r in [to] if to is not None else [r for r in range(self.size) if r != rank]:
            self.mail[r].arrived(rank, value)

    def context(self, rank: int) -> Any:
        control = SimpleNamespace(
            ending=self.ending, say=self.said.append, who=lambda r: f"rank {r}", mail=self.mail[rank]
        )
        return SimpleNamespace(rank=rank, size=self.size, is_root=rank == 0, timeout=self.timeout, control=control)

    def run(self, work: Any, conclude: Any = None) -> list[BaseException | None]:
        def rank(i: int) -> None:
            try:
                together(self.context(i), "it", "name", lambda: work(i), conclude or self.concluded.append, "failed")
            except BaseException as error:
                self.errors[i] = error

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(t.is_alive() for t in threads)
        return self.errors


def fails(on: int, error: BaseException) -> Any:
    def work(rank: int) -> int:
        if rank == on:
            raise error
        return rank

    return work


def test_all_could() -> None:
    ranks = Ranks(3)
    assert ranks.run(lambda rank: rank * 10) == [None] * 3
    assert ranks.concluded == [[0, 10, 20]]


@pytest.mark.parametrize("rank", range(3))
def test_one_could_not(rank: int) -> None:
    ranks = Ranks(3)
    errors = ranks.run(fails(rank, OSError("no space")))
    assert all(isinstance(e, CheckpointError) for e in errors)
    assert all(str(e).startswith(f"failed, on rank {rank}: ") and "OSError: no space" in str(e) for e in errors)
    assert ranks.concluded == []


def test_the_root_could_not_conclude() -> None:
    def conclude(values: Any) -> None:
        raise OSError("no rename")

    errors = Ranks(2).run(lambda rank: rank, conclude)
    assert all("failed, on rank 0: " in str(e) and "no rename" in str(e) for e in errors)


def test_ctrl_c_on_one() -> None:
    """That rank gets its KeyboardInterrupt, and the others do not wait for it."""
    errors = Ranks(2).run(fails(1, KeyboardInterrupt()))
    assert isinstance(errors[1], KeyboardInterrupt)
    assert "KeyboardInterrupt" in str(errors[0])


def test_ctrl_c_while_the_root_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    ranks = Ranks(2)
    monkeypatch.setattr(ranks.mail[0], "take", interrupted)
    errors = ranks.run(lambda rank: rank)
    assert isinstance(errors[0], KeyboardInterrupt)
    assert "failed, on rank 0: interrupted" in str(errors[1])


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_one_is_waited_for(slow: int) -> None:
    """Ten times the timeout."""
    ranks = Ranks(2, timeout=0.05)
    assert ranks.run(lambda rank: time.sleep(0.5 if rank == slow else 0)) == [None, None]
    assert any(f"it has waited for 0 s for rank {slow}, which is still writing" in line for line in ranks.said)


def test_the_end_of_the_job_is_not() -> None:
    ranks = Ranks(2, timeout=0.05)
    ranks.ending = True
    with pytest.raises(CheckpointError, match="rank 1: it was left, for the job ends"):
        together(ranks.context(1), "it", "name", lambda: None, lambda values: None, "failed")


def test_the_cause_stays_where_what_a_library_said_is_shortened() -> None:
    spec = r"""{"codecs":[{\"name\":\"it\'s\"}],"shape":[128,256]}""" * 40
    said = f"""Error opening "zarr3" driver: local file "{"/long" * 300}": No space left on device"""
    shown = brief(ValueError(f"EXHAUSTED: {said} [os_error_code='28'] [tensorstore_spec='{spec}'] [transaction='1']"))
    assert shown.startswith("EXHAUSTED: Error opening")
    assert shown.endswith("No space left on device")
    assert len(shown) < 1_010
    assert brief(ValueError("no leaf [name='w'] in it")) == "no leaf [name='w'] in it"
