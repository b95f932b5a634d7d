"""A program's communication: each of its collectives, with the bytes that a ring would send."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxdist.ir.fingerprint import moves, place
from jaxdist.ir.interpreter import Within, axes_of, groups_of, walk
from jaxdist.machine import Machine, ring_factor
from jaxdist.mesh import MODEL, SEQUENCE, Axis, along

_KINDS = {
    **dict.fromkeys(("jaxdist_all_reduce", "psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("jaxdist_reduce_scatter", "reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("jaxdist_all_gather", "all_gather", "all_gather_invariant"), "all-gather"),
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}


@dataclass(frozen=True)
class Collective:
    """A collective as XLA runs it."""

    kind: str  # all-reduce, reduce-scatter, all-gather, all-to-all, permute or broadcast
    dtype: str  # the dtype sent, or several with plus signs between
    bytes: int  # of the whole arrays, per run: one device's operands, or an all-gather's results
    groups: tuple[tuple[int, ...], ...]  # the devices that take part, one ring per group
    times: int  # number of runs per step
    overlapped: bool  # whether a kernel on more than scalars runs between its start and its end

    @property
    def devices(self) -> int:
        """Return the number of devices in the largest group."""
        return max(map(len, self.groups))

    @property
    def sent(self) -> int:
        """Return the bytes that a device sends per step, assuming rings."""
        return round(self.times * self.bytes * ring_factor(self.kind, self.devices))

    def seconds(self, machine: Machine) -> float:
        """Return the time that all runs take, one by one, at the full speed of the links."""
        bandwidth, latency = machine.speed(self.groups)
        return self.sent / bandwidth + self.times * latency


def sent(program: ClosedJaxpr, axes: Sequence[Axis], machine: Machine) -> Iterator[Collective]:
    """Estimate the least communication of a program: XLA merges all it can, and hides messages along data axes."""
    # XLA for CPUs merges all-reduces; for GPUs all of a kind, and it moves reductions out of loops.
    # The next operation waits for activations, which other axes send.
    on_cpu, devices = machine.kind.is_cpu, math.prod(axis.size for axis in axes)
    inner = {axis.name for axis in axes if axis.size > 1 and axis.name in (MODEL, SEQUENCE)} if len(axes) > 1 else set()
    together: dict[Any, list[tuple[str, int]]] = {}
    for i, (eqn, within) in enumerate(found for found in walk(program) if moves(found[0])):
        kind = kind_of(eqn)
        names = axes_of(eqn, [axis.name for axis in axes])
        groups = tuple(map(tuple, groups_of(eqn) or along(axes, names) or [range(devices)]))
        hidden = not on_cpu and inner.isdisjoint(names)
        turns = runs(within)
        where: Any = place(within).removesuffix(": "), turns, i if on_cpu and kind != "all-reduce" else None
        if not on_cpu and kind in ("all-reduce", "reduce-scatter"):
            where = "", 1, None
        for dtype, size in _moved(eqn, kind, max(map(len, groups)), on_cpu):
            together.setdefault((kind, groups, hidden, where), []).append((dtype, size * turns))
    for (kind, groups, hidden, (_, times, _)), several in together.items():
        dtype = "+".join(dict.fromkeys(dtype for dtype, _ in several))
        yield Collective(kind, dtype, sum(size for _, size in several) // times, groups, times, hidden)


def _moved(eqn: JaxprEqn, kind: str, n: int, on_cpu: bool) -> Iterator[tuple[str, int]]:
    """Yield for each operand the dtype sent and the bytes of the whole array."""
    wire = eqn.params.get("wire")
    for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
        aval: Any = operand.aval
        out: Any = result.aval
        elements = {"all-gather": aval.size * n, "reduce-scatter": out.size * n}.get(kind, aval.size)
        dtype = jnp.dtype(aval.dtype if wire is None else wire)
        if on_cpu and wire is None and kind == "all-reduce" and jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.promote_types(dtype, jnp.float32)
        yield str(dtype), elements * dtype.itemsize


def runs(within: Within) -> int:
    """Return how often an equation runs; a while loop counts as one turn, and all branches as taken."""
    return math.prod(outer.params["length"] for outer, _ in within if outer.primitive.name == "scan")


def kind_of(eqn: JaxprEqn) -> str:
    """Return the kind of a collective."""
    return _KINDS.get(eqn.primitive.name, eqn.primitive.name)


def whole_bytes(eqn: JaxprEqn, kind: str, devices: int) -> list[int]:
    """Return for each operand the bytes of the whole value, with padding: all devices' parts, or the sum."""
    parts = eqn.outvars if kind == "reduce-scatter" else eqn.invars
    times = 1 if kind == "all-reduce" else devices
    return [math.prod(v.aval.shape) * v.aval.dtype.itemsize * times for v in parts]  # pyright: ignore
