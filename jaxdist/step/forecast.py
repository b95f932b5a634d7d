"""A step for devices that need not be here: what `jaxdist.plan` compiles, what it takes there, on which mesh least."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.sharding import Mesh, NamedSharding

from jaxdist.ir.interpreter import last_uses, live, subjaxprs
from jaxdist.ir.wire import Collective, sent
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, NAMES, SEQUENCE, Sizes, data_size, in_a_row, mesh_of, on_each_host
from jaxdist.placements import layouts as kept
from jaxdist.placements.layouts import layout, physical
from jaxdist.placements.report import work
from jaxdist.placements.values import REPLICATED
from jaxdist.runtime.context import Context, hosts_of, machine_of
from jaxdist.step import batch
from jaxdist.step.calling import Settings
from jaxdist.step.placer import abstract, in_shards
from jaxdist.step.program import Program, ProgramCache
from jaxdist.step.signature import Signature
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

    made: Program

    @property
    def levels(self) -> frozenset[int]:
        """The levels of the uses of `jaxdist.zero` in the step."""
        return frozenset(self.made.placed.step.marks.levels)

    @property
    def shared(self) -> int:
        """The number of devices in a row that share sharded state; 0 for all."""
        groups = self.made.placed.step.groups
        return data_size(self.made.placed.mesh) // groups if groups > 1 else 0

    @functools.cached_property
    def arguments(self) -> tuple[Held, ...]:
        """The arguments of the step."""
        placed, found = self.made.placed, []
        pairs = zip(placed.signature.names, placed.signature.is_batch, placed.held, placed.layouts, strict=True)
        for i, (name, is_batch, x, how) in enumerate(pairs):
            role = "batch" if is_batch else placed.step.marks.roles.get(i) or ""
            size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            found.append(Held(name, role, size, bool(how and how.host)))
        return tuple(found)

    @functools.cached_property
    def results(self) -> int:
        """Bytes of a device's results, at least, that are new and take the place of no argument."""
        placed, arguments = self.made.placed, self.arguments
        program = placed.emitted[0].jaxpr
        came, away = set(program.invars), {k for k, i in enumerate(placed.step.sources) if i in placed.offloaded}
        new = {
            v: _bytes(v.aval)
            for k, v in enumerate(program.outvars)
            if not isinstance(v, Literal) and v not in came and k not in away
        }
        return max(0, sum(new.values()) - sum(arguments[i].bytes for i in self.made.donated if not arguments[i].host))

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of a device, an entry of anything but a contraction as one."""
        placed = self.made.placed
        if found := placed.emitted[1]:
            return work(found[-1])
        infer = placed.step.infer  # on one device
        block = infer.block(placed.step.jaxpr)
        return work(infer.place(block, [REPLICATED] * len(block.inputs)))

    @property
    def away(self) -> int:
        """Bytes of a device's arguments in the host's memory."""
        return sum(x.bytes for x in self.arguments if x.host)

    @property
    def least(self) -> int:
        """Bytes of a device's arguments and results."""
        return sum(x.bytes for x in self.arguments if not x.host) + self.results

    @functools.cached_property
    def held_at_once(self) -> int:
        """Bytes at most of a device's other values: all at once that a compiler may fuse."""
        return _held_at_once(self.made.placed.emitted[0].jaxpr)

    def sent(self, machine: Machine) -> tuple[Collective, ...]:
        """The collectives, as XLA may merge them (see `jaxdist.ir.wire`)."""
        return tuple(sent(self.made.placed.emitted[0], self.made.placed.axes, machine))

    def times(self, sent: Sequence[Collective], machine: Machine) -> Times:
        """The times of a device that sends these messages."""
        kind = machine.kind
        compute = self.flops / kind.rate("bfloat16")
        kept = sum(x.bytes for x in self.arguments if x.role != "batch" and not x.host)
        state = 2 * kept / kind.bandwidth + 2 * self.away / (kind.host or kind.bandwidth)
        spent = [(c.seconds(machine), bool(machine.crossings(c.groups)), c.overlapped) for c in sent if c.devices > 1]
        in_host, between = (math.fsum(s for s, crosses, _ in spent if crosses == far) for far in (False, True))
        return Times(compute, state, in_host, between, min(math.fsum(s * part for s, _, part in spent), compute))


@dataclass
class Forecast:
    """A call of a step on other devices than this job's, which need not be here; nothing is sent, no array is made."""

    _settings: Settings
    _cache: ProgramCache
    signature: Signature
    leaves: Sequence[Any]  # of all arguments, as in `Ahead.arguments`; of the batch with the examples of all devices
    mesh: Mesh
    _machine: Machine
    cut: dict[int, int] = field(default_factory=dict)  # by the model axis, for the step's own batch and level

    def on(self, mesh: Mesh) -> "Forecast":
        """Return the same call on a different mesh of the same number of devices."""
        return dataclasses.replace(self, mesh=mesh, cut={})

    @property
    def model(self) -> int:
        """The size of the model axis."""
        return self.mesh.shape.get(MODEL, 1)

    @property
    def repeats(self) -> bool:
        """Check whether the model axis cuts nothing: each device along it does the same."""
        return self.model > 1 and not self.cut

    @property
    def batch(self) -> list[Any]:
        """The leaves of the batch."""
        return [self.leaves[i] for i in self.signature.batch]

    def ahead(self, level: int | None = None, shared: int | None = None) -> Ahead:
        """The step, traced once for all levels and groups; placed and emitted."""
        signature, mesh = self.signature, self.mesh
        avals = [abstract(x) for x in self.leaves]
        for i in signature.batch:
            batch.check(signature.names[i], avals[i])
        step, layouts = self._cache.jaxpr(signature, avals, mesh), self._settings.layouts
        trace = traced(step, signature, avals, mesh, self._machine, level, shared, layouts, self.cut)
        layouts = list(trace.layouts)
        self.cut = {i: cut.dim for i, how in enumerate(layouts) if how and (cut := how.by(MODEL))}
        for i in signature.state:
            if in_shards(self.leaves[i]):
                cut = kept.choose(avals[i].shape, data_size(mesh))
                layouts[i] = layouts[i] or (cut and layout(cut))
        ahead = Ahead(self._cache.make(trace, signature, avals, layouts, mesh, "xla"))
        _ = ahead.made.placed.emitted  # what it can't be placed for is an error here
        return ahead


def _held_at_once(jaxpr: Jaxpr) -> int:
    """Bound the bytes that a program holds at once, without its arguments; a loop counts as one turn."""
    eqns = live(jaxpr)
    last, change = last_uses(eqns, jaxpr.outvars), [0] * (len(eqns) + 1)
    for k, eqn in enumerate(eqns):
        for v in () if eqn.primitive.name in _FUSED else last.keys() & set(eqn.outvars):
            change[k] += _bytes(v.aval)
            change[min(last[v] + 1, len(eqns))] -= _bytes(v.aval)
    inside = (max(map(_held_at_once, (sub.jaxpr for sub in subjaxprs(eqn))), default=0) for eqn in eqns)
    return max((own + more for own, more in zip(itertools.accumulate(change), inside, strict=False)), default=0)


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize if hasattr(aval, "dtype") else 0


# --- the choice of a mesh: by FLOPs, state and messages on each; nothing is compiled


def order(cost: float, peak: float, least: int, memory: float) -> tuple[bool, float, int]:
    """A key for sorting programs: the fastest that fits is first, or else the one that needs the least memory."""
    too_large = peak > memory
    return too_large, peak if too_large else cost, least


def meshes(devices: int, in_host: int, batch: Sequence[Any]) -> Iterator[dict[str, int]]:
    """The meshes whose axes have no more devices than the batch has examples and its sequences have entries."""
    # Sequences and the model are cut within a host, unless there are fewer examples than hosts.
    found = False
    # Two-dimensional floats count as features, not sequences.
    lengths = [a.shape[1] for a in batch if a.ndim > 2 or (a.ndim == 2 and jnp.issubdtype(a.dtype, jnp.integer))]
    for inner in (n for n in range(1, devices + 1) if devices % n == 0):
        if any(a.shape[0] < devices // inner for a in batch):
            continue
        if inner > in_host and found:
            return
        for model in (n for n in range(1, inner + 1) if inner % n == 0):
            sequence = inner // model
            if sequence == 1 or any(n >= sequence for n in lengths):
                found = True
                sizes = {AXIS: devices // inner, SEQUENCE: sequence, MODEL: model}
                yield {name: n for name, n in sizes.items() if n > 1} or {AXIS: 1}


def chosen(on: Callable[[Sizes], Forecast], among: Sequence[Sizes], machine: Machine) -> tuple[Mesh, str]:
    """The mesh of the least time, of those on which a step is expected to fit; and why."""
    if len(among) == 1:
        return (mesh := on(among[0]).mesh), f"{said(mesh.shape)}: the only one for this batch"
    memory = machine.kind.usable or float("inf")
    cuts = dict[int, dict[int, int]]()
    found, failed = list[tuple[float, int, int, Forecast]](), list[Exception]()
    for sizes in among:
        forecast = on(sizes)
        forecast.cut = cuts.get(forecast.model, {})
        try:
            ahead = forecast.ahead()
            ms = 1e3 * ahead.times(ahead.sent(machine), machine).seconds
            found.append((ms, ahead.least + ahead.held_at_once, ahead.least, forecast))
        except Exception as error:  # it names an axis that this mesh lacks, or has groups that do not divide it
            failed.append(error)
            continue
        cuts[forecast.model] = forecast.cut
    if not found:
        raise failed[0]
    found = [one for one in found if not one[-1].repeats] or found
    ms, peak, _, best = min(found, key=lambda one: order(*one[:3], memory))
    what = "the fastest that is sure to fit" if peak <= memory else "needs the least memory, and none is sure to fit"
    return best.mesh, f"{said(best.mesh.shape)}: {what} ({len(found)} meshes; estimated {ms:.3g} ms per step)"


def choose(first: Forecast, context: Context) -> tuple[Mesh, str]:
    """The mesh for a step's first call, and why: its state's mesh, if some of it is sharded, or the fastest."""
    devices, signature = context.devices, first.signature
    for name, is_batch, x in zip(signature.names, signature.is_batch, first.leaves, strict=True):
        own = None if is_batch else getattr(physical(x), "sharding", None)
        if isinstance(own, NamedSharding) and not own.is_fully_replicated and own.device_set == set(devices):
            mesh = in_a_row(own.mesh)
            if set(mesh.axis_names) <= set(NAMES):
                return mesh, f"{said(mesh.shape)}: {name} lies in slices on it"
    in_host = on_each_host(hosts_of(context.mesh)) or 1
    if context.communicator == "mpi":  # which cannot move a batch between meshes
        return context.mesh, f"{said(context.mesh.shape)}: over MPI a batch stays where it was passed"
    among = list(meshes(len(devices), in_host, first.batch)) or [{AXIS: len(devices)}]
    return chosen(lambda sizes: first.on(mesh_of(sizes, devices)), among, machine_of(context.mesh))


def said(mesh: Sizes) -> str:
    """The sizes of a mesh, for a person."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
