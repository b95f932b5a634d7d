"""Never a silent hang: a rank that waits too long in a call of a step finds out who has not come, and where it is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from jaxdist.control.channel import Control
from jaxdist.control.progress import ActiveCall, Progress
from jaxdist.control.stacks import main_thread_line, script_is_over

_ASK, _TELL = "where are you", "I am here"
_SILENT = "does not answer: stopped, swapping, or in native code that holds Python's lock"
_ANSWER_SECONDS = 10.0  # for a thread of a rank to answer: Python's lock may be held, the host may be swapping


class _Report(NamedTuple):
    """Where a rank is."""

    committed: dict[str, int]  # of each step, the last call entered for good
    busy: list[str]  # of these steps that call is not over
    failed: dict[str, str]  # of these steps that call ended with this error
    at: str  # the line of Python in which its main thread is
    over: bool  # whether its script is


class Watchdog:
    """Watches the calls of this rank, and answers for it when others ask.

    A call that was committed to longer than `timeout` ago and is not over makes it ask the other ranks over the control
    channel, whose threads answer whatever the main thread does. If one has not come to that call, and is not merely
    slow in a call in which this rank has been too, the job ends, with a message that names it; every rank that still
    can prints it and its own stack. If all have come (a long compilation, a slow step), a line says so.
    """

    def __init__(self, control: Control, timeout: float):
        self.steps: dict[str, Progress] = {}
        self._control, self._timeout = control, timeout
        self._number = 0  # of the question
        self._reports: dict[int, _Report] = {}  # answers to it
        self._news = threading.Condition()
        self._asking = threading.Lock()
        self._watched: dict[str, tuple[ActiveCall, float]] = {}  # an unfinished call of each step, and when to worry
        control.listen(_ASK, lambda rank, number: control.post(_TELL, (number, self._report()), to=rank))
        control.listen(_TELL, self._note)
        control.where_is(others=self.whereabouts)
        if control.size > 1:
            threading.Thread(target=self._watch, name="jaxdist-watchdog", daemon=True).start()

    def whereabouts(self, ranks: Collection[int], step: str = "", call: int = 0) -> str | None:
        """Where ranks are that do not come; asks them."""
        reports = self._ask(ranks)
        if ranks and 0 in ranks and 0 not in reports:
            ranks = [0]  # the others' answers would come through it
        absent = []
        for rank in ranks:
            who, report = self._control.who(rank), reports.get(rank)
            if report is None:
                absent.append(f"{who} {_SILENT}")
                continue
            made = report.committed.get(step, 0)
            if made >= call > 0:
                if made == call and step in report.failed:
                    absent.append(f"{who} left it with {report.failed[step]}")
            elif not any(self._has_been_in(s, report.committed[s]) for s in report.busy):
                calls = f"has made {made} call{'s' * (made != 1)} of it and " if call else ""
                absent.append(f"{who} {calls}is at {report.at}")
        return "; ".join(absent) or None

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch over native code in which all ranks wait for each other, and which can't say who does not come."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(self._timeout):
                where = self.whereabouts(self._control.others)
                if where is not None and not ended.is_set():
                    self._control.fail(f"{what} has taken longer than {self._timeout:g} s: {where}")
                    return

        threading.Thread(target=watch, name="jaxdist-start", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def at_the_end(self, ranks: Collection[int]) -> tuple[dict[int, str], list[str]]:
        """Where ranks are that have not said goodbye: those that hang at their end, and those still at work."""
        reports = self._ask(ranks)
        hanging, working = dict[int, str](), list[str]()
        for rank in ranks:
            who, report = self._control.who(rank), reports.get(rank)
            if report is None:
                hanging[rank] = f"{who} {_SILENT}"
            elif report.over:
                hanging[rank] = f"{who} is at {report.at}"
            else:
                working.append(f"{who} is at {report.at}")
        return hanging, working

    def _has_been_in(self, step: str, call: int) -> bool:
        progress = self.steps.get(step)
        return progress is not None and progress.committed >= call

    def _watch(self) -> None:
        pause = min(5.0, max(0.05, self._timeout / 20))
        while not self._control.ending:
            time.sleep(pause)
            for step, progress in list(self.steps.items()):
                self._look_at(step, progress.current)

    def _look_at(self, step: str, newest: ActiveCall | None) -> None:
        if newest is None or newest.finished():  # so are all before it
            self._watched.pop(step, None)
            return
        watched, deadline = self._watched.get(step, (None, 0.0))
        if watched is None or watched.finished():
            self._watched[step] = newest, newest.since + self._timeout
        elif time.monotonic() > deadline:
            left = self._control.notices.get("bye", {})
            absent = self.whereabouts([r for r in self._control.others if r not in left], step, watched.number)
            waited = f"has waited for {time.monotonic() - watched.since:.0f} s"
            where = f"step {step!r}, call {watched.number}: rank {self._control.rank} {waited}"
            if watched.finished() or newest.finished():  # while we asked
                return
            if absent is not None:
                self._control.fail(
                    f"{where}, and not every rank has come to it: {absent}. Every rank must make the same calls. If "
                    f"one may be late by more than {self._timeout:g} s, say so: jaxdist.init(timeout=...)"
                )
                return
            if watched is newest and newest.finished() is False:
                self._control.say(
                    f"{where}, and no rank is missing: each is in this call or one before it. A long compilation or a "
                    "slow step; if it never ends, a deadlock in one's own code, or ranks that can't reach each other"
                )
            # The newer one may have been waiting for long, too.
            since = time.monotonic() if watched is newest else newest.since
            self._watched[step] = newest, since + self._timeout

    # --- questions and answers

    def _ask(self, ranks: Collection[int]) -> dict[int, _Report]:
        """The reports of `ranks`; of those that answer in time."""
        with self._asking:
            with self._news:
                self._number += 1
                self._reports = {}
            self._control.post(_ASK, self._number)
            with self._news:
                self._news.wait_for(lambda: self._reports.keys() >= set(ranks), _ANSWER_SECONDS)
                return dict(self._reports)

    def _note(self, rank: int, answer: tuple[int, _Report]) -> None:
        number, report = answer
        with self._news:
            if number == self._number:
                self._reports[rank] = report
                self._news.notify_all()

    def _report(self) -> _Report:
        steps = list(self.steps.items())
        return _Report(
            {step: p.committed for step, p in steps},
            [step for step, p in steps if p.busy],
            {step: p.failed for step, p in steps if p.failed},
            main_thread_line(),
            script_is_over(),
        )
