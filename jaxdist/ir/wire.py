"""What a program sends: each of its collectives, with the bytes that a ring would move."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxdist import compat
from jaxdist.ir.fingerprint import moves, place
from jaxdist.ir.interpreter import Found, axes_of, groups_of, walk
from jaxdist.machine import VIRTUAL, Machine, ring_factor
from jaxdist.mesh import MODEL, SEQUENCE, Axis, Groups, along

_KINDS = {
    **dict.fromkeys(
        ("jaxdist_all_reduce", "psum", "psum_invariant", "pmax", "pmin", "jaxdist_group_reduce"), "all-reduce"
    ),
    **dict.fromkeys(("jaxdist_reduce_scatter", "reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("jaxdist_all_gather", "all_gather", "all_gather_invariant"), "all-gather"),
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}


@dataclass(frozen=True)
class Transfer:
    """A collective of a step."""

    kind: str  # all-reduce, reduce-scatter, all-gather, all-to-all, permute, or the primitive's own name
    dtype: str  # of what travels
    elements: int  # of the whole array: of one device's operand, of an all-gather's result
    leaves: int  # how many arrays travel together in it (`passes.fuse`)
    devices: int  # that take part
    place: str  # in which loops and branches; "" for none
    times: int  # how often in a step; a while loop counts as one turn, and each branch of a cond as taken
    groups: Groups | None = None  # of devices that each act by themselves; None: all are one
    axes: str = ""  # of the mesh along which it goes, "" if there is one

    @property
    def bytes(self) -> int:
        """Of the whole array, each time."""
        return self.elements * jnp.dtype(self.dtype).itemsize

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step, if the library takes a ring."""
        return round(self.times * self.bytes * ring_factor(self.kind, self.devices))


def transfers(program: ClosedJaxpr, axes: Sequence[Axis], machine: Machine = VIRTUAL) -> Counter[Transfer]:
    """The collectives of a program, and how many there are of each; in the order in which it names them."""
    sent = (found for found in walk(program) if moves(found.eqn))
    return Counter(one for found in sent for one in _transfers(found, axes, machine.kind.is_cpu))


@dataclass(frozen=True)
class Collective:
    """A collective as XLA runs it."""

    kind: str  # all-reduce, reduce-scatter, all-gather, all-to-all, permute or broadcast
    dtype: str  # of what travels, with plus signs between several
    bytes: int  # of the whole arrays, each time: of one device's operands, of an all-gather's results
    groups: tuple[tuple[int, ...], ...]  # the devices that take part; a ring for each
    times: int  # how often in a step
    overlapped: bool  # whether a kernel on more than scalars runs between its start and its end
    where: str = ""  # the operation's name in JAX, with the loops and functions that it is in

    @property
    def devices(self) -> int:
        """The number of devices of the largest group."""
        return max(map(len, self.groups))

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step, if the library takes a ring."""
        return round(self.times * self.bytes * ring_factor(self.kind, self.devices))

    def seconds(self, machine: Machine) -> float:
        """How long it takes at the full speed of the links, each time after another."""
        bandwidth, latency = machine.speed(self.groups)
        return self.sent / bandwidth + self.times * latency


def merged(found: Mapping[Transfer, int], devices: int, machine: Machine) -> Iterator[Collective]:
    """What a program sends at least: as if XLA merged all that it may, and where it has a schedule hid what goes along
    the axes of data. (For activations that another axis sends the next operation waits.)

    For CPUs it may merge all-reduces; for GPUs all of a kind, and reductions are moved out of loops.
    """
    on_cpu = machine.kind.is_cpu
    together: dict[Any, list[tuple[Transfer, int]]] = {}
    for i, (one, count) in enumerate(found.items()):
        where = one.place, one.times, i if on_cpu and one.kind != "all-reduce" else None
        moved = not on_cpu and one.kind in ("all-reduce", "reduce-scatter")
        hidden = not on_cpu and not {MODEL, SEQUENCE}.intersection(one.axes.split())
        key = one.kind, one.groups, hidden, None if moved else where
        together.setdefault(key, []).append((one, count))
    for (kind, groups, hidden, key), several in together.items():
        where, times, alone = key or ("", 1, None)
        size = sum(one.bytes * one.times * count for one, count in several) // times
        if alone is not None:
            [(one, count)] = several
            size, times = one.bytes, times * count
        dtype = "+".join(dict.fromkeys(one.dtype for one, _ in several))
        yield Collective(kind, dtype, size, groups or (tuple(range(devices)),), times, hidden, where)


def _transfers(found: Found, axes: Sequence[Axis], on_cpu: bool) -> Iterator[Transfer]:
    eqn = found.eqn
    kind = _KINDS.get(eqn.primitive.name, eqn.primitive.name)
    names = axes_of(eqn, [axis.name for axis in axes])
    groups = groups_of(eqn) or along(axes, names)
    said = " ".join(axis.name for axis in axes if axis.name in names and axis.size > 1) if len(axes) > 1 else ""
    n = max(map(len, groups)) if groups else math.prod(axis.size for axis in axes)
    wire = eqn.params.get("wire")
    bucket = re.findall(r"bucket_of_(\d+)", compat.name_stack(eqn))
    for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
        aval: Any = operand.aval
        out: Any = result.aval
        elements = {"all-gather": aval.size * n, "reduce-scatter": out.size * n}.get(kind, aval.size)
        dtype = aval.dtype if wire is None else jnp.dtype(wire)
        floating = jnp.issubdtype(dtype, jnp.floating)
        if on_cpu and wire is None and kind == "all-reduce" and floating:
            dtype = jnp.promote_types(dtype, jnp.float32)
        yield Transfer(
            kind, str(dtype), elements, int(bucket[-1]) if bucket else 1, n, place(found.within).removesuffix(": "),
            found.times, tuple(map(tuple, groups)) if groups else None, said,
        )  # fmt: skip
