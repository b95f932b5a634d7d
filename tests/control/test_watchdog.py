"""Who is where: questions over the control channel, answered while main threads are busy, or not at all."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from harness.channels import everywhere, job, until

from jaxdist.control import watchdog
from jaxdist.control.channel import ControlError
from jaxdist.control.progress import ActiveCall, Progress
from jaxdist.control.watchdog import Watchdog


class Output:
    """Of a program that has not ended, until it is told so; or that was donated."""

    ready, donated = False, False

    def is_deleted(self) -> bool:
        return self.donated

    def is_ready(self) -> bool:
        return self.ready


def at(call: int, *, busy: bool) -> Progress:
    current = ActiveCall(call, time.monotonic(), returned=True, over=not busy)
    if busy:
        current.output = Output()
    return Progress(committed=call, current=current)


def test_who_is_missing_and_who_is_only_slow() -> None:
    controls = job(4)
    dogs = [Watchdog(c, 1e6) for c in controls]
    asking, missing, slow, elsewhere = dogs
    asking.steps |= {"train": at(5, busy=True), "eval": at(1, busy=False)}
    missing.steps |= {"train": at(4, busy=False)}
    slow.steps |= {"train": at(4, busy=True)}
    elsewhere.steps |= {"train": at(4, busy=False), "eval": at(2, busy=True)}  # it waits for us there
    found = asking.whereabouts([1, 2, 3], "train", 5) or ""
    assert re.findall(r"rank (\d) \(\S+, pid \d+\) has made 4 calls of it and is at \S*test_watchdog.py", found) == [
        "1",
        "3",
    ]
    found = missing.whereabouts([0], "train", 6) or ""
    assert re.match(r"rank 0 \(\S+, pid \d+\) has made 5 calls of it and is at ", found)
    elsewhere.steps["eval"] = at(1, busy=True)
    assert asking.whereabouts([2, 3], "train", 5) is None
    slow.steps["train"] = at(5, busy=False)
    slow.steps["train"].failed = "KeyError"
    assert "rank 2" in (left := asking.whereabouts([2], "train", 5) or "")
    assert left.endswith("left it with KeyError")


def test_who_does_not_answer_is_named_and_rank_0_alone_if_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 0.3)
    controls = job(3)
    dogs = [Watchdog(c, 1e6) for c in controls[:2]]
    assert re.fullmatch(r"rank 2 \(.*\) does not answer: .*", dogs[0].whereabouts([2]) or "")
    controls[0]._listeners.clear()
    assert "rank 2" not in (dogs[1].whereabouts([0, 2]) or "")


def test_an_exchange_waits_for_who_is_slow_and_then_names_who_is_not() -> None:
    controls = job(3)
    dogs = [Watchdog(c, 1e6) for c in controls]
    for dog in dogs:
        dog.steps["train"] = at(3, busy=dog is dogs[2])
    said: list[str] = []
    controls[0].say = said.append  # type: ignore[method-assign]

    def arrive() -> None:
        while not said:  # the exchange was over its time
            time.sleep(0.01)
        dogs[2].steps["train"] = at(3, busy=False)

    threading.Thread(target=arrive, daemon=True).start()
    got = everywhere([lambda: controls[0].exchange("save", timeout=0.3), lambda: controls[1].exchange("save")])
    assert "others are busy in a step" in said[0]
    for error in got:
        assert isinstance(error, ControlError)
        assert re.search(r"timed out on rank 0 .* rank 2 \(.*\) is at \S*channels.py:\d+ in everywhere\.", str(error))


def test_a_call_that_is_not_over_in_time_ends_the_job() -> None:
    controls = job(2)
    ended, said = threading.Event(), threading.Event()
    texts: list[str] = []

    def note(event: threading.Event) -> Any:
        return lambda text: (texts.append(text), event.set())

    controls[0].fail, controls[0].say = note(ended), note(said)  # for good: the threads outlive the test
    dogs = [Watchdog(c, 0.2) for c in controls]
    dogs[1].steps["train"] = at(7, busy=False)
    dogs[0].steps["train"] = at(7, busy=True)
    assert said.wait(20)
    assert re.match(r"step 'train', call 7: rank 0 has waited for \d s, and no rank is missing", texts[0])
    current = dogs[0].steps["train"].current
    assert current is not None
    current.output.donated = True  # to a call that runs now: nobody knows whether this one is over
    dogs[0].steps["train"].current = ActiveCall(8, time.monotonic())
    assert ended.wait(20)
    assert re.match(r"step 'train', call 8: .* rank 1 \(\S+, pid \d+\) has made 7 calls of it and is at ", texts[-1])


def test_a_call_is_over_when_its_output_is_there() -> None:
    x = jnp.ones(3)
    key = jax.random.key(0)
    for result in ((x, {"loss": x}), {"a": x}, [x], (x, None), x, key, (x, key)):
        call = ActiveCall(1, 0.0)
        assert call.finished() is False
        call.finish(result)
        jax.block_until_ready(result)
        assert call.finished() is True
        assert call.output is None  # nothing of the user's is kept
    for nothing in ((), None, ("text", 1)):
        call = ActiveCall(1, 0.0)
        call.finish(nothing)
        assert call.finished() is True
    call = ActiveCall(1, 0.0)
    gone = jnp.ones(3)
    call.finish(gone)
    gone.delete()
    assert call.finished() is None
    # A small output is watched rather than a large one.
    large, small = jnp.zeros(1 << 17), jnp.zeros(2)
    for result in ((small, large), {"a": [small], "b": {"c": large}}):
        call = ActiveCall(1, 0.0)
        call.finish(result)
        assert call.output is small


def test_a_start_that_is_not_over_in_time_ends_the_job_and_names_who_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 0.5)
    controls = job(3)
    dogs = [Watchdog(c, 0.1 if c.rank == 0 else 1e6) for c in controls]
    failed: list[str] = []
    for control in controls:
        monkeypatch.setattr(control, "fail", failed.append)
    with dogs[1].over("something else"):
        pass
    controls[2]._listeners.clear()  # it is stopped
    with dogs[0].over("the start"):
        until(lambda: failed)
    assert re.match(r"the start has taken longer than 0.1 s: .*rank 2 \(\S+, pid \d+\) does not answer", failed[0])
    assert len(failed) == 1
