"""A step's program for devices that need not be here: the memory, work and messages of a device."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import Jaxpr, Literal

from jaxdist.compilation.program import Program
from jaxdist.ir.interpreter import last_uses, live, subjaxprs
from jaxdist.ir.wire import Collective, sent
from jaxdist.machine import Machine
from jaxdist.mesh import data_size
from jaxdist.placements.model.values import REPLICATED
from jaxdist.placements.report import work

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
    """A step for devices that need not be here: the memory, work and messages of a device."""

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
        jaxpr = placed.emitted.program.jaxpr
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
        if placements := placed.emitted.propagations:
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
        return _held_at_once(self.program.placed.emitted.program.jaxpr)

    def sent(self, machine: Machine) -> tuple[Collective, ...]:
        """The collectives, as XLA may merge them (see `jaxdist.ir.wire`)."""
        return tuple(sent(self.program.placed.emitted.program, self.program.placed.axes, machine))

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


def _held_at_once(jaxpr: Jaxpr) -> int:
    """Bound the bytes that a program holds at once, without its arguments; a loop counts as one iteration."""
    eqns = live(jaxpr)
    last_use = last_uses(eqns, jaxpr.outvars)
    change = [0] * (len(eqns) + 1)  # in bytes, at each equation; the last entry is for values that are held to the end
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
