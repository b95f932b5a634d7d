"""`plan`: what a decorated step takes on devices that are not here: bytes, collectives, what hides them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from jaxdist import compat
from jaxdist.mesh import AXIS
from jaxdist.placements.groups import HOST, in_host
from jaxdist.planning import schedule
from jaxdist.planning.memory import readable
from jaxdist.planning.report import LevelPlan, Plan, Traffic, duration, fraction, total_of
from jaxdist.planning.topology import Topology
from jaxdist.step.decorated import DataParallel
from jaxdist.step.forecast import Ahead, Held

LEVELS = (0, 1, 2, 3)


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
    there = Elsewhere(step, args, topology, levels)
    written = there.compiled()
    own = there.level_of(written)
    wanted = there.others(written)
    activations = there.activations(written)
    found = []
    for level in sorted({*wanted, own}, key=lambda level: -1 if level is None else level):
        one = written if level == own else there.compiled(level)
        found.append(there.row(one, level, level == own, activations))
    if there.compiled_for == "cuda" and (large := [one.name for one in found if not one.fits]):
        there.notes.append(
            f"{', '.join(large)}: XLA orders what does not fit so as to save memory, not to overlap anything"
        )
    return there.plan(found)


class Elsewhere:
    """A step, its arguments, and the devices that it is planned for.

    Attributes:
      topology: the devices.
      compiled_for: ``"cuda"`` or ``"cpu"``.
      hosts: of each device.
      memory: bytes of a device that JAX takes.
      notes: what there is to say.
    """

    def __init__(
        self, step: Callable[..., Any], args: tuple[Any, ...], topology: str | Topology, levels: Sequence[int]
    ) -> None:
        self.topology = Topology.parse(topology) if isinstance(topology, str) else topology
        if isinstance(step, functools.partial) and not step.keywords:  # a decorated method
            step, args = step.func, (*step.args, *args)
        if not isinstance(step, DataParallel):
            raise TypeError(f"a plan is of a step decorated with jaxdist.data_parallel, not of {step!r}")
        if unknown := [level for level in levels if level not in LEVELS]:
            raise ValueError(f"levels: there is no ZeRO level {unknown[0]!r}; valid: 0, 1, 2, 3")
        self._step, self._args, self._levels = step, args, levels
        self._programs: dict[Any, Compiled] = {}
        devices, self.compiled_for, self.notes = _devices(self.topology)
        self._mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self.hosts = [i // self.topology.per_host for i in range(self.topology.devices)]
        kind = self.topology.kind
        self.memory = int(kind.memory * (1 if kind.name == "cpu" else fraction()))

    def compiled(self, level: int | None = None, shared: int | None = None, scale: float = 1) -> Compiled:
        """The step for these devices: as written, or at another level, for other groups, for another batch."""
        began = time.monotonic()
        apart = self.topology.kind.name != "cpu"
        ahead = self._step.ahead(self._mesh, self._args, level, scale, self.hosts, shared, apart)
        # Levels 1 and 2 are often one program, and its compilation is most of the time.
        key = hashlib.sha256(ahead.lowered.as_text().encode()).digest(), ahead.arguments
        if key not in self._programs:
            self._programs[key] = Compiled.of(ahead, self._mesh.size, began, self.compiled_for == "cpu")
            return self._programs[key]
        return dataclasses.replace(self._programs[key], ahead=ahead, seconds=time.monotonic() - began)

    def level_of(self, written: Compiled) -> int | None:
        """Of the step as it is written; None: there is not just one."""
        levels = written.ahead.levels
        return next(iter(levels)) if len(levels) == 1 else None

    def others(self, written: Compiled) -> list[int]:
        """Those of the levels asked for at which the step can be; a note says why not at the rest."""
        levels, own = list(self._levels), self.level_of(written)
        if not written.ahead.levels:
            self.notes.append("the step does not use jaxdist.zero: there are no other levels to compare it with")
            return []
        if own is None:
            several = sorted(written.ahead.levels)
            self.notes.append(f"the step uses jaxdist.zero at several levels, {several}: each in turn for all of it")
        if 3 in levels and not written.ahead.knows_parameters and own != 3:
            self.notes.append(
                "no level 3: no argument of the step has the updates added; tell which: "
                "tx.update(grads, opt_state, params)"
            )
            levels = [level for level in levels if level != 3]
        return levels

    def activations(self, written: Compiled) -> int | None:
        """Bytes of temporaries that are proportional to the batch; None: they are not known, and a note says why."""
        problem = ""
        for factor in (0.5, 2.0):
            try:
                other = self.compiled(scale=factor)
            except Exception as error:  # whatever a step makes of a batch of another size
                problem = problem or (str(error).strip() or type(error).__name__).splitlines()[0]
                continue
            slope = (other.temporaries - written.temporaries) / (factor - 1)
            return min(max(0, round(slope)), written.temporaries)
        self.notes.append(f"activations are not told apart: the step can't be compiled for another batch ({problem})")
        return None

    def row(self, one: Compiled, level: int | None, own: bool, activations: int | None) -> LevelPlan:
        """What is read off a program."""
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
        rows: dict[str, list[Traffic]] = {}
        for c in one.collectives:
            if c.devices > 1:
                rows.setdefault(c.kind, []).append(traffic_of(c, self.topology, self.compiled_for == "cuda"))
        traffic = tuple(total_of(kind, several) for kind, several in rows.items())
        shared = one.ahead.shared
        within = None if not shared else HOST if shared == in_host(self.hosts) else shared
        return LevelPlan(
            level, own, kept, one.peak, one.peak <= self.memory, traffic, one.collectives, one.seconds, within,
            one.ahead.flops, one.offloaded,
        )  # fmt: skip

    def plan(self, found: Sequence[LevelPlan]) -> Plan:
        """The whole of it."""
        name, speed = getattr(self._step, "__name__", "step"), self.topology.kind.host
        if most := max(one.host for one in found):
            self.notes.append(
                f"up to {readable(most)} of a device's state are in the host's memory; to bring them and to put them "
                f"back takes {duration(2 * most / speed)} of each step at PCIe's full speed, {speed / 1e9:g} GB/s, and "
                "more if devices share it"
            )
            if self.compiled_for == "cpu":
                self.notes.append("XLA for CPUs makes no such copies: where they are larger, they are the temporaries")
        return Plan(name, self.topology, self.compiled_for, self.memory, tuple(found), tuple(self.notes))


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
                f"({reason}): temporaries are those of another compiler, sums in 16 bits travel in 32, and no overlap "
                "is known. No GPU is needed for it: pip install 'jaxdist[cuda12]'"
            )
    elif topology.hosts > 1:
        notes.append("compiled as for virtual devices of one process; gloo and MPI between hosts send other messages")
    return compat.cpus_elsewhere(topology.devices), "cpu", notes


@dataclass(frozen=True)
class Compiled:
    """A step, compiled.

    Attributes:
      ahead: of the compilation.
      collectives: of the program.
      results: bytes of those that do not take an argument's place.
      peak: bytes on a device.
      seconds: that it took.
    """

    ahead: Ahead
    collectives: tuple[schedule.Collective, ...]
    results: int
    peak: int
    seconds: float

    @classmethod
    def of(cls, ahead: Ahead, devices: int, began: float, on_cpu: bool) -> Compiled:
        """Compile it, and read it."""
        compiled = ahead.lowered.compile()
        analysis = compiled.memory_analysis()
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        held = sum(x.bytes for x in ahead.arguments if not x.host)
        offloaded = sum(x.bytes for x in ahead.arguments if x.host)
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

    @property
    def temporaries(self) -> int:
        """What is neither argument nor result."""
        return self.peak - self.results - sum(x.bytes for x in self.ahead.arguments if not x.host)

    @property
    def offloaded(self) -> int:
        """Bytes of a device's arguments in the host's memory."""
        return sum(x.bytes for x in self.ahead.arguments if x.host)


def _kind(x: Held) -> str:
    roles = {"batch": "batch", "parameter": "parameters", "state": "optimizer state"}
    if x.role in roles:
        return roles[x.role]
    if re.search(r"\bopt(imizer)?(_?state)?\b", x.name):
        return "optimizer state"
    return "parameters" if re.search(r"\bparam(s|eters)?\b", x.name) else "other state"


def traffic_of(c: schedule.Collective, topology: Topology, scheduled: bool) -> Traffic:
    """What a collective sends, and how long that takes."""
    speed, latency = topology.speed(c.groups)
    seconds = c.sent / speed + c.times * latency
    overlapped = float(c.overlapped) if scheduled else None
    between = c.sent * topology.crossings(c.groups)
    return Traffic(c.kind, c.times, c.times * c.bytes, c.sent, seconds, overlapped, between)
