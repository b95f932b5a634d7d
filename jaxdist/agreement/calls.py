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
from collections.abc import Callable
from dataclasses import dataclass

from jaxdist.agreement.copies import CHANGED
from jaxdist.agreement.description import Description, difference
from jaxdist.agreement.programs import Programs, Traced
from jaxdist.agreement.turns import Turns
from jaxdist.control.progress import Progress
from jaxdist.runtime.context import Context

_OUTCOME = "the outcome of the call before"
ORIGIN = "the origin of "
"""How the name of an entry begins."""


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
        self.turns = context.only(Turns)
        if context.size > 1:
            self.programs = Programs(self.control, self.steps, context.timeout)

    def enter(self, step: str) -> int:
        """Called first in each call of a step; returns the call's number, from 1.

        Raises:
          RuntimeError: another rank has already left the job.
        """
        self.turns.begin()
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

    def expect(self, what: StepCall) -> None:
        """This one is likely to follow the call entered last, on every rank."""
        if self.context.size > 1:
            self.sequence.expect(what)

    def corrected(self, what: StepCall) -> None:
        """The call entered last is of another kind."""
        if self.context.size > 1:
            self.sequence.correct(what)

    def _committed(self, call: int, what: StepCall) -> None:
        self.steps[what.step].commit(call, watched=self.context.size > 1)

    def traced(self, new: Callable[[], Traced]) -> None:
        """A program was traced; if in a call of its step, this comes back once all ranks have the same."""
        if self.context.size > 1:
            self.programs.traced(new())

    def may_trace(self, step: str, may: bool) -> None:
        """Whether this rank, in the call committed to, may still trace a program that is new to it."""
        if (call := self.steps[step].current) is not None:
            call.may_trace = may

    def returned(self, step: str, result: object) -> None:
        """The program of the call committed to has returned, and may still run."""
        if self.context.size > 1:
            call = self.steps[step].current
            assert call is not None
            call.finish(result)
            self.turns.dispatched(call.output)
            self.programs.compare()

    def failed(self, step: str, call: int, error: BaseException) -> None:
        """A call raised an error; if it was committed to, the next one compares whether it did so on all ranks."""
        self.steps[step].fail(call, type(error).__name__)
        self.control.process.stay_if_ending()  # its cause may be that another rank has left

    def check(
        self, what: StepCall, entries: tuple[tuple[str, str], ...] = (), problem: str | None = None, more: str = ""
    ) -> None:
        """Compare with every rank.

        Args:
          what: the call.
          entries: what this rank comes with (see `Description`).
          problem: what it found wrong by itself.
          more: what to say of the call to a rank that is in another one.

        Raises:
          ValueError: on every rank, naming the first leaf that differs, both types and the ranks; or the problem that
            a rank found by itself.
          ControlError: some rank did not come within the timeout, or is in another call.
        """
        if self.context.size == 1:
            if problem:
                raise ValueError(problem)
            return
        outcome = (_OUTCOME, self.steps[what.step].failed or "a result")
        mine = Description(f"step {what.step!r}", (outcome, *entries), problem or "")
        tag = self.sequence.tag
        fingerprints = self.control.exchange(tag, mine.fingerprint, self.context.timeout, f"{what}{more}")
        if len(set(fingerprints)) > 1 or problem:
            everyone = self.control.exchange(f"{tag} details", mine, self.context.timeout, f"{what}{more}")
            in_lanes = self.context.communicator == "lanes"
            raise ValueError(difference(everyone, functools.partial(_advice, in_lanes=in_lanes)))


def _advice(name: str, in_lanes: bool) -> str:
    if name == _OUTCOME:
        return "An error of a step that is caught has to be caught on every rank: look at what went wrong on that one"
    if name.startswith(ORIGIN):
        return CHANGED
    if name.startswith("constant "):
        return "What is no array must be the same on every rank"
    if name.startswith("option "):
        return "Decorate the step with the same options of jaxdist.data_parallel on every rank"
    if name.startswith("setting "):
        return "Settings of JAX must be the same on every rank"
    batches = (
        "pass as many examples for each lane: those of the parts that ctx.parts() names"
        if in_lanes
        else ("pass batches of the same shape (drop or pad the tail of the data)")
    )
    return f"Build the same model on every rank, and {batches}"
