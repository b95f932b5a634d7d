"""What `jaxdist.plan` has found, as numbers, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from jaxdist.machine import FRACTION, fraction
from jaxdist.mesh import Axis, along
from jaxdist.placements.groups import Within
from jaxdist.planning import schedule
from jaxdist.planning.memory import readable
from jaxdist.planning.topology import Topology
from jaxdist.text import text_of

STATE = ("parameters", "optimizer state", "other state")
"""The kinds of bytes that are kept from step to step."""
_MOST = 0.95
"""The part of a device's memory for the step; the rest is for the driver, NCCL and the kernels themselves."""


def total_of(kind: str, rows: Sequence[Traffic], axis: str = "") -> Traffic:
    sent = sum(row.sent for row in rows)
    known = all(row.overlapped is not None for row in rows)
    share = sum(row.sent * (row.overlapped or 0) for row in rows) / sent if sent and known else None
    return Traffic(
        kind, sum(row.count for row in rows), sum(row.bytes for row in rows), sent,
        sum(row.seconds for row in rows), share, sum(row.between for row in rows), axis,
    )  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in one step."""

    kind: str  # all-reduce, reduce-scatter, all-gather, …
    count: int  # how many a device takes part in
    bytes: int  # of the whole arrays, all of them together
    sent: int  # bytes that a device sends, if the library takes rings
    seconds: float  # that they take one after another, at the full speed of the links: a lower bound
    # the share of the bytes sent during which the schedule has something to compute; None: not known
    overlapped: float | None
    between: int = 0  # bytes that a host sends to others, all its devices together
    axis: str = ""  # of the mesh, along which it runs; several with plus signs between them


@dataclass(frozen=True)
class LevelPlan:
    """A step at one ZeRO level."""

    level: int | None  # 0 to 3; None: as the step is written
    own: bool  # whether it is the one the step is written with
    bytes: dict[str, int]  # on one device, by kind; together they are the peak
    peak: int  # bytes on one device, by XLA's own account
    fits: bool  # in what JAX takes of the device's memory
    traffic: tuple[Traffic, ...]  # one row for each kind of collective
    collectives: tuple[schedule.Collective, ...]  # each one, as compiled
    compile_seconds: float  # that it took to trace and compile
    # which devices share what is kept in shards: None: all; ``"host"``, or a number: so many in a row
    within: Within = None
    flops: int = 0  # of a device in a step
    host: int = 0  # bytes of its state in the host's memory, which are not in `bytes`

    def figures(self) -> dict[str, Any]:
        """Bytes, seconds, shares between 0 and 1."""
        return {
            "level": self.level, "within": self.within, "own": self.own, "bytes": self.bytes, "peak": self.peak,
            "fits": self.fits, "flops": self.flops, "host": self.host,
            "traffic": [dataclasses.asdict(row) for row in (*self.traffic, self.total)],
            "compile_seconds": self.compile_seconds,
        }  # fmt: skip

    @property
    def total(self) -> Traffic:
        """The sum of all collectives."""
        return total_of("all", self.traffic)

    @property
    def name(self) -> str:
        """For a person."""
        within = "" if self.within is None else f" within {self.within}"
        return ("as written" if self.level is None else f"level {self.level}") + within


@dataclass(frozen=True)
class Plan:
    """What a step takes; prints as tables."""

    step: str  # its name
    topology: Topology  # for which it was compiled
    compiled_for: str  # ``"cuda"``: by the compiler for these GPUs; ``"cpu"``: for as many virtual CPU devices
    memory: int  # bytes of a device that JAX takes
    levels: tuple[LevelPlan, ...]  # the step at each ZeRO level asked for
    notes: tuple[str, ...]  # what is not as it could be
    # the sizes of its axes; neighbouring devices differ in the last one
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def own(self) -> LevelPlan:
        """The step as it is written."""
        return next(one for one in self.levels if one.own)

    def figures(self) -> dict[str, Any]:
        """Bytes, seconds, shares between 0 and 1."""
        kind = dataclasses.asdict(self.topology.kind)
        del kind["target"]
        topology = {"hosts": self.topology.hosts, "per_host": self.topology.per_host, "kind": kind}
        return {
            "step": self.step, "topology": topology, "compiled_for": self.compiled_for, "memory": self.memory,
            "levels": [one.figures() for one in self.levels], "notes": self.notes, "mesh": dict(self.mesh),
        }  # fmt: skip

    def to_json(self) -> str:
        """All figures as a JSON object."""
        return json.dumps(self.figures(), indent=2)

    def __str__(self) -> str:
        return text_of(self.headline, self._bytes(), self._traffic(), *self.assumed, width=120)

    @property
    def headline(self) -> str:
        """The first line: which step on which devices."""
        return f"step {self.step!r} on {self.topology}: {self.topology.devices} devices ({self.topology.kind.model})"

    @property
    def assumed(self) -> list[str]:
        """Memory, links and notes, for a person."""
        kind = self.topology.kind
        share = "" if kind.name == "cpu" else f" of {readable(kind.memory)} ({FRACTION}={fraction():g})"
        return [
            f"memory: JAX takes {readable(self.memory)}{share}",
            *self._axes(),
            f"links: {self.topology.links}; times are for these speeds and nothing else on the way",
            *(f"note: {note}" for note in self.notes),
        ]

    def _axes(self) -> list[str]:
        """Where the axes of a mesh of several lie."""
        axes, every = [Axis(name, size) for name, size in self.mesh.items()], (range(self.topology.devices),)
        where = lambda axis: self.topology.machine.crossings(along(axes, [axis.name]) or every)
        lie = [f"{one.name}={one.size} ({'between hosts' if where(one) else 'within a host'})" for one in axes]
        return [f"mesh: {', '.join(lie)}"] if len(axes) > 1 else []

    def _bytes(self) -> Table:
        table = Table(title="bytes on one device")
        table.add_column("")
        for one in self.levels:
            table.add_column(one.name + " (this step)" * (one.own and one.level is not None), justify="right")
        for kind in dict.fromkeys(kind for one in self.levels for kind in one.bytes):
            sizes = (one.bytes.get(kind) for one in self.levels)
            table.add_row(kind, *("" if size is None else readable(size) for size in sizes))
        table.add_section()
        table.add_row("peak", *(readable(one.peak) for one in self.levels))
        table.add_row("fits", *(self.fits(one) for one in self.levels))
        if any(one.host for one in self.levels):
            table.add_section()
            table.add_row("in the host's memory", *(readable(one.host) for one in self.levels))
        return table

    def fits(self, one: LevelPlan) -> str:
        """Whether a level fits, for a person."""
        if one.fits or self.topology.kind.is_cpu:
            return "yes" if one.fits else "no"
        needed = one.peak / self.topology.kind.memory
        return f"with {needed:.2f} of the memory" if needed <= _MOST else "no"

    def _traffic(self) -> Table:
        table = Table(title="collectives in one step, of one device")
        table.add_column("")
        several = len(self.mesh) > 1
        for name in ("axis", "collective") if several else ("collective",):
            table.add_column(name)
        between = ["between hosts"] if self.topology.hosts > 1 else []
        for name in ("count", "whole arrays", "sent", *between, "time", "overlapped"):
            table.add_column(name, justify="right")
        for one in self.levels:
            table.add_section()
            rows = (*one.traffic, one.total) if len(one.traffic) > 1 else one.traffic or (one.total,)
            for i, row in enumerate(rows):
                share = "" if row.overlapped is None else f"{row.overlapped:.0%}"
                sizes = map(readable, (row.bytes, row.sent, *([row.between] if between else [])))
                cells = (str(row.count), *sizes, duration(row.seconds), share)
                table.add_row(one.name if i == 0 else "", *[row.axis] * several, row.kind, *cells)
        return table


def duration(seconds: float) -> str:
    """For a person."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
