"""A step for devices that need not be here: what `jaxdist.plan` compiles, what it takes there, on which mesh least."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.sharding import Mesh, NamedSharding

from jaxdist.ir.interpreter import last_uses, live, subjaxprs
from jaxdist.ir.wire import Collective, sent
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, NAMES, SEQUENCE, Sizes, data_size, in_a_row, mesh_of, on_each_host
from jaxdist.placements.layouts import choose as choose_cut
from jaxdist.placements.layouts import layout as layout_with
from jaxdist.placements.layouts import physical
from jaxdist.placements.report import work
from jaxdist.placements.values import REPLICATED
from jaxdist.runtime.context import Context, hosts_of, machine_of
from jaxdist.step import batch
from jaxdist.step.calling import Settings
from jaxdist.step.placer import abstract, in_shards
from jaxdist.step.program import Program, ProgramCache
from jaxdist.step.signature import Leaf, Signature
from jaxdist.step.tracing import traced

_FUSED = {"broadcast_in_dim", "iota"}  # computed where they are used


class Held(NamedTuple):
    """An argument of a step, as a device holds it."""

    name: str  # of the leaf
    role: str  # ``"batch"``, what `jaxdist.zero` is given it as (``"state"``, ``"parameter"``), or ``""``
    bytes: int  # of a device
    host: bool  # whether they are in the host's memory


@dataclass(frozen=True)
class Times:
    """Seconds that a device takes for a step."""

    compute: float  # that the FLOPs take
    state: float  # that it takes to read the state once, and to write it; to bring it from the host's memory, and back
    in_host: float  # of collectives within hosts
    between: float  # of collectives between hosts
    hidden: float  # of both, while something is computed; as far as the schedule is known

    @property
    def seconds(self) -> float:
        """Return the seconds of a step: computation, and messages that it does not hide."""
        return self.compute + self.state + self.in_host + self.between - self.hidden


@dataclass(frozen=True, eq=False)
class Ahead:
    """A step for devices that need not be here: what a device holds, computes and sends."""

    program: Program

    @property
    def levels(self) -> frozenset[int]:
        """The levels of the uses of `jaxdist.zero` in the step."""
        return frozenset(self.program.placed.step.marks.levels)

    @property
    def shared(self) -> int:
        """The number of devices in a row that share sharded state; 0 for all."""
        groups = self.program.placed.step.groups
        return data_size(self.program.placed.mesh) // groups if groups > 1 else 0

    @functools.cached_property
    def arguments(self) -> tuple[Held, ...]:
        """The arguments of the step."""
        placed, arguments = self.program.placed, list[Held]()
        leaves = zip(
            placed.signature.names, placed.signature.is_batch, placed.physical_types, placed.layouts, strict=True
        )
        for i, (name, is_batch, aval, layout) in enumerate(leaves):
            role = "batch" if is_batch else placed.step.marks.roles.get(i) or ""
            size = math.prod(aval.sharding.shard_shape(aval.shape)) * aval.dtype.itemsize
            arguments.append(Held(name, role, size, bool(layout and layout.host)))
        return tuple(arguments)

    @functools.cached_property
    def results(self) -> int:
        """Bytes of a device's results, at least, that are new and take the place of no argument."""
        placed, arguments = self.program.placed, self.arguments
        jaxpr = placed.emitted[0].jaxpr
        passed_on = set(jaxpr.invars)
        in_host_memory = {k for k, i in enumerate(placed.step.sources) if i in placed.offloaded}
        new = {
            v: _bytes(v.aval)
            for k, v in enumerate(jaxpr.outvars)
            if not isinstance(v, Literal) and v not in passed_on and k not in in_host_memory
        }
        reused = sum(arguments[i].bytes for i in self.program.donated if not arguments[i].host)
        return max(0, sum(new.values()) - reused)

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of a device, an entry of anything but a contraction as one."""
        placed = self.program.placed
        if placements := placed.emitted[1]:
            return work(placements[-1])
        infer = placed.step.infer  # on one device
        block = infer.block(placed.step.jaxpr)
        return work(infer.place(block, [REPLICATED] * len(block.inputs)))

    @property
    def host_bytes(self) -> int:
        """Bytes of a device's arguments in the host's memory."""
        return sum(x.bytes for x in self.arguments if x.host)

    @property
    def least(self) -> int:
        """Bytes of a device's arguments and results."""
        return sum(x.bytes for x in self.arguments if not x.host) + self.results

    @functools.cached_property
    def held_at_once(self) -> int:
        """Bytes at most of a device's other values: all at once that a compiler may fuse."""
        return _held_at_once(self.program.placed.emitted[0].jaxpr)

    def sent(self, machine: Machine) -> tuple[Collective, ...]:
        """The collectives, as XLA may merge them (see `jaxdist.ir.wire`)."""
        return tuple(sent(self.program.placed.emitted[0], self.program.placed.axes, machine))

    def times(self, sent: Sequence[Collective], machine: Machine) -> Times:
        """The times of a device that sends these messages."""
        kind = machine.kind
        compute = self.flops / kind.rate("bfloat16")
        state_bytes = sum(x.bytes for x in self.arguments if x.role != "batch" and not x.host)
        state = 2 * state_bytes / kind.bandwidth + 2 * self.host_bytes / (kind.host or kind.bandwidth)
        times = [(c.seconds(machine), bool(machine.crossings(c.groups)), c.overlapped) for c in sent if c.devices > 1]
        in_host, between = (math.fsum(s for s, crosses, _ in times if crosses == far) for far in (False, True))
        hidden = min(math.fsum(seconds * overlapped for seconds, _, overlapped in times), compute)
        return Times(compute, state, in_host, between, hidden)


@dataclass
class Forecast:
    """A call of a step on other devices than this job's, which need not be here; nothing is sent, no array is made."""

    _settings: Settings
    _cache: ProgramCache
    signature: Signature
    leaves: Sequence[Leaf]  # of all arguments, as in `Ahead.arguments`; of the batch with the examples of all devices
    mesh: Mesh
    _machine: Machine
    # The leaves that the model axis cuts, and the dimension: found for the step's own batch and level.
    model_dims: dict[int, int] = field(default_factory=dict)

    def on(self, mesh: Mesh) -> "Forecast":
        """Return the same call on a different mesh of the same number of devices."""
        return dataclasses.replace(self, mesh=mesh, model_dims={})

    @property
    def model(self) -> int:
        """The size of the model axis."""
        return self.mesh.shape.get(MODEL, 1)

    @property
    def repeats(self) -> bool:
        """Check whether the model axis cuts nothing: each device along it does the same."""
        return self.model > 1 and not self.model_dims

    @property
    def batch(self) -> list[Leaf]:
        """The leaves of the batch."""
        return [self.leaves[i] for i in self.signature.batch]

    def ahead(self, level: int | None = None, shared: int | None = None) -> Ahead:
        """The step, traced once for all levels and groups; placed and emitted."""
        signature, mesh = self.signature, self.mesh
        avals = [abstract(x) for x in self.leaves]
        for i in signature.batch:
            batch.check(signature.names[i], avals[i])
        step, declared = self._cache.jaxpr(signature, avals, mesh), self._settings.layouts
        trace = traced(step, signature, avals, mesh, self._machine, level, shared, declared, self.model_dims)
        layouts = list(trace.layouts)
        self.model_dims = {i: cut.dim for i, layout in enumerate(layouts) if layout and (cut := layout.by(MODEL))}
        for i in signature.state:
            if in_shards(self.leaves[i]):
                cut = choose_cut(avals[i].shape, data_size(mesh))
                layouts[i] = layouts[i] or (cut and layout_with(cut))
        ahead = Ahead(self._cache.make(trace, signature, avals, layouts, mesh, "xla"))
        _ = ahead.program.placed.emitted  # what it can't be placed for is an error here
        return ahead


def _held_at_once(jaxpr: Jaxpr) -> int:
    """Bound the bytes that a program holds at once, without its arguments; a loop counts as one iteration."""
    eqns = live(jaxpr)
    last_use = last_uses(eqns, jaxpr.outvars)
    change = [0] * (len(eqns) + 1)  # in bytes, at each equation; the last entry is what the results free
    for k, eqn in enumerate(eqns):
        for v in () if eqn.primitive.name in _FUSED else last_use.keys() & set(eqn.outvars):
            change[k] += _bytes(v.aval)
            change[min(last_use[v] + 1, len(eqns))] -= _bytes(v.aval)
    inside = [max(map(_held_at_once, (sub.jaxpr for sub in subjaxprs(eqn))), default=0) for eqn in eqns]
    held = list(itertools.accumulate(change))[: len(eqns)]
    return max(map(operator.add, held, inside), default=0)


def _bytes(aval: object) -> int:
    """The size of a value; tokens and the like have none."""
    dtype = getattr(aval, "dtype", None)
    return getattr(aval, "size", 0) * dtype.itemsize if dtype is not None else 0


# --- the choice of a mesh: by FLOPs, state and messages on each; nothing is compiled


def order(cost: float, peak: float, least: int, memory: float) -> tuple[bool, float, int]:
    """A key for sorting programs: the fastest that fits is first, or else the one that needs the least memory."""
    too_large = peak > memory
    return too_large, peak if too_large else cost, least


def meshes(devices: int, in_host: int, batch: Sequence[Leaf]) -> Iterator[dict[str, int]]:
    """The meshes whose axes have no more devices than the batch has examples and its sequences have entries."""
    # Sequences and the model are cut within a host, unless there are fewer examples than hosts.
    has_one = False
    # Two-dimensional floats count as features, not sequences.
    lengths = [a.shape[1] for a in batch if a.ndim > 2 or (a.ndim == 2 and jnp.issubdtype(a.dtype, jnp.integer))]
    for inner in (n for n in range(1, devices + 1) if devices % n == 0):
        if any(a.shape[0] < devices // inner for a in batch):
            continue
        if inner > in_host and has_one:
            return
        for model in (n for n in range(1, inner + 1) if inner % n == 0):
            sequence = inner // model
            if sequence == 1 or any(n >= sequence for n in lengths):
                has_one = True
                sizes = {AXIS: devices // inner, SEQUENCE: sequence, MODEL: model}
                yield {name: n for name, n in sizes.items() if n > 1} or {AXIS: 1}


class ChosenMesh(NamedTuple):
    """A mesh for a step."""

    mesh: Mesh
    why: str  # for a person


@dataclass(frozen=True)
class _Candidate:
    """A mesh for a step, and what the step takes on it."""

    forecast: Forecast
    ms: float  # of a step
    peak: int  # bytes of a device, at most
    least: int  # bytes of a device's arguments and results


def fastest(on: Callable[[Sizes], Forecast], among: Sequence[Sizes], machine: Machine) -> ChosenMesh:
    """The mesh of the least time, of those on which a step is expected to fit."""
    if len(among) == 1:
        mesh = on(among[0]).mesh
        return ChosenMesh(mesh, f"{in_words(mesh.shape)}: the only one for this batch")
    memory = machine.kind.usable or float("inf")
    model_dims = dict[int, dict[int, int]]()  # by the size of the model axis: a search for each takes long
    candidates, failed = list[_Candidate](), list[Exception]()
    for sizes in among:
        forecast = on(sizes)
        forecast.model_dims = model_dims.get(forecast.model, {})
        try:
            ahead = forecast.ahead()
            ms = 1e3 * ahead.times(ahead.sent(machine), machine).seconds
            candidates.append(_Candidate(forecast, ms, ahead.least + ahead.held_at_once, ahead.least))
        except Exception as error:  # it names an axis that this mesh lacks, or has groups that do not divide it
            failed.append(error)
            continue
        model_dims[forecast.model] = forecast.model_dims
    if not candidates:
        raise failed[0]
    candidates = [candidate for candidate in candidates if not candidate.forecast.repeats] or candidates
    best = min(candidates, key=lambda candidate: order(candidate.ms, candidate.peak, candidate.least, memory))
    fits = best.peak <= memory
    what = "the fastest that is sure to fit" if fits else "needs the least memory, and none is sure to fit"
    mesh = best.forecast.mesh
    why = f"{in_words(mesh.shape)}: {what} ({len(candidates)} meshes; estimated {best.ms:.3g} ms per step)"
    return ChosenMesh(mesh, why)


def choose(first: Forecast, context: Context) -> ChosenMesh:
    """The mesh for a step's first call: its state's mesh, if some of it is sharded, or the fastest."""
    devices, signature = context.devices, first.signature
    for name, is_batch, x in zip(signature.names, signature.is_batch, first.leaves, strict=True):
        current = None if is_batch else getattr(physical(x), "sharding", None)
        if not isinstance(current, NamedSharding) or current.is_fully_replicated:
            continue
        if current.device_set == set(devices):
            mesh = in_a_row(current.mesh)
            if set(mesh.axis_names) <= set(NAMES):
                return ChosenMesh(mesh, f"{in_words(mesh.shape)}: {name} lies in slices on it")
    in_host = on_each_host(hosts_of(context.mesh)) or 1
    if context.communicator == "mpi":  # which cannot move a batch between meshes
        return ChosenMesh(context.mesh, f"{in_words(context.mesh.shape)}: over MPI a batch stays where it was passed")
    among = list(meshes(len(devices), in_host, first.batch)) or [{AXIS: len(devices)}]
    return fastest(lambda sizes: first.on(mesh_of(sizes, devices)), among, machine_of(context.mesh))


def in_words(mesh: Sizes) -> str:
    """The sizes of a mesh, for a person."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
