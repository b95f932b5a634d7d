"""The candidates of `fit`: what their time and memory are at least, and which of them are compiled."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxdist.ir.liveness import held_at_once
from jaxdist.mesh import AXIS
from jaxdist.planning.elsewhere import Elsewhere, Needs
from jaxdist.planning.report import STATE, LevelPlan
from jaxdist.step.choice import Times, order, times
from jaxdist.step.forecast import Ahead

MOST = 10
"""Compilations, where there are several meshes."""


@dataclass(frozen=True)
class Candidate(Times):
    """A step at one level, for one kind of groups; and its times."""

    row: LevelPlan  # bytes, collectives, FLOPs
    compiled: bool = True  # otherwise peak and times are at least these
    mesh: str = ""  # its axes and their sizes, where several are considered

    @property
    def fits(self) -> bool | None:
        """Whether it does; None: it is not known, as it was not compiled."""
        return self.row.fits if self.compiled or not self.row.fits else None

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.row.name}, {self.mesh}" if self.mesh else self.row.name

    @property
    def code(self) -> str:
        """What chooses it; "": the step as it is written."""
        lines = []
        if self.row.level is not None:
            within = "" if self.row.within is None else f", within={json.dumps(self.row.within)}"
            offload = ", offload=True" if self.row.host else ""
            lines.append(f"tx = jaxdist.zero(tx, level={self.row.level}{within}{offload})")
        if self.mesh:
            sizes = {name: int(size) for name, size in (axis.split("=") for axis in self.mesh.split(", "))}
            lines.append(f"step = jaxdist.parallel(step, mesh={json.dumps(sizes)})")
        return "; ".join(lines)


@dataclass(frozen=True)
class Option:
    """A candidate that can be compiled."""

    there: Elsewhere  # its step on the devices
    ahead: Ahead  # emitted
    level: int | None  # of ZeRO; None: as the step is written
    own: bool  # whether the step is written so
    bound: Candidate  # what it takes at least
    held: int  # bytes of values that it makes and holds at once, before a compiler has fused any

    def compile(self, began: float | None = None) -> tuple[Candidate, Needs]:
        """What it takes, and its program."""
        needs = self.there.compile(self.ahead, began)
        row = self.there.row(needs, self.level, self.own, None)
        return replace(candidate(row, self.there), mesh=self.bound.mesh), needs


def candidate(row: LevelPlan, there: Elsewhere) -> Candidate:
    """With the times of what it computes, reads and sends."""
    state = sum(row.bytes.get(name, 0) for name in STATE)
    return Candidate(**vars(times(row.flops, state, row.host, row.collectives, there.topology.machine)), row=row)


def options(there: Elsewhere, mesh: str = "") -> list[Option]:
    """A step as it is written, and at each other level and for each kind of groups; emitted, and not compiled."""
    as_written = there.emitted()
    own = there.level_of(as_written), as_written.shared
    groups = {0, there.in_host}
    levels = there.others(as_written) if there.mesh.get(AXIS, 1) > 1 else []
    wanted = {(level, shared) for level in levels for shared in (groups if level else {0})}
    found = []
    for level, shared in sorted({own, *wanted}, key=lambda one: (-1 if one[0] is None else one[0], one[1])):
        ahead = as_written if (level, shared) == own else there.emitted(level, shared)
        row = there.row(there.bound(ahead), level, (level, shared) == own, None)
        bound = replace(candidate(row, there), compiled=False, mesh=mesh)
        held = held_at_once(ahead.program.jaxpr)
        found.append(Option(there, ahead, level, (level, shared) == own, bound, held))
    return found


@dataclass(frozen=True)
class Search:
    """What has been found."""

    candidates: tuple[Candidate, ...]  # in the order of the options; those that were not compiled with their bounds
    chosen: Candidate | None  # that which fits and takes the least time; None: nothing that was compiled fits
    left: tuple[Candidate, ...]  # those that may fit in less time, but for which there was no compilation left
    expected: int = 0  # how many of these are expected to fit, by what the compiled ones need


def search(among: Sequence[Option]) -> Search:
    """Compile what may be the fastest until one that fits takes no longer than any other may.

    What is not expected to fit comes last: whether the search ends before is for the bounds to say.
    """
    there = among[0].there
    compiled: dict[int, Candidate] = {}
    ratios: dict[int, float] = {}
    waiting = [i for i, one in enumerate(among) if one.bound.row.fits]
    chosen = None

    def turn(i: int) -> tuple[bool, float, int]:
        peak = _expected(among[i], [(among[k], ratio) for k, ratio in ratios.items()])
        return order(among[i].bound.seconds, peak, among[i].bound.row.peak, there.memory)

    before = there.compilations
    while waiting and there.compilations - before < MOST:
        i = min(waiting, key=turn)
        waiting.remove(i)
        one, needs = among[i].compile(time.monotonic())
        compiled[i], ratios[i] = one, needs.temporaries / max(1, among[i].held)
        if one.row.fits and (chosen is None or (one.seconds, one.row.peak) < (chosen.seconds, chosen.row.peak)):
            chosen = one
            waiting = [k for k in waiting if among[k].bound.seconds < one.seconds]
    found = tuple(compiled.get(i, one.bound) for i, one in enumerate(among))
    expected = sum(not turn(i)[0] for i in waiting)
    return Search(found, chosen, tuple(among[i].bound for i in waiting), expected)


def _expected(one: Option, compiled: Sequence[tuple[Option, float]]) -> float:
    """Its peak, if its temporaries are as much of what it holds at once as those of the programs compiled so far: of
    the same step at other levels, if there are any."""
    ratios = [ratio for other, ratio in compiled if other.there is one.there] or [ratio for _, ratio in compiled]
    return one.bound.row.peak + (statistics.median(ratios) * one.held if ratios else 0)
