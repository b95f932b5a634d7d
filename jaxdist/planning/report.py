"""The result of `jaxdist.plan` and `jaxdist.planning.fit`, as numbers, as text and as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from jaxdist.forecast.ahead import Times
from jaxdist.machine import FRACTION, REACHED, fraction
from jaxdist.placements.search.groups import Within
from jaxdist.planning.footprint import digits, readable
from jaxdist.planning.topology import Topology
from jaxdist.text import text_of

STATE = ("parameters", "optimizer state", "other state")  # the kinds of bytes that persist between steps
_MOST = 0.95  # the share of a device's memory for a step; the driver, NCCL and kernels need the rest

_WIDTH = 160  # of a wide table


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in one step."""

    kind: str  # all-reduce, reduce-scatter, all-gather, …
    count: int  # number of runs per device
    bytes: int  # total size of the whole arrays
    sent: int  # bytes sent per device, if the library uses rings
    seconds: float  # total time, one by one at full link speed: a lower bound
    # the share of the bytes sent while the schedule computes something, or None if unknown
    overlapped: float | None
    between: int = 0  # bytes that a host (of TPUs, a slice) sends to others, for all its devices
    axis: str = ""  # the mesh axis, or several with plus signs between them


def total_of(kind: str, rows: Sequence[Traffic], axis: str = "") -> Traffic:
    """Return the sum of several rows."""
    sent = sum(row.sent for row in rows)
    known = all(row.overlapped is not None for row in rows)
    share = sum(row.sent * (row.overlapped or 0) for row in rows) / sent if sent and known else None
    return Traffic(
        kind, sum(row.count for row in rows), sum(row.bytes for row in rows), sent,
        sum(row.seconds for row in rows), share, sum(row.between for row in rows), axis,
    )  # fmt: skip


@dataclass(frozen=True)
class Candidate(Times):
    """A step at one ZeRO level, for one group size, on one mesh, with its times."""

    level: int | None  # 0 to 3, or None for the step as written
    own: bool  # whether the step is written this way
    within: Within  # the devices that share shards: None (all), ``"host"`` (or a TPU's slice), or this many in a row
    mesh: str  # its axes and their sizes, if there are several meshes
    bytes: dict[str, int]  # per device, by kind; they add up to the peak
    peak: int  # bytes per device, as XLA reports them
    fits: bool | None  # whether it fits in JAX's part of the memory, or None if it was not compiled
    traffic: tuple[Traffic, ...]  # one row per kind of collective
    flops: int  # per device and step
    host: int  # bytes of its state in host memory, not part of `bytes`
    compile_seconds: float  # to trace and compile; 0 if peak and times are lower bounds

    @property
    def total(self) -> Traffic:
        """Return the sum of all collectives."""
        return total_of("all", self.traffic)

    @property
    def name(self) -> str:
        """Return its name for a person."""
        within = f" within {self.within}" * (self.within is not None)
        level = "as written" if self.level is None else f"level {self.level}"
        return f"{level}{within}" + f", {self.mesh}" * bool(self.mesh)

    @property
    def code(self) -> str:
        """Return the code that selects it, or "" for the unmodified step."""
        lines = []
        if self.level is not None:
            within = "" if self.within is None else f", within={json.dumps(self.within)}"
            offload = ", offload=True" if self.host else ""
            lines.append(f"tx = jaxdist.zero(tx, level={self.level}{within}{offload})")
        if self.mesh:
            sizes = {name: int(size) for name, size in (axis.split("=") for axis in self.mesh.split(", "))}
            lines.append(f"step = jaxdist.parallel(step, mesh={json.dumps(sizes)})")
        return "; ".join(lines)


@dataclass(frozen=True)
class Plan:
    """A step on hypothetical devices; prints as tables."""

    step: str  # its name
    topology: Topology
    compiled_for: str  # ``"cuda"``, ``"tpu"``: with the compiler for these devices; ``"cpu"``: for virtual ones
    memory: int  # bytes of a device that JAX uses
    parameters: int  # numbers in the parameters
    batch: tuple[int, str]  # examples or tokens per step of all devices, and the unit
    mesh: Mapping[str, int]  # the sizes of its axes; neighboring devices differ in the last one
    candidates: tuple[Candidate, ...]  # ordered by mesh and level
    notes: tuple[str, ...]
    chosen: Candidate | None = None  # by `fit`: the fastest one that fits, if any
    why: str = ""  # a sentence, from `fit`
    shown: Sequence[Candidate] = field(default=(), repr=False)  # rows of the table, if not all

    @property
    def own(self) -> Candidate:
        """Return the candidate for the unmodified step."""
        return next(one for one in self.candidates if one.own)

    def missing(self, one: Candidate) -> int:
        """Return how many bytes a candidate needs beyond the memory."""
        return max(0, one.peak - self.memory)

    def to_json(self) -> str:
        """Return all figures (bytes, seconds, FLOPs, shares between 0 and 1) as a JSON object.

        ``"chosen"`` is an index into ``"candidates"``. If ``"compile_seconds"`` is 0, peak and seconds are lower bounds
        and ``"fits"`` may be null.
        """
        kind = dataclasses.asdict(self.topology.kind)
        candidates = [
            dataclasses.asdict(one)
            | {"seconds": one.seconds, "missing": self.missing(one), "code": one.code, "mesh": one.mesh or None}
            | {"traffic": [dataclasses.asdict(row) for row in (*one.traffic, one.total)]}
            for one in self.candidates
        ]
        figures = {
            "step": self.step, "compiled_for": self.compiled_for, "memory": self.memory, "reached": REACHED,
            "topology": {"hosts": self.topology.hosts, "per_host": self.topology.per_host, "kind": kind},
            "parameters": self.parameters, self.batch[1]: self.batch[0], "mesh": dict(self.mesh),
            "candidates": candidates, "chosen": self.chosen and self.candidates.index(self.chosen),
            "code": self.chosen and self.chosen.code, "why": self.why, "notes": self.notes,
        }  # fmt: skip
        return json.dumps(figures, indent=2)

    def __str__(self) -> str:
        topology, kind, (number, unit) = self.topology, self.topology.kind, self.batch
        batch = f", {number:,} {unit} per step" * bool(number)
        head = [f"step {self.step!r} on {topology} ({topology.devices} x {kind.model})"]
        head += [f"{digits(self.parameters, 3)} parameters{batch}"]
        share = f" of {readable(kind.memory)} ({FRACTION}={fraction():g})" * (kind.platform == "gpu")
        network = f", {digits(kind.network / 1e9)} GB/s per device between {topology.group}s" * (topology.hosts > 1)
        links = f"links of {digits(kind.link / 1e9)} GB/s within a {topology.group}{network}"
        speeds = (
            f"times assume {digits(kind.flops * REACHED / 1e12)} TFLOP/s, state read and written once at "
            f"{digits(kind.bandwidth / 1e9)} GB/s, {links}, and no other traffic"
        )
        mesh = [f"mesh: {', '.join(f'{name}={size}' for name, size in self.mesh.items())}"] * (len(self.mesh) > 1)
        about = [f"memory: JAX takes {readable(self.memory)}{share}", *mesh, speeds]
        about += [f"note: {note}" for note in self.notes]
        lines = [*head, text_of(self._times(), width=_WIDTH)]
        if not self.why:
            lines.append(text_of(self._traffic(), width=_WIDTH))
        if self.chosen:  # code stays on one line, to be copied
            lines.append(f"chosen: {self.chosen.code or 'the step as written'}")
        return "\n".join([*lines, text_of(*[f"why: {self.why}"] * bool(self.why), *about, width=100)])

    def _times(self) -> Table:
        """Tabulate memory and time of each candidate."""
        table = Table(box=None, pad_edge=False)
        hidden = ["hidden"] * (self.compiled_for != "cpu")
        names = ("one device", "parameters", "optimizer", "peak", "fits", "compute", "messages", *hidden, "step, ms")
        for name in (*names, f"{self.batch[1]}/s", ""):
            table.add_column(name, justify="left" if name in ("one device", "") else "right", no_wrap=True)
        for one in self.shown or self.candidates:
            least, most = ("", "") if one.compile_seconds else ("> ", "< ")
            seconds = (one.compute + one.state, one.in_host + one.between, *[one.hidden] * len(hidden))
            rate = most + digits(self.batch[0] / one.seconds) if self.batch[0] else ""
            said = ["chosen"] * (one is self.chosen) + ["this step"] * (one.own and not one.mesh)
            table.add_row(
                one.name, *(readable(one.bytes.get(kind, 0)) for kind in STATE[:2]), least + readable(one.peak),
                self.fit(one), *(digits(1e3 * x) for x in seconds), least + digits(1e3 * one.seconds), rate,
                ", ".join(said),
            )  # fmt: skip
        return table

    def fit(self, one: Candidate) -> str:
        """Describe whether a candidate fits."""
        if one.fits or one.fits is None:
            return "yes" if one.fits else ""
        needed = one.peak / self.topology.kind.memory
        if needed <= _MOST and self.topology.kind.platform == "gpu":
            return f"with {needed:.2f} of it"
        return f"lacks {readable(self.missing(one))}"

    def _traffic(self) -> Table:
        table = Table(box=None, pad_edge=False)
        hosts, axes = self.topology.hosts > 1, len(self.mesh) > 1
        for name in ("collectives", *["axis"] * axes, ""):
            table.add_column(name)
        for name in ("count", "sent", *[f"between {self.topology.group}s"] * hosts, "time", "overlapped"):
            table.add_column(name, justify="right")
        for one in self.candidates:
            for i, row in enumerate((*one.traffic, one.total) if len(one.traffic) > 1 else one.traffic):
                share = "" if row.overlapped is None else f"{row.overlapped:.0%}"
                sizes = map(readable, (row.sent, *[row.between] * hosts))
                cells = (str(row.count), *sizes, duration(row.seconds), share)
                table.add_row(one.name if i == 0 else "", *[row.axis] * axes, row.kind, *cells)
        return table


def duration(seconds: float) -> str:
    """Format seconds for a person."""
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(seconds * 1e3)} ms"
