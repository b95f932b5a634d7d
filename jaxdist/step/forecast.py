"""A step for devices that need not be here: what `jaxdist.plan` compiles."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Mesh

from jaxdist.ir.wire import Collective, sent
from jaxdist.machine import Machine
from jaxdist.mesh import MODEL, Axis, data_size
from jaxdist.placements.layouts import Layout, choose, layout, sharding
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
class Ahead:
    """A step for devices that need not be here."""

    program: ClosedJaxpr  # of one device, before lowering
    axes: tuple[Axis, ...]  # of the mesh that it runs on
    levels: frozenset[int]  # of the uses of `jaxdist.zero` in the step
    knows_parameters: bool  # whether it is known which arguments are the parameters
    arguments: tuple[Held, ...]  # of the step
    results: int  # bytes of a device's results that can't take the place of an argument, at least
    shared: int  # the number of devices in a row that share sharded state; 0 for all
    flops: int  # of a device, an entry of anything but a contraction as one
    lower: Callable[[], Any]  # as ``jax.jit(step).lower``, for these arguments

    @functools.cached_property
    def lowered(self) -> Any:
        """The lowered program, which ``jax.jit(step).lower`` returns."""
        return self.lower()

    @property
    def state(self) -> int:
        """Bytes that a device keeps from step to step, without those in the host's memory."""
        return sum(x.bytes for x in self.arguments if x.role != "batch" and not x.host)

    @property
    def away(self) -> int:
        """Bytes of a device's arguments in the host's memory."""
        return sum(x.bytes for x in self.arguments if x.host)

    @property
    def least(self) -> int:
        """Bytes of a device's arguments and results."""
        return sum(x.bytes for x in self.arguments if not x.host) + self.results

    def sent(self, machine: Machine) -> tuple[Collective, ...]:
        """The collectives, as XLA may merge them (see `jaxdist.ir.wire`)."""
        return tuple(sent(self.program, self.axes, machine))


class Forecast:
    """A call of a step on other devices than this job's, which need not be here; nothing is sent, no array is made."""

    def __init__(
        self,
        settings: Settings,
        cache: ProgramCache,
        signature: Signature,
        leaves: Sequence[Any],
        mesh: Mesh,
        machine: Machine,
    ):
        self._settings, self._cache, self._signature, self._leaves = settings, cache, signature, leaves
        self.mesh, self._machine = mesh, machine
        self._jaxprs: dict[Mesh | None, StepJaxpr] = {}  # with no mesh: for all that `on` makes
        self.cut: dict[int, int] = {}  # by the model axis, found for the step's own batch and level

    def on(self, mesh: Mesh) -> Forecast:
        """Return the same call on a different mesh of the same number of devices."""
        other = copy.copy(self)
        other.mesh, other.cut = mesh, {}
        return other

    @property
    def model(self) -> int:
        """The size of the model axis."""
        return self.mesh.shape.get(MODEL, 1)

    @property
    def repeats(self) -> bool:
        """Check whether the model axis cuts nothing: each device along it does the same."""
        return self.model > 1 and not self.cut

    @property
    def leaves(self) -> list[Any]:
        """The leaves of all arguments, as in `Ahead.arguments`."""
        return list(self._leaves)

    @property
    def state(self) -> list[tuple[str, Any]]:
        """The leaves of the state, with their names."""
        return [(self._signature.names[i], self._leaves[i]) for i in self._signature.state]

    @property
    def batch(self) -> list[Any]:
        """The leaves of the batch, with the examples of all devices."""
        return [self._leaves[i] for i in self._signature.batch]

    def ahead(self, level: int | None = None, shared: int | None = None) -> Ahead:
        """The step, traced once for all levels and groups; placed and emitted, and lowered when it is asked for."""
        signature, mesh = self._signature, self.mesh
        avals = self._types()
        trace = traced(
            self._jaxpr(avals), signature, avals, mesh, self._machine, level, shared,
            self._settings.layouts, self.cut,
        )  # fmt: skip
        layouts = list(trace.layouts)
        self.cut = {i: cut.dim for i, how in enumerate(layouts) if how and (cut := how.by(MODEL))}
        for i in signature.state:
            if in_shards(self._leaves[i]):
                cut = choose(avals[i].shape, data_size(mesh))
                layouts[i] = layouts[i] or (cut and layout(cut))
        program = self._cache.make(trace, signature, avals, layouts, mesh, "xla")
        emitted, found = program.placed.emitted
        placed = [one.placed for one in found]
        held = self._held(program, avals, layouts)
        sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in held]
        roles = [*map(trace.marks.roles.get, range(len(held)))]
        arguments = tuple(
            Held(name, "batch" if is_batch else role or "", size, bool(how and how.host))
            for name, is_batch, role, size, how in zip(
                signature.names, signature.is_batch, roles, sizes, layouts, strict=True
            )
        )
        away = {i for i, one in enumerate(arguments) if one.host}
        results = _results(emitted, {k for k, i in enumerate(trace.sources) if i in away})
        results -= sum(sizes[i] for i in program.donated if i not in away)
        if not placed:  # on one device
            block = trace.infer.block(trace.jaxpr)
            placed = [trace.infer.place(block, [REPLICATED] * len(block.inputs))]
        shared = data_size(mesh) // trace.groups if trace.groups > 1 else 0
        given = [held[i] for i in signature.state], [held[i] for i in signature.batch]
        return Ahead(
            emitted, program.placed.axes, frozenset(trace.marks.levels), "parameter" in roles, arguments,
            max(0, results), shared, work(placed[-1]), lambda: program.lower(*given),
        )  # fmt: skip

    def _types(self) -> list[Any]:
        signature = self._signature
        avals = [abstract(x) for x in self._leaves]
        names = [signature.names[i] for i in signature.batch]
        if problem := batch.problem(names, [avals[i] for i in signature.batch], [1] * len(names)):
            raise ValueError(problem)
        return avals

    def _jaxpr(self, avals: Sequence[Any]) -> StepJaxpr:
        if found := self._jaxprs.get(None) or self._jaxprs.get(self.mesh):
            return found
        of = self._settings
        made = jaxpr_of(of.step, self._signature, avals, self.mesh, of.check_finite)
        self._jaxprs[self.mesh if made.knows_mesh else None] = made
        return made

    def _held(self, program: Program, avals: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
        """Return the arguments with their shardings."""
        of_batch = dict(zip(self._signature.batch, program.placed.batch, strict=True))
        held = []
        for i, (a, kept) in enumerate(zip(avals, layouts, strict=True)):
            how = of_batch.get(i, kept)
            shape = how.physical(a.shape) if how else a.shape
            place = sharding(self.mesh, how)
            held.append(jax.ShapeDtypeStruct(shape, a.dtype, sharding=place, weak_type=a.weak_type))
        return held


def _results(program: ClosedJaxpr, away: Collection[int]) -> int:
    """Bytes of a device's results, without those that go away and arguments that are returned as they came."""
    inputs = set(program.jaxpr.invars)
    results: dict[Any, Any] = {
        v: v.aval
        for k, v in enumerate(program.jaxpr.outvars)
        if not isinstance(v, Literal) and v not in inputs and k not in away
    }
    return sum(aval.size * aval.dtype.itemsize for aval in results.values())
