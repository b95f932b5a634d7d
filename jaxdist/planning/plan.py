"""`plan`: what a decorated step takes on devices that are not here: bytes, collectives, what hides them."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.table import Table

from jaxdist import compat
from jaxdist.mesh import AXIS
from jaxdist.planning import schedule
from jaxdist.planning.memory import readable
from jaxdist.planning.topology import Topology
from jaxdist.step.decorated import DataParallel
from jaxdist.step.forecast import Ahead, Held

LEVELS = (0, 1, 2, 3)
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MOST = 0.95
"""Of a device's memory: the rest is taken by the driver, NCCL and the kernels themselves."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in one step.

    Attributes:
      kind: all-reduce, reduce-scatter, all-gather, …
      count: how many a device takes part in.
      bytes: of the whole arrays, all of them together.
      sent: bytes that a device sends, if the library takes rings.
      seconds: that they take one after another, at the full speed of the links: a lower bound.
      overlapped: the share of the bytes sent during which the schedule has something to compute; None: not known.
    """

    kind: str
    count: int
    bytes: int
    sent: int
    seconds: float
    overlapped: float | None


@dataclass(frozen=True)
class LevelPlan:
    """A step at one ZeRO level.

    Attributes:
      level: 0 to 3; None: as the step is written.
      own: whether it is the one the step is written with.
      bytes: on one device, by kind; together they are the peak.
      peak: bytes on one device, by XLA's own account.
      fits: in what JAX takes of the device's memory.
      traffic: one row for each kind of collective.
      collectives: each one, as compiled.
      compile_seconds: that it took to trace and compile.
    """

    level: int | None
    own: bool
    bytes: dict[str, int]
    peak: int
    fits: bool
    traffic: tuple[Traffic, ...]
    collectives: tuple[schedule.Collective, ...]
    compile_seconds: float

    @property
    def total(self) -> Traffic:
        """Of all collectives."""
        return _sum("all", self.traffic)

    @property
    def name(self) -> str:
        """For a person."""
        return "as written" if self.level is None else f"level {self.level}"


@dataclass(frozen=True)
class Plan:
    """What a step takes; prints as tables.

    Attributes:
      step: its name.
      topology: for which it was compiled.
      compiled_for: ``"cuda"``: by the compiler for these GPUs; ``"cpu"``: for as many virtual CPU devices.
      memory: bytes of a device that JAX takes.
      levels: the step at each ZeRO level asked for.
      notes: what is not as it could be.
    """

    step: str
    topology: Topology
    compiled_for: str
    memory: int
    levels: tuple[LevelPlan, ...]
    notes: tuple[str, ...]

    @property
    def own(self) -> LevelPlan:
        """The step as it is written."""
        return next(one for one in self.levels if one.own)

    def to_json(self) -> str:
        """All figures (bytes, seconds, shares between 0 and 1) as a JSON object."""
        kind = dataclasses.asdict(self.topology.kind)
        del kind["target"]
        levels = [
            {
                "level": one.level, "own": one.own, "bytes": one.bytes, "peak": one.peak, "fits": one.fits,
                "traffic": [dataclasses.asdict(row) for row in (*one.traffic, one.total)],
                "compile_seconds": one.compile_seconds,
            }
            for one in self.levels
        ]  # fmt: skip
        topology = {"hosts": self.topology.hosts, "per_host": self.topology.per_host, "kind": kind}
        return json.dumps(
            {
                "step": self.step, "topology": topology, "compiled_for": self.compiled_for, "memory": self.memory,
                "levels": levels, "notes": self.notes,
            },
            indent=2,
        )  # fmt: skip

    def __str__(self) -> str:
        kind = self.topology.kind
        out = io.StringIO()
        console = Console(file=out, width=120, markup=False, highlight=False)
        console.print(f"step {self.step!r} on {self.topology}: {self.topology.devices} devices ({kind.model})")
        console.print(self._bytes())
        console.print(self._traffic())
        share = "" if kind.name == "cpu" else f" of {readable(kind.memory)} ({_FRACTION}={_fraction():g})"
        console.print(f"memory: JAX takes {readable(self.memory)}{share}")
        console.print(f"links: {self.topology.links}; times are for these speeds and nothing else on the way")
        for note in self.notes:
            console.print(f"note: {note}")
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

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
        table.add_row("fits", *(self._fits(one) for one in self.levels))
        return table

    def _fits(self, one: LevelPlan) -> str:
        if one.fits or self.topology.kind.name == "cpu":
            return "yes" if one.fits else "no"
        needed = one.peak / self.topology.kind.memory
        return f"with {needed:.2f} of the memory" if needed <= _MOST else "no"

    def _traffic(self) -> Table:
        table = Table(title="collectives in one step, of one device")
        table.add_column("")
        table.add_column("collective")
        for name in ("count", "whole arrays", "sent", "time", "overlapped"):
            table.add_column(name, justify="right")
        for one in self.levels:
            table.add_section()
            rows = (*one.traffic, one.total) if len(one.traffic) > 1 else one.traffic or (one.total,)
            for i, row in enumerate(rows):
                share = "" if row.overlapped is None else f"{row.overlapped:.0%}"
                cells = (str(row.count), readable(row.bytes), readable(row.sent), _time(row.seconds), share)
                table.add_row(one.name if i == 0 else "", row.kind, *cells)
        return table


def plan(step: Callable[..., Any], *args: Any, topology: str | Topology, levels: Sequence[int] = LEVELS) -> Plan:
    """Compile a decorated step for devices that are not here, and read off what it takes.

    No array is made and nothing is sent: a model of any size can be planned where its shapes can be written down. With
    `jax[cuda12]` installed (no GPU needed) the program is that of the GPUs asked for, in the order in which they would
    run it. Without, it is compiled for as many virtual CPU devices: the state's bytes and the collectives are about
    the same, temporaries are those of XLA's compiler for CPUs, and there is no schedule to read overlap from.

    The bytes on a device are those that the program asks for: its arguments as they are kept, results that do not take
    an argument's place, and one block of temporaries. XLA gives one figure for that block. The step is compiled once
    more for another batch, and what grows with the batch is listed as activations; the rest as gradients and
    temporaries, where buffers of messages and gathered parameters are too. What NCCL, the driver and the kernels' code
    take is outside the memory that JAX takes for itself, three quarters of a GPU unless
    ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise; "fits" is about that memory.

    A collective counts as overlapped if a kernel on more than scalars runs between its start and its end. Its time is
    that of the bytes that a ring sends through the slowest link on its way at full speed, and a latency: what is
    measured is longer.

    Args:
      step: decorated with `jaxdist.data_parallel`.
      *args: what the step would be called with: arrays, or pytrees of `jax.ShapeDtypeStruct` as `jax.eval_shape` gives
        them. The batch is the global one: the examples of all devices together.
      topology: ``"8xH100"``: devices of one host; ``"8x8xH100"``: hosts, and devices of each. Kinds: A100-40, A100-80,
        H100, H200, B200, cpu.
      levels: of ZeRO, to be compared with that of the step. For a step without `jaxdist.zero` there is no other.

    Returns:
      The plan: ``print`` it, or take its `levels`, `own` and ``to_json()``. Sizes in bytes, times in seconds.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: no such topology or level, or a batch that the devices don't divide.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist, optax
      >>> tx = jaxdist.zero(optax.adam(1e-3), level=1)
      >>> @jaxdist.data_parallel
      ... def step(w, opt_state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     updates, opt_state = tx.update(grads, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jax.ShapeDtypeStruct((1000, 100), jnp.float32)
      >>> found = jaxdist.plan(step, w, jax.eval_shape(tx.init, w), jax.ShapeDtypeStruct((64, 1000), jnp.float32),
      ...                      topology="4xcpu", levels=(0, 1))
      >>> [one.bytes["parameters"] for one in found.levels], [one.bytes["optimizer state"] for one in found.levels]
      ([400000, 400000], [800004, 200004])

    References:
      Rajbhandari et al., *ZeRO*, arXiv 1910.02054, section 3 (where the memory goes); Patarasuk and Yuan, *Bandwidth
      optimal all-reduce algorithms for clusters of workstations*, JPDC 2009 (bytes of a ring).
    """
    if isinstance(topology, str):
        topology = Topology.parse(topology)
    if isinstance(step, functools.partial) and not step.keywords:  # a decorated method
        step, args = step.func, (*step.args, *args)
    if not isinstance(step, DataParallel):
        raise TypeError(f"plan takes a step decorated with jaxdist.data_parallel, not {step!r}")
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"levels: there is no ZeRO level {unknown[0]!r}; valid: 0, 1, 2, 3")
    devices, compiled_for, notes = _devices(topology)
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    began = time.monotonic()
    ahead = step.ahead(mesh, args)
    own = next(iter(ahead.levels)) if len(ahead.levels) == 1 else None
    if not ahead.levels:
        notes.append("the step does not use jaxdist.zero: there are no other levels to compare it with")
        levels = ()
    elif own is None:
        notes.append(
            f"the step uses jaxdist.zero at several levels, {sorted(ahead.levels)}: each in turn for all of it"
        )
    if 3 in levels and not ahead.knows_parameters and own != 3:
        notes.append("no level 3: it needs tx.update(grads, opt_state, params)")
        levels = [level for level in levels if level != 3]

    compiled = _Compiled.of(ahead, mesh.size, time.monotonic() - began)
    activations, problem = _activations(step, mesh, args, compiled)
    notes.extend([problem] if problem else [])
    memory = int(topology.kind.memory * (1 if topology.kind.name == "cpu" else _fraction()))
    found = []
    for level in sorted({*levels, own}, key=lambda level: -1 if level is None else level):
        one = compiled
        if level != own:
            began = time.monotonic()
            one = _Compiled.of(step.ahead(mesh, args, level), mesh.size, time.monotonic() - began)
        found.append(_level(one, level, level == own, topology, memory, activations, compiled_for))
    if compiled_for == "cuda" and (large := [one.name for one in found if not one.fits]):
        notes.append(f"{', '.join(large)}: XLA orders what does not fit so as to save memory, not to overlap anything")
    name = getattr(step, "__name__", "step")
    return Plan(name, topology, compiled_for, memory, tuple(found), tuple(notes))


def _fraction() -> float:
    """Of a GPU's memory that JAX's allocator may take."""
    value = os.environ.get(_FRACTION) or 0.75
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{_FRACTION}={value!r}: expected a number, such as 0.75") from None


def _devices(topology: Topology) -> tuple[list[Any], str, list[str]]:
    """Devices to compile for, of which platform, and what there is to say about it."""
    notes = []
    if topology.kind.name != "cpu":
        try:
            return compat.gpus_elsewhere(topology.kind.target, topology.hosts, topology.per_host), "cuda", notes
        except ImportError as error:
            reason = str(error).splitlines()[0]
            notes.append(
                f"compiled for {topology.devices} virtual CPU devices, for want of JAX's compiler for NVIDIA GPUs "
                f"({reason}): temporaries are those of another compiler, and no overlap is known. No GPU is needed for "
                "it: pip install 'jaxdist[cuda12]'"
            )
    elif topology.hosts > 1:
        notes.append("compiled as for virtual devices of one process; gloo and MPI between hosts send other messages")
    return compat.cpus_elsewhere(topology.devices), "cpu", notes


@dataclass(frozen=True)
class _Compiled:
    arguments: tuple[Held, ...]
    collectives: tuple[schedule.Collective, ...]
    results: int  # bytes of those that do not take an argument's place
    peak: int
    seconds: float

    @classmethod
    def of(cls, ahead: Ahead, devices: int, traced_seconds: float) -> _Compiled:
        began = time.monotonic()
        compiled = ahead.lowered.compile()
        analysis = compiled.memory_analysis()
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        # What is allocated: XLA takes its temporaries as one block. Its `peak_memory_in_bytes` is how much of them is
        # in use at once, a little less (and on CPUs it leaves them out).
        peak = analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes
        # Arguments that the step does not use are not the program's, and still there.
        peak += max(0, sum(x.bytes for x in ahead.arguments) - analysis.argument_size_in_bytes)
        found = tuple(schedule.collectives(compiled.as_text(), devices))
        return cls(ahead.arguments, found, results, peak, traced_seconds + time.monotonic() - began)

    @property
    def temporaries(self) -> int:
        """What is neither argument nor result."""
        return self.peak - self.results - sum(x.bytes for x in self.arguments)


def _activations(step: DataParallel, mesh: Mesh, args: tuple[Any, ...], own: _Compiled) -> tuple[int | None, str]:
    """Bytes of temporaries that are proportional to the batch; or None, and why they are not known."""
    problem = ""
    for factor in (0.5, 2.0):
        try:
            other = _Compiled.of(step.ahead(mesh, args, scale=factor), mesh.size, 0)
        except Exception as error:  # whatever a step makes of a batch of another size
            problem = problem or (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        slope = (other.temporaries - own.temporaries) / (factor - 1)
        return min(max(0, round(slope)), own.temporaries), ""
    return None, f"activations are not told apart: the step can't be compiled for another batch ({problem})"


def _level(
    one: _Compiled,
    level: int | None,
    own: bool,
    topology: Topology,
    memory: int,
    activations: int | None,
    compiled_for: str,
) -> LevelPlan:
    sizes: dict[str, int] = dict.fromkeys(("parameters", "optimizer state", "other state", "batch"), 0)
    for x in one.arguments:
        sizes[_kind(x)] += x.bytes
    if activations is None:
        sizes["gradients, activations, temporaries"] = one.temporaries
    else:
        held = min(activations, one.temporaries)
        sizes["gradients and temporaries"] = one.temporaries - held
        sizes["activations"] = held
    sizes["results"] = one.results
    kept = {kind: size for kind, size in sizes.items() if size or kind not in ("other state", "results")}
    rows: dict[str, list[Traffic]] = {}
    for c in one.collectives:
        if c.devices > 1:
            rows.setdefault(c.kind, []).append(_traffic(c, topology, compiled_for == "cuda"))
    traffic = tuple(_sum(kind, several) for kind, several in rows.items())
    return LevelPlan(level, own, kept, one.peak, one.peak <= memory, traffic, one.collectives, one.seconds)


def _kind(x: Held) -> str:
    roles = {"batch": "batch", "parameter": "parameters", "state": "optimizer state"}
    if x.role in roles:
        return roles[x.role]
    if re.search(r"\bopt(imizer)?(_?state)?\b", x.name):
        return "optimizer state"
    return "parameters" if re.search(r"\bparam(s|eters)?\b", x.name) else "other state"


def _traffic(c: schedule.Collective, topology: Topology, scheduled: bool) -> Traffic:
    speed, latency = topology.speed(c.groups)
    seconds = c.sent / speed + c.times * latency
    return Traffic(c.kind, c.times, c.times * c.bytes, c.sent, seconds, float(c.overlapped) if scheduled else None)


def _sum(kind: str, rows: Sequence[Traffic]) -> Traffic:
    sent = sum(row.sent for row in rows)
    known = all(row.overlapped is not None for row in rows)
    share = sum(row.sent * (row.overlapped or 0) for row in rows) / sent if sent and known else None
    return Traffic(
        kind, sum(row.count for row in rows), sum(row.bytes for row in rows), sent,
        sum(row.seconds for row in rows), share,
    )  # fmt: skip


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
