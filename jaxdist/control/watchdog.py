"""Never a silent hang: a rank that waits too long in a call finds out who is missing, and where it is."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jaxdist.control.channel import Control
from jaxdist.control.stacks import main_thread_line

_ASK, _TELL = "where are you", "I am here"
_SILENT = "does not answer: stopped, swapping, or in native code that holds Python's lock"
_SMALL = 1 << 16  # elements of an output that may be kept a little longer than the user does


@dataclass(eq=False)
class ActiveCall:
    """A step or an eager collective that this rank has entered: nothing can stop it from its messages."""

    what: str  # names it
    position: int  # in the ledger, from 1
    since: float = field(default_factory=time.monotonic)
    over: bool = False  # whether it has ended, as far as was seen
    output: Any = None  # one small array of its result
    error: str = ""  # that it has ended with

    def finish(self, result: Any, error: str = "") -> None:
        """The program returned `result`, which may not be computed yet; or it failed."""
        self.output, self.error = _an_array(result), error
        self.over = self.output is None

    def finished(self) -> bool | None:
        """Check whether it has ended, or return None if unknown: its output was donated to a different program."""
        output = self.output
        if output is not None:
            try:
                if output.is_deleted():  # is_ready would crash the process (jax 0.10)
                    return None
                if output.is_ready():
                    output.block_until_ready()  # raises the error of a program that has failed on its device
                    self.over, self.output = True, None
            except RuntimeError as error:
                if output.is_deleted():  # donated just now
                    return None
                self.error, self.over, self.output = type(error).__name__, True, None
        return self.over


class _Report(NamedTuple):
    """The position of a rank."""

    position: int  # calls that it has entered
    busy: bool  # whether the newest is not over
    failed: tuple[int, str]  # where in the ledger a call has ended with an error, the newest, and with which
    at: str  # the line of Python in which its main thread is


class Watchdog:
    """Watches the calls of this rank, and answers for it when others ask.

    A call that was entered longer than `timeout` ago and is not over makes it ask the other ranks over the control
    channel, whose threads answer even if the main thread is stuck. If one is missing from that call, and is not merely
    slow in a call in which this rank has been too, the job ends, with a message that names it; every rank that still
    can prints it and its own stack. If all have come (a long compilation, a slow step), a line says so.
    """

    def __init__(self, control: Control, timeout: float):
        self._control, self._timeout = control, timeout
        self._newest: ActiveCall | None = None
        self._step: ActiveCall | None = None  # the newest of a step; an eager collective does not make up for its error
        self._questions = itertools.count()
        control.listen(_ASK, lambda rank, number: control.put(f"{_TELL} {number}", self._report(), to=rank))
        control.whereabouts = self.whereabouts
        if control.size > 1:
            threading.Thread(target=self._watch, name="jaxdist-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def call(self, what: str, is_step: bool = False) -> Iterator[ActiveCall]:
        """Enter a call for good, after its entry in the ledger; if it has no error, its `finish` is to be called."""
        self._newest = active = ActiveCall(what, self._control.position())
        self._step = active if is_step else self._step
        try:
            yield active
        except BaseException as error:
            active.finish(None, type(error).__name__)
            self._control.stay_if_ending()  # a rank that left may be its cause
            raise

    @property
    def failed(self) -> bool:
        """Return whether the newest call, or the newest step, on this rank is known to have failed."""
        return self._failure()[0] >= 0

    def _failure(self) -> tuple[int, str]:
        """Return where in the ledger the newest call or step has ended with an error, the later one, and with which."""
        calls = {call for call in (self._newest, self._step) if call is not None}
        return max(((call.position, call.error) for call in calls if call.finished() and call.error), default=(-1, ""))

    def whereabouts(self, ranks: Collection[int], position: int = 0) -> str | None:
        """Ask missing ranks where they are. `position`: the call of the ledger that they should have entered, or 0."""
        reports = self._ask({0, *ranks} - {self._control.rank})
        if self._control.rank > 0 and 0 not in reports and not reports.keys() >= set(ranks):
            ranks = [0]  # the others' answers would come through it
        absent = []
        for rank in ranks:
            who, report = self._control.who(rank), reports.get(rank)
            if rank in self._control.stopped:
                absent.append(f"{who} is in a debugger at {self._control.stopped[rank]}")
            elif report is None:
                absent.append(f"{who} {_SILENT}")
            elif report.position >= position > 0:
                if report.failed[0] >= position:
                    absent.append(f"{who} left it with {report.failed[1]}")
            elif not (report.busy and report.position <= self._control.position()):
                absent.append(f"{who} has entered {report.position} calls and is at {report.at}")
        return "; ".join(absent) or None

    def _watch(self) -> None:
        pause = min(5.0, max(0.05, self._timeout / 20))
        watched: ActiveCall | None = None
        deadline = 0.0
        while not self._control.ending:
            time.sleep(pause)
            newest = self._newest
            if newest is None or newest.finished():  # so are all before it
                watched = None
            elif watched is None or watched.finished():
                watched, deadline = newest, newest.since + self._timeout
            elif time.monotonic() > deadline:
                self._judge(watched, newest)
                # The newer one may have been waiting for long, too.
                deadline = (time.monotonic() if watched is newest else newest.since) + self._timeout
                watched = newest

    def _judge(self, call: ActiveCall, newest: ActiveCall) -> None:
        absent = self.whereabouts(self._control.others, call.position)
        if absent is None and (step := self._step) is not None and not step.finished():  # with messages before its own
            absent = self.whereabouts(self._control.others, step.position)
        where = f"{call.what}: rank {self._control.rank} has waited for {time.monotonic() - call.since:.0f} s"
        if call.finished() or newest.finished():  # while we asked
            return
        if absent is not None and time.monotonic() < self._control.held_until:
            self._control.say(f"{where}: {absent}")
        elif absent is not None:
            self._control.fail(
                f"{where}, and not every rank has come to it: {absent}. Every rank must make the same calls. If "
                f"one may be late by more than {self._timeout:g} s, say so: jaxdist.init(timeout=...)"
            )
        elif call is newest and newest.finished() is False:
            self._control.say(
                f"{where}, and no rank is missing: each is in this call or one before it. A long compilation or a "
                "slow step; if it never ends, a deadlock in one's own code, or ranks that can't reach each other"
            )

    # --- questions and answers

    def _ask(self, ranks: Collection[int]) -> dict[int, _Report]:
        """The reports of `ranks`; of those that answer in time."""
        number, end = next(self._questions), time.monotonic() + self._control.patience
        self._control.post(_ASK, number)
        reports = dict[int, _Report]()
        for rank in ranks:
            with contextlib.suppress(queue.Empty):
                reports[rank] = self._control.take(f"{_TELL} {number}", rank, max(0.0, end - time.monotonic()))
        return reports

    def _report(self) -> _Report:
        newest = self._newest
        busy = newest is not None and newest.finished() is False
        return _Report(self._control.position(), busy, self._failure(), main_thread_line())


def _an_array(tree: Any) -> jax.Array | None:
    """Some array of a step's result that knows when it is ready, a small one if there is one; random keys don't."""
    last: Any = tree
    while isinstance(last, (tuple, list, dict)) and last:
        last = next(reversed(last.values())) if isinstance(last, dict) else last[-1]
    if isinstance(last, jax.Array) and hasattr(last, "is_ready") and last.size <= _SMALL:
        return last  # often the loss; to look at all leaves takes time
    return min((x for x in jax.tree.leaves(tree)[:16] if hasattr(x, "is_ready")), key=lambda x: x.size, default=None)
