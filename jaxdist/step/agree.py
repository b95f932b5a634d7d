"""Agreement between ranks: the same step, on state of one structure, with batches of one shape, or an error on all.

A rank that meets a new signature of a step says so to the others (`Agreement.check`, over the control channel) and
compares. In the steady state nothing is sent. What if only one rank sees something new (its last batch is shorter)? It
waits for answers while the others are, or soon will be, inside the collective. The control channel tells them at once
that someone asks: a rank that has not entered that call yet joins in, and finds the difference; one that has is
stopped by its watcher thread, which knows what it entered with.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxdist.context import Context
from jaxdist.progress import Call, Progress
from jaxdist.step.programs import Programs

_PREFIX = "step "


@dataclass(frozen=True)
class Description:
    """What must be the same on every rank: (name of a leaf or argument, its type) in order.

    Attributes:
      entries: of the state and the batch.
      problem: what this rank found wrong by itself; raised on every rank.
    """

    entries: tuple[tuple[str, str], ...]
    problem: str | None = None

    def digest(self) -> str:
        """Equal digests, equal descriptions."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


class Agreement:
    """Keeps the ranks of one job together; one a context.

    Args:
      context: the job.
    """

    def __init__(self, context: Context):
        self.context = context
        self.control = context.control
        self.steps = context.watchdog.steps
        self._lock = threading.Lock()  # a rank commits, or its watcher judges: never both at once
        if context.size > 1:
            self.control.on_notice = self._on_notice
            self.control.farewell = lambda: {k: p.committed for k, p in self.steps.items()}
            self.programs = Programs(self.control, self.steps)
            context.watchdog.on_stuck = functools.partial(self.programs.compare, stuck=True)

    def enter(self, step: str) -> int:
        """Called first in each call of a step; returns the call's number, from 1.

        Raises:
          RuntimeError: another rank has already left the job.
        """
        progress = self.steps.setdefault(step, Progress())
        call = progress.committed + 1
        if byes := self.control.notices.get("bye"):
            for rank, calls in list(byes.items()):
                if (calls or {}).get(step, 0) < call:
                    raise RuntimeError(self._left(rank, step, (calls or {}).get(step, 0)))
        return call

    def commit(self, step: str, call: int) -> bool:
        """Enter the call for good, unless another rank waits to compare it and this one has not: then False."""
        progress = self.steps[step]
        if self.context.size == 1:
            progress.committed = call
            return True
        with self._lock:
            if progress.comparing != call and self._tag(step, call) in self.control.notices:
                return False
            progress.committed = call
            progress.current, progress.failed = Call(call, time.monotonic()), ""
            return True

    def traced(self, step: str, program: ClosedJaxpr, held: Callable[[], str]) -> None:
        """The program of a step was traced; if in a call of it, the ranks that trace it too compare what they have."""
        if self.context.size > 1:
            self.programs.traced(step, program, held())

    def returned(self, step: str, result: Any) -> None:
        """The program of the call committed to has returned, and may still run."""
        if self.context.size > 1:
            call = self.steps[step].current
            assert call is not None
            call.finish(result)
            self.programs.compare()

    def failed(self, step: str, call: int, error: BaseException) -> None:
        """A call raised an error; if it was committed to, the next one compares whether it did so on all ranks."""
        progress = self.steps[step]
        if progress.current is not None and progress.current.number == call:
            progress.failed = type(error).__name__
            progress.current.finish(None)

    def check(self, step: str, call: int, mine: Description) -> None:
        """Compare with every rank.

        Raises:
          ValueError: on every rank, naming the first leaf that differs, both types and the ranks; or the problem that
            a rank found by itself.
          ControlError: some rank did not come within the timeout.
        """
        if self.context.size == 1:
            if mine.problem:
                raise ValueError(mine.problem)
            return
        progress = self.steps[step]
        outcome = ("the outcome of the call before", progress.failed or "a result")
        mine = dataclasses.replace(mine, entries=(outcome, *mine.entries))
        with self._lock:
            progress.comparing, progress.last = call, mine
        tag = self._tag(step, call)
        try:
            digests = self.control.exchange(tag, mine.digest(), self.context.timeout)
            if len(set(digests)) == 1 and mine.problem is None:
                return
            everyone: list[Description] = self.control.exchange(tag + " details", mine, self.context.timeout)
        except BaseException:
            progress.comparing = 0
            raise
        progress.comparing = 0  # the next call has this number again, and must be compared again
        raise ValueError(explain(step, everyone))

    def _tag(self, step: str, call: int) -> str:
        return f"{_PREFIX}{step} call {call}"

    def _on_notice(self, tag: str, rank: int, value: Any) -> None:
        """Watcher thread: another rank asks, or says goodbye."""
        if tag == "bye":
            for step, progress in list(self.steps.items()):
                calls = (value or {}).get(step, 0)
                if progress.committed > calls:
                    self.control.fail(self._left(rank, step, calls))
            return
        if not tag.startswith(_PREFIX) or tag.endswith(" details"):
            return
        step, _, call = tag[len(_PREFIX) :].rpartition(" call ")
        progress = self.steps.get(step)
        if progress is None:
            return
        with self._lock:
            if progress.comparing == int(call) or progress.committed < int(call):
                return
        # Committed without comparing: the arguments were known here. Whatever the other rank has is new.
        types = ", ".join(f"{n}: {t}" for n, t in progress.last.entries[-4:]) if progress.last else "?"
        self.control.fail(
            f"step {step!r}, call {call}: rank {rank} came with arguments of another structure, shape or dtype than "
            f"before, and rank {self.context.rank} did not (it has ... {types}). Each rank must pass a batch of the "
            "same shape in the same call: drop or pad the tail of the data on every rank."
        )

    def _left(self, rank: int, step: str, calls: int) -> str:
        return (
            f"rank {rank} has finished after {calls} calls of step {step!r}, and rank {self.context.rank} is in "
            f"call {max(calls + 1, self.steps[step].committed)}: each rank must make the same number of calls (is the "
            "data unequal?)"
        )


def explain(step: str, everyone: Sequence[Description]) -> str:
    """The first difference between the ranks' descriptions, for a person.

    Args:
      step: its name.
      everyone: the description of each rank.
    """
    problems = [(r, d.problem) for r, d in enumerate(everyone) if d.problem]
    if problems:
        rank, problem = problems[0]
        others = [r for r, _ in problems[1:]]
        also = f" (and on rank {list_ranks(others)})" if others else ""
        return f"step {step!r}, on rank {rank}{also}: {problem}"
    tables = [dict(d.entries) for d in everyone]
    names = list(dict.fromkeys(name for table in tables for name in table))
    for name in names:
        by_type: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            by_type.setdefault(table.get(name, "absent"), []).append(rank)
        if len(by_type) > 1:
            values = "; ".join(f"{kind} on rank {list_ranks(ranks)}" for kind, ranks in by_type.items())
            return (
                f"the ranks call step {step!r} with different arguments: {name} is {values}. Build the same model on "
                "every rank, and pass batches of the same shape (drop or pad the tail of the data)."
            )
    return f"the ranks call step {step!r} with the same leaves in a different order"


def list_ranks(ranks: Sequence[Any]) -> str:
    if len(ranks) > 8:
        return ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more"
    return ", ".join(map(str, ranks))
