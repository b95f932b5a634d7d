"""The candidates of `fit`: what their time and memory are at least, and which of them are compiled."""

from __future__ import annotations

import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxdist.ir.liveness import held_at_once
from jaxdist.mesh import AXIS
from jaxdist.planning.elsewhere import Elsewhere, Needs
from jaxdist.planning.report import STATE, LevelPlan
from jaxdist.step.choice import Times, order, times
from jaxdist.step.forecast import Ahead

MOST = 10
"""Compilations, where what the step is built with is varied."""


@dataclass(frozen=True)
class Candidate(Times):
    """A step at one level, for one kind of groups; and its times.

    Attributes:
      row: bytes, collectives, FLOPs.
      compiled: otherwise peak and times are at least these.
      made_by: the name of the function that builds it.
      share: of the data of the largest batch among the candidates.
      mesh: its axes and their sizes, where several are considered.
    """

    row: LevelPlan
    compiled: bool = True
    made_by: str = ""
    share: float = 1.0
    mesh: str = ""

    @property
    def choice(self) -> Mapping[str, Any]:
        """What the step is built with, where that is varied."""
        return self.row.choice

    @property
    def cost(self) -> float:
        """The time that candidates are compared by: for as much data."""
        return self.seconds / self.share

    @property
    def fits(self) -> bool | None:
        """Whether it does; None: it is not known, as it was not compiled."""
        return self.row.fits if self.compiled or not self.row.fits else None

    @property
    def name(self) -> str:
        """For a person."""
        name = f"{written(self.made_by, self.choice)} at {self.row.name}" if self.made_by else self.row.name
        return f"{name}, {self.mesh}" if self.mesh else name

    @property
    def code(self) -> str:
        """What chooses it; "": the step as it is written."""
        lines = [written(self.made_by, self.choice)] if self.made_by else []
        if self.row.level is not None:
            within = "" if self.row.within is None else f", within={json.dumps(self.row.within)}"
            offload = ", offload=True" if self.row.host else ""
            lines.append(f"tx = jaxdist.zero(tx, level={self.row.level}{within}{offload})")
        if self.mesh:
            sizes = {name: int(size) for name, size in (axis.split("=") for axis in self.mesh.split(", "))}
            lines.append(f"step = jaxdist.parallel(step, mesh={json.dumps(sizes)})")
        return "; ".join(lines)


def written(name: str, choice: Mapping[str, Any]) -> str:
    """A call, as in code.

    Example:
      >>> written("make", {"microbatches": 4, "remat": True})
      'make(microbatches=4, remat=True)'
    """
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in choice.items())})"


@dataclass(frozen=True)
class Option:
    """A candidate that can be compiled.

    Attributes:
      there: its step on the devices.
      ahead: emitted.
      level: of ZeRO; None: as the step is written.
      own: whether the step is written so.
      bound: what it takes at least.
      held: bytes of values that it makes and holds at once, before a compiler has fused any.
    """

    there: Elsewhere
    ahead: Ahead
    level: int | None
    own: bool
    bound: Candidate
    held: int

    def compile(self, began: float | None = None) -> tuple[Candidate, Needs]:
        """What it takes, and its program."""
        needs = self.there.compile(self.ahead, began)
        row = replace(self.there.row(needs, self.level, self.own, None), choice=self.bound.choice)
        of = self.bound
        return replace(candidate(row, self.there), made_by=of.made_by, share=of.share, mesh=of.mesh), needs


def candidate(row: LevelPlan, there: Elsewhere) -> Candidate:
    """With the times of what it computes, reads and sends."""
    state = sum(row.bytes.get(name, 0) for name in STATE)
    return Candidate(**vars(times(row.flops, state, row.host, row.collectives, there.topology.machine)), row=row)


def options(
    there: Elsewhere, choice: Mapping[str, Any] | None = None, made_by: str = "", mesh: str = ""
) -> list[Option]:
    """A step as it is written, and at each other level and for each kind of groups; emitted, and not compiled.

    Args:
      there: the step on the devices.
      choice: what it was built with.
      made_by: the name of the function that built it.
      mesh: what the devices' mesh is called; "": there is one alone.
    """
    as_written = there.emitted()
    own = there.level_of(as_written), as_written.shared
    groups = {0, there.in_host}
    levels = there.others(as_written) if there.mesh.get(AXIS, 1) > 1 else []
    wanted = {(level, shared) for level in levels for shared in (groups if level else {0})}
    found = []
    for level, shared in sorted({own, *wanted}, key=lambda one: (-1 if one[0] is None else one[0], one[1])):
        ahead = as_written if (level, shared) == own else there.emitted(level, shared)
        row = replace(there.row(there.bound(ahead), level, (level, shared) == own, None), choice=choice or {})
        bound = replace(candidate(row, there), compiled=False, made_by=made_by, mesh=mesh)
        held = held_at_once(ahead.program.jaxpr)
        found.append(Option(there, ahead, level, (level, shared) == own, bound, held))
    return found


def choices(make: Callable[..., Any], vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Each of the ways to build a step: a value for each name.

    Args:
      make: takes them by name.
      vary: the values of each.

    Raises:
      TypeError: `make` does not take one of the names.
      ValueError: a name without values.

    Example:
      >>> choices(lambda a, b: ..., {"a": [1, 2], "b": [True, True]})
      [{'a': 1, 'b': True}, {'a': 2, 'b': True}]
    """
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        parameters = ()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
    several: list[list[Any]] = []
    for name, values in vary.items():
        if name not in named and not open_ended:
            raise TypeError(f"vary: {named_of(make)} takes no argument {name!r}; it takes {', '.join(sorted(named))}")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"vary: {name}={values!r}: expected a list of values")
        if not values:
            raise ValueError(f"vary: no values for {name!r}")
        several.append(list({repr(value): value for value in values}.values()))
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*several)]


def named_of(make: Callable[..., Any]) -> str:
    """The name of a function, for a person."""
    return getattr(make, "__name__", None) or getattr(getattr(make, "func", None), "__name__", None) or "make"


def built(make: Callable[..., Any], choice: Mapping[str, Any]) -> tuple[Any, ...]:
    """The step and its arguments.

    Raises:
      TypeError: `make` returned something else.
    """
    made = make(**choice)
    if not isinstance(made, tuple) or not made:
        call = written(named_of(make), choice)
        raise TypeError(f"{call} returned {type(made).__name__}, expected a tuple (step, *args)")
    return made


@dataclass(frozen=True)
class Search:
    """What has been found.

    Attributes:
      candidates: in the order of the options; those that were not compiled with their bounds.
      chosen: that which fits and takes the least time; None: nothing that was compiled fits.
      left: those that may fit in less time, but for which there was no compilation left.
      expected: how many of these are expected to fit, by what the compiled ones need.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    left: tuple[Candidate, ...]
    expected: int = 0


def search(among: Sequence[Option]) -> Search:
    """Compile what may be the fastest until one that fits takes no longer than any other may.

    What is not expected to fit comes last: whether the search ends before is for the bounds to say.

    Args:
      among: the candidates, on the same devices.
    """
    there = among[0].there
    largest = max(one.there.batch_bytes for one in among)
    among = [
        replace(one, bound=replace(one.bound, share=one.there.batch_bytes / largest if largest else 1.0))
        for one in among
    ]
    compiled: dict[int, Candidate] = {}
    ratios: dict[int, float] = {}
    waiting = [i for i, one in enumerate(among) if one.bound.row.fits]
    chosen = None

    def turn(i: int) -> tuple[bool, float, int]:
        peak = _expected(among[i], [(among[k], ratio) for k, ratio in ratios.items()])
        return order(among[i].bound.cost, peak, among[i].bound.row.peak, there.memory)

    before = there.compilations
    while waiting and there.compilations - before < MOST:
        i = min(waiting, key=turn)
        waiting.remove(i)
        one, needs = among[i].compile(time.monotonic())
        compiled[i], ratios[i] = one, needs.temporaries / max(1, among[i].held)
        if one.row.fits and (chosen is None or (one.cost, one.row.peak) < (chosen.cost, chosen.row.peak)):
            chosen = one
            waiting = [k for k in waiting if among[k].bound.cost < one.cost]
    found = tuple(compiled.get(i, one.bound) for i, one in enumerate(among))
    expected = sum(not turn(i)[0] for i in waiting)
    return Search(found, chosen, tuple(among[i].bound for i in waiting), expected)


def _expected(one: Option, compiled: Sequence[tuple[Option, float]]) -> float:
    """Its peak, if its temporaries are as much of what it holds at once as those of the programs compiled so far: of
    the same step at other levels, if there are any."""
    ratios = [ratio for other, ratio in compiled if other.there is one.there] or [ratio for _, ratio in compiled]
    return one.bound.row.peak + (statistics.median(ratios) * one.held if ratios else 0)
