"""A step on devices that are not here: emitted, compiled, and what is read off either."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import Mesh

from jaxdist import compat
from jaxdist.errors import in_words
from jaxdist.ir.wire import Collective
from jaxdist.machine import VIRTUAL, Machine
from jaxdist.mesh import AXIS, GROUP, Axis, Sizes, along, along_data, data_size, in_host, mesh_of
from jaxdist.placements.groups import HOST
from jaxdist.planning import schedule
from jaxdist.planning.memory import readable
from jaxdist.planning.report import LevelPlan, Plan, Traffic, duration, total_of
from jaxdist.planning.topology import Topology
from jaxdist.step.choice import chosen, meshes
from jaxdist.step.decorated import DataParallel
from jaxdist.step.forecast import Ahead, Forecast, Held
from jaxdist.step.settings import AUTO

LEVELS = (0, 1, 2, 3)


class Elsewhere:
    """A step, its arguments, and the devices that it is planned for."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        topology: str | Topology,
        levels: Sequence[int],
        mesh: Sizes | Literal["auto"] | None = None,
    ) -> None:
        self.topology = Topology.parse(topology) if isinstance(topology, str) else topology
        if unknown := [level for level in levels if level not in LEVELS]:
            raise ValueError(f"levels: there is no ZeRO level {unknown[0]!r}; valid: 0, 1, 2, 3")
        self._levels = levels
        self._programs: dict[Any, Needs] = {}
        self.memory = self.topology.kind.usable
        step, args = _decorated(step, args)
        devices, self.compiled_for, self.notes = _devices(self.topology)
        wanted = step.mesh if mesh is None else mesh
        given = None if wanted == AUTO else wanted
        sizes = dict(given.shape) if isinstance(given, Mesh) else given or {AXIS: -1}
        self._mesh = mesh_of({AXIS: -1} if tuple(sizes) == (AXIS,) and mesh is None else sizes, devices, topology)
        self._step, self._args, self._forecast = step, args, self._forecast_of(step, args)
        if wanted == AUTO:
            on = lambda sizes: self.on(sizes)._forecast
            self._mesh = chosen(on, self.meshes() or [{AXIS: -1}], self.topology.machine).mesh
            self._forecast = self._forecast.on(self._mesh)

    def on(self, mesh: Sizes) -> Elsewhere:
        """The same step on the same devices in another mesh; what has been compiled they have in common."""
        other = copy.copy(self)
        other._mesh = mesh_of(mesh, list(self._mesh.devices.flat), self.topology)
        other._forecast = self._forecast.on(other._mesh)
        return other

    @property
    def mesh(self) -> dict[str, int]:
        """The axes and their sizes."""
        return dict(self._mesh.shape)

    @property
    def repeats(self) -> bool:
        """Whether the model axis cuts nothing: each device along it does the same."""
        return self._forecast.repeats

    def meshes(self) -> list[dict[str, int]]:
        """Meshes that may be chosen (see `jaxdist.step.choice.meshes`)."""
        return list(meshes(self.topology.devices, self.topology.per_host, self._forecast.batch))

    def _forecast_of(self, step: DataParallel, args: tuple[Any, ...]) -> Forecast:
        return step.forecast(self._mesh, self.topology.machine, args)

    @property
    def in_host(self) -> int:
        """How many devices along the axis of data are of one host; 0: all, one, or not as many of each."""
        return in_host(along_data(self._mesh, self.topology.on))

    @property
    def compilations(self) -> int:
        """How many there have been."""
        return len(self._programs)

    def emitted(self, level: int | None = None, shared: int | None = None, scale: float = 1) -> Ahead:
        """The step for these devices: as written, or at another level, for other groups, for another batch."""
        return self._forecast.ahead(level, shared, scale)

    def compiled(self, level: int | None = None, shared: int | None = None, scale: float = 1) -> Needs:
        """The same, compiled."""
        began = time.monotonic()
        return self.compile(self.emitted(level, shared, scale), began)

    def compile(self, ahead: Ahead, began: float | None = None) -> Needs:
        """What it needs, by XLA's own account."""
        began = time.monotonic() if began is None else began
        # Levels 1 and 2 are often one program, and its compilation is most of the time.
        key = hashlib.sha256(ahead.lowered.as_text().encode()).digest(), ahead.arguments
        if key not in self._programs:
            self._programs[key] = Needs.compiled(ahead, self._mesh.size, began, self.compiled_for == "cpu")
            return self._programs[key]
        return dataclasses.replace(self._programs[key], ahead=ahead, seconds=time.monotonic() - began)

    def bound(self, ahead: Ahead) -> Needs:
        """What it needs at least, before it is compiled."""
        return Needs.bound(ahead, VIRTUAL if self.compiled_for == "cpu" else self.topology.machine)

    def level_of(self, written: Ahead) -> int | None:
        """The level of the step as it is written; None: there is not just one."""
        return next(iter(written.levels)) if len(written.levels) == 1 else None

    def others(self, written: Ahead) -> list[int]:
        """The levels that were asked for and that the step can have; a note says why not the rest."""
        levels, own = list(self._levels), self.level_of(written)
        if not written.levels:
            self.note("the step does not use jaxdist.zero: there are no other levels to compare it with")
            return []
        if own is None:
            several = sorted(written.levels)
            self.note(f"the step uses jaxdist.zero at several levels, {several}: each in turn for all of it")
        if 3 in levels and not written.knows_parameters and own != 3:
            self.note(
                "no level 3: no argument of the step has the updates added; tell which: "
                "tx.update(grads, opt_state, params)"
            )
            levels = [level for level in levels if level != 3]
        return levels

    def note(self, text: str) -> None:
        """Say it, once."""
        if text not in self.notes:
            self.notes.append(text)

    def activations(self, written: Needs) -> int | None:
        """Bytes of temporaries that are proportional to the batch; None: they are not known, and a note says why."""
        problem = ""
        rows, n = self._forecast.examples, data_size(self._mesh)
        fewer = rows - n * round(rows / (2 * n))  # about half, of which as many devices have one less
        likened = fewer if 0 < fewer < rows else rows + n
        for factor in dict.fromkeys((likened / rows, 2.0, 0.5)):
            try:
                other = self.compiled(scale=factor)
            except Exception as error:  # whatever a step makes of a batch of another size
                problem = problem or in_words(error).splitlines()[0]
                continue
            slope = (other.temporaries - written.temporaries) / (factor - 1)
            return min(max(0, round(slope)), written.temporaries)
        self.note(f"activations are not told apart: the step can't be compiled for another batch ({problem})")
        return None

    def row(self, one: Needs, level: int | None, own: bool, activations: int | None) -> LevelPlan:
        """What a program needs, for a person."""
        sizes: dict[str, int] = dict.fromkeys(("parameters", "optimizer state", "other state", "batch"), 0)
        for x in one.ahead.arguments:
            sizes[_kind(x)] += 0 if x.host else x.bytes
        if activations is None:
            sizes["gradients, activations, temporaries"] = one.temporaries
        else:
            held = min(activations, one.temporaries)
            sizes["gradients and temporaries"] = one.temporaries - held
            sizes["activations"] = held
        sizes["results"] = one.results
        kept = {kind: size for kind, size in sizes.items() if size or kind not in ("other state", "results")}
        rows: dict[tuple[str, str], list[Traffic]] = {}
        for c in one.collectives:
            if c.devices > 1:
                traffic = traffic_of(c, self.topology, self.compiled_for == "cuda")
                rows.setdefault((self._axes(c, one.ahead.axes), c.kind), []).append(traffic)
        traffic = tuple(total_of(kind, several, axes) for (axes, kind), several in rows.items())
        shared = one.ahead.shared
        within = None if not shared else HOST if shared == self.in_host else shared
        return LevelPlan(
            level, own, kept, one.peak, one.peak <= self.memory, traffic, one.collectives, one.seconds, within,
            one.ahead.flops, one.ahead.away,
        )  # fmt: skip

    def _axes(self, c: Collective, axes: Sequence[Axis]) -> str:
        """The axes along which the devices of a collective differ, of a mesh of several; "": of no such groups."""
        groups = {frozenset(group) for group in c.groups}
        for k in range(1, 1 + len(axes) * (len(self._mesh.shape) > 1)):
            for names in itertools.combinations([axis.name for axis in axes if axis.size > 1], k):
                alike = along(axes, names) or (range(self._mesh.size),)
                if {frozenset(group) for group in alike} == groups:
                    return "+".join(dict.fromkeys(AXIS if name == GROUP else name for name in names))
        return ""

    def plan(self, found: Sequence[LevelPlan]) -> Plan:
        """The whole of it."""
        name, speed = getattr(self._step, "__name__", "step"), self.topology.kind.host
        if most := max((one.host for one in found), default=0):
            self.note(
                f"up to {readable(most)} of a device's state are in the host's memory; to bring them and to put them "
                f"back takes {duration(2 * most / speed)} of each step at PCIe's full speed, {speed / 1e9:g} GB/s, and "
                "more if devices share it"
            )
            if self.compiled_for == "cpu":
                self.note("XLA for CPUs makes no such copies: where they are larger, they are the temporaries")
        mesh = dict(self._mesh.shape)
        return Plan(name, self.topology, self.compiled_for, self.memory, tuple(found), tuple(self.notes), mesh)


def _decorated(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[DataParallel, tuple[Any, ...]]:
    if isinstance(step, functools.partial) and not step.keywords:  # a decorated method
        step, args = step.func, (*step.args, *args)
    if not isinstance(step, DataParallel):
        raise TypeError(f"a plan is of a step decorated with jaxdist.data_parallel, not of {step!r}")
    return step, args


def _devices(topology: Topology) -> tuple[list[Any], str, list[str]]:
    """Devices to compile for, of which platform, and what there is to say about it."""
    notes = []
    if not topology.kind.is_cpu:
        try:
            return compat.gpus_elsewhere(topology.kind.target, topology.hosts, topology.per_host), "cuda", notes
        except ImportError as error:
            reason = str(error).splitlines()[0]
            notes.append(
                f"compiled for {topology.devices} virtual CPU devices, for want of JAX's compiler for NVIDIA GPUs "
                f"({reason}): temporaries are those of another compiler, sums in 16 bits travel in 32, and no overlap "
                "is known. No GPU is needed for it: pip install 'jaxdist[cuda12]'"
            )
    elif topology.hosts > 1:
        notes.append("compiled as for virtual devices of one process; gloo and MPI between hosts send other messages")
    return compat.cpus_elsewhere(topology.devices), "cpu", notes


@dataclass(frozen=True)
class Needs:
    """What a step needs of a device."""

    ahead: Ahead  # the step
    collectives: tuple[Collective, ...]  # of the program
    results: int  # bytes of those that do not take an argument's place
    peak: int  # bytes on a device
    seconds: float  # that it took to find out

    @classmethod
    def compiled(cls, ahead: Ahead, devices: int, began: float, on_cpu: bool) -> Needs:
        """Compile it, and read it."""
        compiled = ahead.lowered.compile()
        analysis = compiled.memory_analysis()
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        held, offloaded = (sum(x.bytes for x in ahead.arguments if x.host == host) for host in (False, True))
        arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
        if offloaded and on_cpu:  # XLA's account for CPUs knows one memory, and no copies from one to the other
            arguments, temporaries = held, max(temporaries, offloaded)
        # What is allocated: XLA takes its temporaries as one block. Its `peak_memory_in_bytes` is how much of them is
        # in use at once, a little less (and on CPUs it leaves them out).
        peak = arguments + results + temporaries
        # Arguments that the step does not use are not the program's, and still there.
        peak += max(0, held - arguments)
        found = tuple(schedule.collectives(compiled.as_text(), devices))
        return cls(ahead, found, results, peak, time.monotonic() - began)

    @classmethod
    def bound(cls, ahead: Ahead, machine: Machine) -> Needs:
        """At least: arguments and results without temporaries; collectives as XLA may merge them."""
        return cls(ahead, ahead.sent(machine), ahead.results, ahead.least, 0.0)

    @property
    def temporaries(self) -> int:
        """What is neither argument nor result."""
        return self.peak - self.results - sum(x.bytes for x in self.ahead.arguments if not x.host)


def _kind(x: Held) -> str:
    roles = {"batch": "batch", "parameter": "parameters", "state": "optimizer state"}
    if x.role in roles:
        return roles[x.role]
    if re.search(r"\bopt(imizer)?(_?state)?\b", x.name):
        return "optimizer state"
    return "parameters" if re.search(r"\bparam(s|eters)?\b", x.name) else "other state"


def traffic_of(c: Collective, topology: Topology, scheduled: bool) -> Traffic:
    """What a collective sends, and how long that takes."""
    overlapped = float(c.overlapped) if scheduled else None
    between = c.sent * topology.machine.crossings(c.groups)
    return Traffic(c.kind, c.times, c.times * c.bytes, c.sent, c.seconds(topology.machine), overlapped, between)
