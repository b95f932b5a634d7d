"""Agreement between ranks: the same step, on state of one structure, with batches of one shape, or an error on all.

A rank that meets a new signature of a step, or makes another call than the calls so far lead to expect, says so to the
others (`Agreement.check`, over the control channel) and compares. In the steady state nothing is sent. What if only one
rank sees something new (its last batch is shorter)? It waits for answers while the others are, or soon will be, inside
the collective. The control channel tells them at once that someone asks: a rank that has not entered that call yet
joins in, and finds the difference; one that has is stopped by its watcher thread (`jaxdist.control.sequence`).
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxdist.agreement.programs import Programs
from jaxdist.control.progress import ActiveCall, Progress
from jaxdist.runtime.context import Context


@dataclass(frozen=True, eq=False)
class StepCall:
    """A kind of call: of a step, with a batch of these types.

    Attributes:
      step: its name.
      batch: names and types of the leaves.
      constants: names and values of the arguments' constants.
    """

    step: str
    batch: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {kind}" for name, kind in self.batch[:4])
        text = f"step {self.step!r}" + (f" with a batch of {shown}" if shown else "")
        if self.constants:  # what differs has to be seen here
            values = ", ".join(f"{name}={value}" for name, value in self.constants)
            digest = hashlib.sha256(values.encode()).hexdigest()[:8]
            text += f" and {values}" if len(values) < 200 else f" and constants (digest {digest})"
        return text


@dataclass(frozen=True)
class Description:
    """What must be the same on every rank.

    Attributes:
      step: its name.
      entries: (name of a leaf or argument, its type) in order, of the state and the batch.
      problem: what this rank found wrong by itself; raised on every rank.
    """

    step: str
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
        self.sequence = context.sequence
        if context.size > 1:
            self.programs = Programs(self.control, self.steps)
            context.watchdog.on_stuck = functools.partial(self.programs.compare, stuck=True)

    def enter(self, step: str) -> int:
        """Called first in each call of a step; returns the call's number, from 1.

        Raises:
          RuntimeError: another rank has already left the job.
        """
        if "bye" in self.control.notices:
            self.sequence.check_all_here(f"step {step!r}")
        return self.steps.setdefault(step, Progress()).committed + 1

    def known(self, call: int, what: StepCall) -> bool:
        """Enter a call for good, if it is the one to expect and no other rank waits to compare it: else False."""
        if self.context.size > 1 and not self.sequence.enter(what):
            return False
        self._committed(call, what)
        return True

    def compared(self, call: int, what: StepCall) -> None:
        """Enter a call for good that was compared."""
        if self.context.size > 1:
            self.sequence.commit(what)
        self._committed(call, what)

    def corrected(self, what: StepCall) -> None:
        """The call entered last is of another kind."""
        if self.context.size > 1:
            self.sequence.correct(what)

    def _committed(self, call: int, what: StepCall) -> None:
        progress = self.steps[what.step]
        progress.committed = call
        if self.context.size > 1:
            progress.current, progress.failed = ActiveCall(call, time.monotonic()), ""

    def traced(self, step: str, program: ClosedJaxpr, held: Callable[[], str]) -> None:
        """The program of a step was traced; if in a call of it, the ranks that trace it too compare what they have."""
        if self.context.size > 1:
            self.programs.traced(step, program, held())

    def returned(self, step: str, result: object) -> None:
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

    def check(self, what: StepCall, entries: tuple[tuple[str, str], ...] = (), problem: str | None = None) -> None:
        """Compare with every rank.

        Args:
          what: the call.
          entries: what this rank comes with (see `Description`).
          problem: what it found wrong by itself.

        Raises:
          ValueError: on every rank, naming the first leaf that differs, both types and the ranks; or the problem that
            a rank found by itself.
          ControlError: some rank did not come within the timeout, or is in another call.
        """
        if self.context.size == 1:
            if problem:
                raise ValueError(problem)
            return
        outcome = ("the outcome of the call before", self.steps[what.step].failed or "a result")
        mine = Description(what.step, (outcome, *entries), problem)
        tag = self.sequence.tag
        digests = self.control.exchange(tag, mine.digest(), self.context.timeout, str(what))
        if len(set(digests)) == 1 and problem is None:
            return
        raise ValueError(explain(self.control.exchange(tag + " details", mine, self.context.timeout, str(what))))


def explain(everyone: Sequence[Description]) -> str:
    """The first difference between the ranks' descriptions, for a person.

    Args:
      everyone: the description of each rank.
    """
    step = everyone[0].step
    problems = [(r, d.step, d.problem) for r, d in enumerate(everyone) if d.problem]
    if problems:
        rank, step, problem = problems[0]
        others = [r for r, *_ in problems[1:]]
        also = f" (and on rank {list_ranks(others)})" if others else ""
        return f"step {step!r}, on rank {rank}{also}: {problem}"
    by_step: dict[str, list[int]] = {}
    for rank, description in enumerate(everyone):
        by_step.setdefault(description.step, []).append(rank)
    if len(by_step) > 1:
        calls = "; ".join(f"step {name!r} on rank {list_ranks(ranks)}" for name, ranks in by_step.items())
        return (
            f"the ranks make different calls: {calls}. Nothing was sent. Every rank must make the same calls in the "
            "same order: look for a choice that is not the same on all ranks"
        )
    tables = [dict(d.entries) for d in everyone]
    names = list(dict.fromkeys(name for table in tables for name in table))
    for name in names:
        by_type: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            by_type.setdefault(table.get(name) or _other_role(table, name), []).append(rank)
        if len(by_type) > 1:
            values = "; ".join(f"{kind} on rank {list_ranks(ranks)}" for kind, ranks in by_type.items())
            return f"the ranks call step {step!r} with different arguments: {name} is {values}. " + (
                "What is no array must be the same on every rank."
                if name.startswith("constant ")
                else "Build the same model on every rank, and pass batches of the same shape (drop or pad the tail "
                "of the data)."
            )
    return f"the ranks call step {step!r} with the same leaves in a different order"


def _other_role(table: Mapping[str, str], name: str) -> str:
    """The type of a leaf that another rank has in another role: a batch that can't be one is taken for state there."""
    role, _, rest = name.partition(" leaf ")
    for other in {"batch", "state"} - {role}:
        if kind := table.get(f"{other} leaf {rest}"):
            return f"{kind}, and so {other},"
    return "absent"


def list_ranks(ranks: Sequence[Any]) -> str:
    if len(ranks) > 8:
        return ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more"
    return ", ".join(map(str, ranks))
