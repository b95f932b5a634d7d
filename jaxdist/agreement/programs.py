"""Whether the ranks run the same program: what a rank traces in a call is compared before it runs for the first time.

A rank that traces a program which is new to it waits at a gate, before it compiles it, until every rank has come with
the same. One that traces again what all have agreed on (its cache was cleared) does not wait. If another rank is in
the same call with a program that it has run before, it will never come to the gate: a thread of that rank finds out,
and tells the one that waits. Ranks that differ end at the gate: none returns from its call, so nothing
that a script does on an error (such as to save) happens any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr

from jaxdist.agreement.description import by_value, list_ranks, listed
from jaxdist.control.channel import Control
from jaxdist.control.progress import ActiveCall, Progress
from jaxdist.control.stacks import main_thread_line
from jaxdist.ir.dataflow import Operation, dataflow, operations, options

_GATE, _DETAILS, _PASSED = "a new program of a step", "where programs differ", "a call without a new program"
_SOON = 2.0  # seconds in which a call that has begun shows whether its program is a new one
_ADVICE = (
    "Inside a step nothing may depend on the rank: look for `ctx.rank`, an `if rank == ...`, a loop over a set (which "
    "PYTHONHASHSEED=0 puts into one order), a seed, options or versions that are not the same on all ranks."
)


@dataclass(frozen=True)
class Traced:
    """A program of a step that is about to be compiled.

    Attributes:
      step: its name.
      kind: what it is for, within this process: programs of one kind are the same, unless the step has changed.
      program: as one device runs it.
      source: the step as it was traced.
      arguments: names and types of its leaves.
    """

    step: str
    kind: Hashable
    program: ClosedJaxpr
    source: ClosedJaxpr
    arguments: tuple[tuple[str, str], ...] = ()


class _Gate(NamedTuple):
    """Where a rank waits: before the first run of a program, in this call of this step."""

    step: str
    call: int
    digest: str

    def __str__(self) -> str:
        return f"step {self.step!r}, call {self.call}"


class Programs:
    """The programs of this rank's steps that all ranks have agreed on.

    Args:
      control: of the job.
      steps: this rank's progress.
      timeout: seconds to wait for the others.
    """

    def __init__(self, control: Control, steps: Mapping[str, Progress], timeout: float):
        self._control, self._steps, self._timeout = control, steps, timeout
        self._agreed: dict[tuple[str, Hashable], str] = {}  # digests
        self._arguments: dict[str, tuple[tuple[str, str], ...]] = {}  # of the newest program of each step
        self._gates: dict[str, int] = {}  # by step: the last call in which this rank came to one
        self._heard: list[tuple[int, _Gate]] = []  # ranks at a gate; this one may come to it, too
        self._later = False
        self._lock = threading.Lock()
        control.listen(f"enter {_GATE}", self._hear)
        control.listen(_PASSED, self._passed)

    def traced(self, new: Traced) -> None:
        """This rank has traced a program. In a call of its step it comes back once all ranks have the same.

        Raises:
          ControlError: some rank did not come within the timeout, or is in another call.
        """
        progress = self._steps.get(new.step)
        current = progress.current if progress else None
        if current is None or current.returned:  # `lower`: nothing is sent
            return
        digest = dataflow(new.program)
        self._arguments[new.step] = new.arguments
        if self._agreed.get((new.step, new.kind)) == digest:
            current.may_trace = False
            return
        self._gates[new.step] = current.number
        mine = _Gate(new.step, current.number, digest)
        everyone = self._control.exchange(_GATE, mine, self._timeout, f"the comparison of programs of {mine}")
        if any(gate != mine for gate in everyone):
            self._end(new, everyone)
        self._agreed[new.step, new.kind] = digest

    def _end(self, new: Traced, everyone: Sequence[_Gate]) -> None:
        """The ranks differ: rank 0 says where, and ends the job."""
        first = everyone[0]
        other = next(rank for rank, gate in enumerate(everyone) if gate != first)
        told = [f(new) for f in _PARTS.values()] if self._control.rank in (0, other) else None
        details = self._control.exchange(_DETAILS, told, self._timeout)
        if self._control.rank == 0:
            if len(calls := by_value(list(map(str, everyone)))) > 1:
                text = f"the ranks are in different calls: {listed(calls)}"
            else:
                groups = list(by_value([gate.digest for gate in everyone]).values())
                pairs = zip(_PARTS, map(difference, details[0], details[other]), strict=True)
                what, found = next((pair for pair in pairs if pair[1]), ("", None))
                text = f"{first}: the ranks have different programs, and none has run. {explained(found, groups, what)}"
            self._control.fail(f"{text}\n{_ADVICE}", brief=True)
        self._control.process.stay()

    # --- a rank that does not come to the gate

    def compare(self) -> None:
        """Look for ranks that wait at the gate of a call in which this one has not come to it, and won't."""
        if not self._heard:
            return
        waiting: list[tuple[int, _Gate]] = []
        with self._lock:
            heard, self._heard = self._heard, []
            for rank, gate in heard:
                progress = self._steps.get(gate.step, Progress())
                settled = progress.committed - (progress.current is not None and _may_trace(progress.current))
                if self._gates.get(gate.step, 0) >= gate.call:
                    continue  # both are there
                if settled < gate.call:
                    self._heard.append((rank, gate))
                elif not (progress.failed and progress.committed == gate.call):  # else it has its own error
                    waiting.append((rank, gate))
            if self._heard and not self._later:
                self._later = True
                again = threading.Timer(_SOON, self._again)
                again.daemon = True
                again.start()
        for rank, gate in waiting:
            self._control.post(_PASSED, (gate, self._arguments.get(gate.step, ())), to=rank)

    def _hear(self, rank: int, gate: _Gate) -> None:
        with self._lock:
            self._heard.append((rank, gate))
        self.compare()

    def _again(self) -> None:
        self._later = False
        self.compare()

    def _passed(self, rank: int, told: tuple[_Gate, tuple[tuple[str, str], ...]]) -> None:
        """Another rank is in the call at whose gate this one waits, with a program that it had before."""
        gate, theirs = told
        me, mine, line = self._control.rank, self._arguments[gate.step], main_thread_line()
        pairs = zip_longest(mine, theirs, fillvalue=("none", "none"))
        if differs := next(((a, b) for a, b in pairs if a != b), None):
            (name, here), (_, there) = differs
            text = (
                f"{name} is {here} on rank {me}, {there} on rank {rank}, in the call at {line}. Types must be the same "
                "on every rank."
            )
        else:
            text = (
                f"rank {me} has traced another program than before, and rank {rank} has not, in the call at {line}: "
                f"something that the step reads from outside (a global, an attribute, an option) changed on rank {me} "
                "alone."
            )
        self._control.fail(f"{gate}: the ranks have different programs. {text}\n{_ADVICE}", brief=True)


def _may_trace(call: ActiveCall) -> bool:
    """Whether a rank may still trace a new program in this call."""
    # Other types show when JAX looks at the arguments, right after the call was entered.
    return not call.returned and (call.may_trace or time.monotonic() - call.since < _SOON)


def _arguments(new: Traced) -> list[Operation]:
    line = main_thread_line()
    texts = (f"{name} {kind}" for name, kind in new.arguments)
    return [Operation(text.encode(), text, line) for text in texts]


_PARTS: dict[str, Callable[[Traced], list[Operation]]] = {
    "argument": _arguments,
    "option": lambda new: options(new.source),
    "operation": lambda new: operations(new.source),
    "operation of a device's program": lambda new: operations(new.program),
}
"""What is compared of two programs that differ, in this order; by what it is called."""


def difference(
    one: Sequence[Operation], other: Sequence[Operation]
) -> tuple[Operation | None, Operation | None] | None:
    """The first operation of each of two programs that the other does not have, or has elsewhere.

    Args:
      one: the operations of a program, in order.
      other: those of the other.

    Returns:
      The two operations (None: there is none); None in all: no operation differs.

    Example:
      >>> a, b, c = (Operation(text.encode(), text) for text in "abc")
      >>> [str(x) for x in difference([a, b], [a, c])]
      ['b', 'c']
      >>> [str(x) for x in difference([a, b], [b, a])]
      ['a', 'b']
    """
    known = [{line.digest for line in lines} for lines in (one, other)]
    mine = next((line for line in one if line.digest not in known[1]), None)
    theirs = next((line for line in other if line.digest not in known[0]), None)
    if mine or theirs:
        return mine, theirs
    return next(((a, b) for a, b in zip_longest(one, other) if a is None or b is None or a.digest != b.digest), None)


def explained(
    found: tuple[Operation | None, Operation | None] | None, groups: Sequence[Sequence[int]], what: str = "operation"
) -> str:
    """A difference, for a person.

    Args:
      found: see `difference`.
      groups: the ranks that have each program; the first two are those of the difference.
      what: it is.
    """
    if found is None:
        text = "They do the same operations, and return other results of these"
        return f"{text}: one on rank {'; another on rank '.join(map(list_ranks, groups))}."
    rest = [rank for group in groups[2:] for rank in group]
    more = f"\n  rank {list_ranks(rest)}: other programs again" if rest else ""
    none = f"no {what} that the other does not have, too"
    lines = [f"\n  rank {list_ranks(g)}: {x or none}" for g, x in zip(groups[:2], found, strict=True)]
    return f"The first {what} that differs:{''.join(lines)}{more}"
