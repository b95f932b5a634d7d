"""Mail between ranks, over a real control channel."""

from __future__ import annotations

import threading

import pytest
from harness import channels

from jaxdist.control.channel import Control


def test_each_takes_what_was_left_for_it_in_any_order() -> None:
    ranks = channels.job(3)
    ranks[1].mail.put("a", 10, to=0)
    ranks[2].mail.put("a", 20, to=0)
    ranks[2].mail.put("b", {"x": [1]}, to=0)
    ranks[0].mail.put("verdict", "good")
    assert ranks[0].mail.take("b", 2, 30) == {"x": [1]}
    assert [ranks[0].mail.take("a", rank, 30) for rank in (2, 1)] == [20, 10]
    assert [rank.mail.take("verdict", 0, 30) for rank in ranks[1:]] == ["good", "good"]
    ranks[1].mail.put("own", 1, to=1)
    assert ranks[1].mail.take("own", 1, 30) == 1


def test_what_was_taken_is_gone_and_what_does_not_come_is_not_waited_for() -> None:
    ranks = channels.job(2)
    waiting = threading.Thread(target=lambda: ranks[0].exchange("step"), daemon=True)
    waiting.start()  # mail comes beside an exchange that waits
    ranks[1].mail.put("a", 1, to=0)
    assert ranks[0].mail.take("a", 1, 30) == 1
    with pytest.raises(TimeoutError, match=r"'a' of rank 1 has not come within 0\.05 s"):
        ranks[0].mail.take("a", 1, 0.05)
    ranks[1].exchange("step")
    waiting.join(30)
    assert not waiting.is_alive()


def test_alone_nobody_hears_it() -> None:
    alone = Control(0, 1)
    alone.mail.put("a", 1)
    with pytest.raises(TimeoutError):
        alone.mail.take("a", 0, 0.01)
