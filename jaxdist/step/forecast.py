"""A step for devices that need not be here: what `jaxdist.plan` compiles, and what it takes there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import Literal
from jax.sharding import Mesh

from jaxdist.ir.interpreter import held_at_once
from jaxdist.ir.wire import Collective, sent
from jaxdist.machine import Machine
from jaxdist.mesh import MODEL, data_size
from jaxdist.placements.layouts import choose, layout
from jaxdist.placements.report import work
from jaxdist.placements.values import REPLICATED
from jaxdist.step import batch
from jaxdist.step.calling import Settings
from jaxdist.step.placer import abstract, in_shards
from jaxdist.step.program import Program
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.signature import Signature
from jaxdist.step.tracing import StepJaxpr, jaxpr_of, traced


class Held(NamedTuple):
    """An argument of a step, as a device holds it."""

    name: str  # of the leaf
    role: str  # ``"batch"``, what `jaxdist.zero` is given it as (``"state"``, ``"parameter"``), or ``""``
    bytes: int  # of a device
    host: bool = False  # whether they are in the host's memory


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
    """A step for devices that need not be here, emitted; what a device holds, computes and sends."""

    made: Program

    @functools.cached_property
    def lowered(self) -> Any:
        """The lowered program, which ``jax.jit(step).lower`` returns."""
        return self.made.lower()

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
        """Bytes of a device's results that can't take the place of an argument, at least; not of those in the host's
        memory, nor of arguments that are returned as they came."""
        placed, arguments = self.made.placed, self.arguments
        program = placed.emitted[0].jaxpr
        came, away = set(program.invars), {k for k, i in enumerate(placed.step.sources) if i in placed.offloaded}
        new = {
            v: v.aval.size * v.aval.dtype.itemsize
            for k, v in enumerate(program.outvars)
            if not isinstance(v, Literal) and v not in came and k not in away
        }
        return max(0, sum(new.values()) - sum(arguments[i].bytes for i in self.made.donated if not arguments[i].host))

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of a device, an entry of anything but a contraction as one."""
        placed = self.made.placed
        if found := placed.emitted[1]:
            return work(found[-1].placed)
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
        return held_at_once(self.made.placed.emitted[0].jaxpr)

    def sent(self, machine: Machine) -> tuple[Collective, ...]:
        """The collectives, as XLA may merge them (see `jaxdist.ir.wire`)."""
        return tuple(sent(self.made.placed.emitted[0], self.made.placed.axes, machine))

    def times(self, sent: Sequence[Collective], machine: Machine) -> Times:
        """The times of a device that sends these messages."""
        kind = machine.kind
        compute = self.flops / kind.rate("bfloat16")
        kept = sum(x.bytes for x in self.arguments if x.role != "batch" and not x.host)
        state = 2 * kept / kind.bandwidth + 2 * self.away / (kind.host or kind.bandwidth)
        in_host = between = hidden = 0.0
        for c in sent:
            if c.devices > 1:
                seconds = c.seconds(machine)
                if machine.crossings(c.groups):
                    between += seconds
                else:
                    in_host += seconds
                hidden += seconds * c.overlapped
        return Times(compute, state, in_host, between, min(hidden, compute))


@dataclass
class Forecast:
    """A call of a step on other devices than this job's, which need not be here; nothing is sent, no array is made."""

    _settings: Settings
    _cache: ProgramCache
    _signature: Signature
    leaves: Sequence[Any]  # of all arguments, as in `Ahead.arguments`; of the batch with the examples of all devices
    mesh: Mesh
    _machine: Machine
    cut: dict[int, int] = field(default_factory=dict)  # by the model axis, for the step's own batch and level
    _jaxprs: dict[Mesh | None, StepJaxpr] = field(default_factory=dict)  # with no mesh: for all that `on` makes

    def on(self, mesh: Mesh) -> Forecast:
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
    def state(self) -> list[tuple[str, Any]]:
        """The leaves of the state, with their names."""
        return [(self._signature.names[i], self.leaves[i]) for i in self._signature.state]

    @property
    def batch(self) -> list[Any]:
        """The leaves of the batch."""
        return [self.leaves[i] for i in self._signature.batch]

    def ahead(self, level: int | None = None, shared: int | None = None) -> Ahead:
        """The step, traced once for all levels and groups; placed and emitted, and lowered when it is asked for."""
        signature, mesh = self._signature, self.mesh
        avals = [abstract(x) for x in self.leaves]
        names = [signature.names[i] for i in signature.batch]
        if problem := batch.problem(names, [avals[i] for i in signature.batch], [1] * len(names)):
            raise ValueError(problem)
        trace = traced(
            self._jaxpr(avals), signature, avals, mesh, self._machine, level, shared,
            self._settings.layouts, self.cut,
        )  # fmt: skip
        layouts = list(trace.layouts)
        self.cut = {i: cut.dim for i, how in enumerate(layouts) if how and (cut := how.by(MODEL))}
        for i in signature.state:
            if in_shards(self.leaves[i]):
                cut = choose(avals[i].shape, data_size(mesh))
                layouts[i] = layouts[i] or (cut and layout(cut))
        ahead = Ahead(self._cache.make(trace, signature, avals, layouts, mesh, "xla"))
        _ = ahead.made.placed.emitted  # what it can't be placed for is an error here
        return ahead

    def _jaxpr(self, avals: Sequence[Any]) -> StepJaxpr:
        if found := self._jaxprs.get(None) or self._jaxprs.get(self.mesh):
            return found
        of = self._settings
        made = jaxpr_of(of.step, self._signature, avals, self.mesh, of.check_finite)
        self._jaxprs[self.mesh if made.knows_mesh else None] = made
        return made
