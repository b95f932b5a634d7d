"""A step on hypothetical devices: emit it, compile it, and read figures from both."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxdist import compat, streams
from jaxdist.compilation.calling import AUTO
from jaxdist.device_map import DeviceMap
from jaxdist.extras import libtpu_problem
from jaxdist.forecast.ahead import Ahead, Held
from jaxdist.forecast.choice import Forecast, fastest, meshes
from jaxdist.ir.wire import Collective
from jaxdist.machine import VIRTUAL
from jaxdist.mesh import AXIS, GROUP, Sizes, axes_of_groups, mesh_of, on_each_host
from jaxdist.placements.search.groups import HOST
from jaxdist.planning import schedule
from jaxdist.planning.footprint import readable
from jaxdist.planning.report import Candidate, Plan, Traffic, duration, total_of
from jaxdist.planning.topology import Topology, target
from jaxdist.step.decorated import DataParallel

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Needs:
    """The resources that a step needs on a device."""

    ahead: Ahead  # the step
    collectives: tuple[Collective, ...]  # of its program
    results: int  # bytes of results that do not reuse an argument's memory
    peak: int  # bytes on a device
    seconds: float  # time to trace and compile; 0 if these are lower bounds

    @property
    def temporaries(self) -> int:
        """Return the bytes that are neither arguments nor results."""
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
            raise ValueError(f"levels: {unknown[0]!r} is not a ZeRO level; valid: 0, 1, 2, 3")
        if isinstance(step, functools.partial) and not step.keywords:  # a decorated method
            step, args = step.func, (*step.args, *args)
        if not isinstance(step, DataParallel):
            raise TypeError(f"expected a step decorated with jaxdist.data_parallel, not {step!r}")
        self._levels, self._step = levels, step
        self.programs: dict[Any, Needs] = {}  # those compiled so far
        self.memory = self.topology.kind.usable
        devices, self.compiled_for, self.notes = _devices(self.topology)
        wanted = step.mesh if mesh is None else mesh
        given = None if wanted == AUTO else wanted
        sizes = dict(given.shape) if isinstance(given, Mesh) else given or {AXIS: -1}
        first = mesh_of({AXIS: -1} if tuple(sizes) == (AXIS,) and mesh is None else sizes, devices, topology)
        self.forecast: Forecast = step.forecast(first, self.topology.machine, args, {}, False)
        if wanted == AUTO:
            on = lambda sizes: self.on(sizes).forecast
            self.forecast = on(fastest(on, self.meshes() or [{AXIS: -1}], self.topology.machine).mesh.shape)

    def on(self, mesh: Sizes) -> "Elsewhere":
        """Return the step on the same devices in a different mesh; both share compiled programs."""
        other = copy.copy(self)
        devices = list(self.forecast.mesh.devices.flat)
        other.forecast = self.forecast.on(mesh_of(mesh, devices, self.topology))
        return other

    def meshes(self) -> list[dict[str, int]]:
        """Return the meshes to choose from (see `jaxdist.forecast.choice.meshes`)."""
        return list(meshes(self.topology.devices, self.topology.per_host, self.forecast.batch))

    @property
    def in_host(self) -> int:
        """Return how many devices per host the data axis has, or 0 if all, one, or unequal."""
        hosts = DeviceMap.of(self.forecast.mesh, self.topology.on).hosts_of_parts
        size = on_each_host(hosts)
        return size if 1 < size < len(hosts) else 0

    def compile(self, ahead: Ahead) -> Needs:
        """Compile a step and return its needs as XLA reports them."""
        began = time.monotonic()
        # Levels 1 and 2 are often one program, and its compilation is most of the time.
        lowered = ahead.program.lower()
        key = hashlib.sha256(lowered.as_text().encode()).digest(), ahead.arguments
        if key not in self.programs:
            least = ahead.least + ahead.held_at_once
            if (compiled := _compiled(lowered, self.compiled_for, least > self.memory)) is None:
                self.note("XLA for TPUs compiles no program with arrays that do not fit: its peak is estimated")
                self.programs[key] = dataclasses.replace(self.bound(ahead), peak=max(least, self.memory + 1))
            else:
                self.programs[key] = _read(compiled, ahead, self.topology.devices, self.compiled_for == "cpu")
        return dataclasses.replace(self.programs[key], ahead=ahead, seconds=time.monotonic() - began)

    def bound(self, ahead: Ahead) -> Needs:
        """Return lower bounds: arguments and results without temporaries; merged collectives."""
        machine = VIRTUAL if self.compiled_for == "cpu" else self.topology.machine
        return Needs(ahead, ahead.sent(machine), ahead.results, ahead.least, 0.0)

    def level_of(self, written: Ahead) -> int | None:
        """Return the level of the step as written, or None if it uses several."""
        return next(iter(written.levels)) if len(written.levels) == 1 else None

    def others(self, written: Ahead) -> list[int]:
        """Return the requested levels that the step can have; notes explain missing ones."""
        levels, own = list(self._levels), self.level_of(written)
        if not written.levels:
            if levels:
                self.note("the step does not use jaxdist.zero, so it cannot run at other levels")
            return []
        if own is None:
            several = sorted(written.levels)
            self.note(f"the step uses jaxdist.zero at levels {several}; candidates use one")
        if 3 in levels and own != 3 and not any(x.role == "parameter" for x in written.arguments):
            self.note(
                "cannot plan level 3: no argument of the step receives the updates. Use "
                "tx.update(grads, opt_state, params)"
            )
            levels = [level for level in levels if level != 3]
        return levels

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def candidate(self, needs: Needs, level: int | None, own: bool, mesh: str = "") -> Candidate:
        """Make a program a row of the report."""
        ahead, machine = needs.ahead, self.topology.machine
        sizes: dict[str, int] = dict.fromkeys(("parameters", "optimizer state", "other state", "batch"), 0)
        for x in ahead.arguments:
            sizes[_kind(x)] += 0 if x.host else x.bytes
        sizes |= {"temporaries": needs.temporaries, "results": needs.results}
        kept = {kind: size for kind, size in sizes.items() if size or kind not in ("other state", "results")}
        rows: dict[tuple[str, str], list[Traffic]] = {}
        for c in needs.collectives:
            if c.devices > 1:
                overlapped = None if self.compiled_for == "cpu" else float(c.overlapped)
                between, seconds = c.sent * machine.crossings(c.groups), c.seconds(machine)
                traffic = Traffic(c.kind, c.times, c.times * c.bytes, c.sent, seconds, overlapped, between)
                names = axes_of_groups(c.groups, ahead.program.placed.axes) if len(self.forecast.mesh.shape) > 1 else ()
                axis = "+".join(dict.fromkeys(AXIS if name == GROUP else name for name in names))
                rows.setdefault((axis, c.kind), []).append(traffic)
        fits, shared = needs.peak <= self.memory, ahead.shared
        return Candidate(
            **vars(ahead.times(needs.collectives, machine)), level=level, own=own,
            within=None if not shared else HOST if shared == self.in_host else shared, mesh=mesh, bytes=kept,
            peak=needs.peak, fits=fits if needs.seconds or not fits else None,
            traffic=tuple(total_of(kind, found, axis) for (axis, kind), found in sorted(rows.items())),
            flops=ahead.flops, host=ahead.host_bytes, compile_seconds=needs.seconds,
        )  # fmt: skip

    def plan(self, written: Ahead, found: Sequence[Candidate], **more: Any) -> Plan:
        """Return the whole report."""
        if most := max((one.host for one in found), default=0):
            speed = self.topology.kind.host
            self.note(
                f"up to {readable(most)} of a device's state are in the host's memory; moving them both ways takes "
                f"{duration(2 * most / speed)} of each step at PCIe's full speed, and more if devices share it"
            )
            if self.compiled_for == "cpu":
                self.note("XLA for CPUs makes no such copies; temporaries are at least their size")
        pairs = zip(written.arguments, self.forecast.avals, strict=True)
        parameters = sum(math.prod(aval.shape) for x, aval in pairs if _kind(x) == "parameters")
        batch = self.forecast.batch
        tokens = [x.size for x in batch if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer)]
        size = (tokens[0], "tokens") if tokens else (batch[0].shape[0] if batch else 0, "examples")
        return Plan(
            getattr(self._step, "__name__", "step"), self.topology, self.compiled_for, self.memory, parameters, size,
            dict(self.forecast.mesh.shape), tuple(found), tuple(self.notes), **more,
        )  # fmt: skip


def _compiled(lowered: Any, platform: str, too_large: bool) -> Any:
    """Compile a program; None if it is for TPUs, and so large that XLA can't."""
    if platform != "tpu":
        # XLA for GPUs and TPUs complains on standard error about programs that do not fit.
        with streams.silenced(2) if platform == "cuda" else contextlib.nullcontext():
            return lowered.compile()
    try:
        # XLA for TPUs reports the memory of a program that does not fit only if allowed to continue.
        with streams.silenced(2):
            return lowered.compile({"xla_tpu_no_crash_on_oom": True})
    except jax.errors.JaxRuntimeError as error:
        wide = " TPUs have no 64-bit floats; XLA imitates some operations on them." * bool(
            re.search(r"tensor<(\d+x)*(f64|complex<f64>)>", lowered.as_text())
        )
        said = str(error).partition("\n")[0]
        if too_large or said.startswith("RESOURCE_EXHAUSTED"):
            return None
        raise ValueError(f"XLA can't compile the step for TPUs: {said}.{wide}") from error


def _devices(topology: Topology) -> tuple[list[Any], str, list[str]]:
    """Return devices to compile for, their platform, and notes about them."""
    notes, kind = [], topology.kind
    try:
        if kind.platform == "tpu":
            if problem := libtpu_problem():
                raise ImportError(problem)
            return compat.tpus_elsewhere(kind.name, topology.slice_shape, topology.hosts), "tpu", notes
        if kind.platform == "gpu":
            return compat.gpus_elsewhere(target(kind), topology.hosts, topology.per_host), "cuda", notes
        if topology.hosts > 1:
            notes.append("compiled for virtual devices in one process; real gloo or MPI traffic differs")
    except ImportError as error:
        reason, compiler = str(error).splitlines()[0], "libtpu" if kind.platform == "tpu" else "for NVIDIA GPUs"
        notes.append(
            f"compiled for {topology.devices} virtual CPU devices, without JAX's compiler {compiler} ({reason}): "
            "temporaries differ, sums in 16 bits count as 32, and no overlap is known. No "
            f"{kind.platform.upper()} is needed to fix that: pip install "
            f"'jaxdist[{'tpu' if kind.platform == 'tpu' else 'cuda12'}]'"
        )
    return compat.cpus_elsewhere(topology.devices), "cpu", notes


def _read(compiled: Any, ahead: Ahead, devices: int, on_cpu: bool) -> Needs:
    """Read the needs of a compiled program."""
    analysis = compiled.memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    held, offloaded = (sum(x.bytes for x in ahead.arguments if x.host == host) for host in (False, True))
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    if offloaded and on_cpu:  # XLA's account for CPUs knows one memory, and no copies between two
        arguments, temporaries = held, max(temporaries, offloaded)
    # XLA allocates its temporaries as one block. Its `peak_memory_in_bytes` is how much of them is
    # used at once, which is a little less (and omits them on CPUs).
    peak = arguments + results + temporaries
    # Arguments that the step does not use are not part of the program, but still occupy memory.
    peak += max(0, held - arguments)
    return Needs(ahead, tuple(schedule.collectives(compiled.as_text(), devices)), results, peak, 0.0)


def _kind(x: Held) -> str:
    roles = {"batch": "batch", "parameter": "parameters", "state": "optimizer state"}
    if x.role in roles:
        return roles[x.role]
    if re.search(r"\bopt(imizer)?(_?state)?\b", x.name):
        return "optimizer state"
    return "parameters" if re.search(r"\bparam(s|eters)?\b", x.name) else "other state"
