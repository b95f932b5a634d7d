"""A step on devices that are not here: emitted, compiled, and what is read off either."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxdist import compat
from jaxdist.ir.wire import Collective
from jaxdist.machine import VIRTUAL
from jaxdist.mesh import AXIS, GROUP, Axis, Sizes, along, along_data, in_host, mesh_of
from jaxdist.placements.marks import HOST
from jaxdist.planning import schedule
from jaxdist.planning.footprint import readable
from jaxdist.planning.report import Candidate, Plan, Traffic, duration, total_of
from jaxdist.planning.topology import Topology
from jaxdist.step.calling import AUTO
from jaxdist.step.choice import chosen, meshes, times
from jaxdist.step.decorated import DataParallel
from jaxdist.step.forecast import Ahead, Forecast, Held

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Needs:
    """What a step needs of a device."""

    ahead: Ahead  # the step
    collectives: tuple[Collective, ...]  # of the program
    results: int  # bytes of those that do not take an argument's place
    peak: int  # bytes on a device
    seconds: float  # that it took to find out; 0: these are lower bounds

    @property
    def temporaries(self) -> int:
        """What is neither argument nor result."""
        return self.peak - self.results - sum(x.bytes for x in self.ahead.arguments if not x.host)


class Elsewhere:
    """A step, its arguments, and the devices that it is planned for."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        topology: str,
        levels: Sequence[int],
        mesh: Sizes | Literal["auto"] | None = None,
    ) -> None:
        self.topology = Topology.parse(topology)
        if unknown := [level for level in levels if level not in LEVELS]:
            raise ValueError(f"levels: there is no ZeRO level {unknown[0]!r}; valid: 0, 1, 2, 3")
        if isinstance(step, functools.partial) and not step.keywords:  # a decorated method
            step, args = step.func, (*step.args, *args)
        if not isinstance(step, DataParallel):
            raise TypeError(f"a plan is of a step decorated with jaxdist.data_parallel, not of {step!r}")
        self._levels, self._step = levels, step
        self._programs: dict[Any, Needs] = {}
        self.memory = self.topology.kind.usable
        devices, self.compiled_for, self.notes = _devices(self.topology)
        wanted = step.mesh if mesh is None else mesh
        given = None if wanted == AUTO else wanted
        sizes = dict(given.shape) if isinstance(given, Mesh) else given or {AXIS: -1}
        self._mesh = mesh_of({AXIS: -1} if tuple(sizes) == (AXIS,) and mesh is None else sizes, devices, topology)
        self._forecast: Forecast = step.forecast(self._mesh, self.topology.machine, args)
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

    @property
    def in_host(self) -> int:
        """How many devices along the axis of data are of one host; 0: all, one, or not as many of each."""
        return in_host(along_data(self._mesh, self.topology.on))

    @property
    def compilations(self) -> int:
        """How many there have been."""
        return len(self._programs)

    def emitted(self, level: int | None = None, shared: int | None = None) -> Ahead:
        """The step for these devices: as written, or at another level, for other groups."""
        return self._forecast.ahead(level, shared)

    def compile(self, ahead: Ahead) -> Needs:
        """What it needs, by XLA's own account."""
        began = time.monotonic()
        # Levels 1 and 2 are often one program, and its compilation is most of the time.
        key = hashlib.sha256(ahead.lowered.as_text().encode()).digest(), ahead.arguments
        if key not in self._programs:
            with _silence() if self.compiled_for == "cuda" else contextlib.nullcontext():
                compiled = ahead.lowered.compile()
            self._programs[key] = _read(compiled, ahead, self._mesh.size, self.compiled_for == "cpu")
        return dataclasses.replace(self._programs[key], ahead=ahead, seconds=time.monotonic() - began)

    def bound(self, ahead: Ahead) -> Needs:
        """What it needs at least: arguments and results without temporaries; collectives as XLA may merge them."""
        machine = VIRTUAL if self.compiled_for == "cpu" else self.topology.machine
        return Needs(ahead, ahead.sent(machine), ahead.results, ahead.least, 0.0)

    def level_of(self, written: Ahead) -> int | None:
        """The level of the step as it is written; None: there is not just one."""
        return next(iter(written.levels)) if len(written.levels) == 1 else None

    def others(self, written: Ahead) -> list[int]:
        """The levels that were asked for and that the step can have; a note says why not the rest."""
        levels, own = list(self._levels), self.level_of(written)
        if not written.levels:
            if levels:
                self.note("the step does not use jaxdist.zero: there are no other levels to compare it with")
            return []
        if own is None:
            several = sorted(written.levels)
            self.note(f"the step uses jaxdist.zero at several levels, {several}: each in turn for all of it")
        if 3 in levels and not written.knows_parameters and own != 3:
            self.note(
                "no level 3: no argument of the step has the updates added; pass them: "
                "tx.update(grads, opt_state, params)"
            )
            levels = [level for level in levels if level != 3]
        return levels

    def note(self, text: str) -> None:
        """Say it, once."""
        if text not in self.notes:
            self.notes.append(text)

    def candidate(self, needs: Needs, level: int | None, own: bool, mesh: str = "") -> Candidate:
        """A program as a row of the report."""
        ahead, machine = needs.ahead, self.topology.machine
        sizes: dict[str, int] = dict.fromkeys(("parameters", "optimizer state", "other state", "batch"), 0)
        for x in ahead.arguments:
            sizes[_kind(x)] += 0 if x.host else x.bytes
        sizes |= {"temporaries": needs.temporaries, "results": needs.results}
        kept = {kind: size for kind, size in sizes.items() if size or kind not in ("other state", "results")}
        rows: dict[tuple[str, str], list[Traffic]] = {}
        for c in needs.collectives:
            if c.devices > 1:
                overlapped = float(c.overlapped) if self.compiled_for == "cuda" else None
                between, seconds = c.sent * machine.crossings(c.groups), c.seconds(machine)
                traffic = Traffic(c.kind, c.times, c.times * c.bytes, c.sent, seconds, overlapped, between)
                rows.setdefault((self._axes(c, ahead.axes), c.kind), []).append(traffic)
        fits, shared = needs.peak <= self.memory, ahead.shared
        return Candidate(
            **vars(times(ahead.flops, ahead.state, ahead.away, needs.collectives, machine)), level=level, own=own,
            within=None if not shared else HOST if shared == self.in_host else shared, mesh=mesh, bytes=kept,
            peak=needs.peak, fits=fits if needs.seconds or not fits else None,
            traffic=tuple(total_of(kind, found, axis) for (axis, kind), found in sorted(rows.items())),
            flops=ahead.flops, host=ahead.away, compile_seconds=needs.seconds,
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

    def plan(self, written: Ahead, found: Sequence[Candidate], **more: Any) -> Plan:
        """The whole of it."""
        if most := max((one.host for one in found), default=0):
            speed = self.topology.kind.host
            self.note(
                f"up to {readable(most)} of a device's state are in the host's memory; moving them both ways takes "
                f"{duration(2 * most / speed)} of each step at PCIe's full speed, and more if devices share it"
            )
            if self.compiled_for == "cpu":
                self.note("XLA for CPUs makes no such copies: if they are larger, they are the temporaries")
        pairs = zip(written.arguments, self._forecast.leaves, strict=True)
        parameters = sum(math.prod(jnp.shape(leaf)) for x, leaf in pairs if _kind(x) == "parameters")
        batch = self._forecast.batch
        tokens = [x.size for x in batch if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer)]
        size = (tokens[0], "tokens") if tokens else (batch[0].shape[0] if batch else 0, "examples")
        return Plan(
            getattr(self._step, "__name__", "step"), self.topology, self.compiled_for, self.memory, parameters, size,
            self.mesh, tuple(found), tuple(self.notes), **more,
        )  # fmt: skip


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """XLA for GPUs complains on standard error about each program that does not fit."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _devices(topology: Topology) -> tuple[list[Any], str, list[str]]:
    """Devices to compile for, of which platform, and what there is to say about it."""
    notes = []
    if not topology.kind.is_cpu:
        try:
            return compat.gpus_elsewhere(topology.kind.target, topology.hosts, topology.per_host), "cuda", notes
        except ImportError as error:
            reason = str(error).splitlines()[0]
            notes.append(
                f"compiled for {topology.devices} virtual CPU devices, without JAX's compiler for NVIDIA GPUs "
                f"({reason}): temporaries differ, sums in 16 bits count as 32, and no overlap is known. No GPU is "
                "needed for it: pip install 'jaxdist[cuda12]'"
            )
    elif topology.hosts > 1:
        notes.append("compiled for virtual devices in one process; real gloo or MPI traffic differs")
    return compat.cpus_elsewhere(topology.devices), "cpu", notes


def _read(compiled: Any, ahead: Ahead, devices: int, on_cpu: bool) -> Needs:
    """What a compiled program needs."""
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
    return Needs(ahead, tuple(schedule.collectives(compiled.as_text(), devices)), results, peak, 0.0)


def _kind(x: Held) -> str:
    roles = {"batch": "batch", "parameter": "parameters", "state": "optimizer state"}
    if x.role in roles:
        return roles[x.role]
    if re.search(r"\bopt(imizer)?(_?state)?\b", x.name):
        return "optimizer state"
    return "parameters" if re.search(r"\bparam(s|eters)?\b", x.name) else "other state"
