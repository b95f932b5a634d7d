"""A step for devices that need not be here: what `jaxdist.plan` compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import AXIS
from jaxdist.placements.layouts import choose, sharding
from jaxdist.placements.report import work
from jaxdist.placements.strategy import Placed
from jaxdist.placements.values import REPLICATED
from jaxdist.step.placer import abstract, batch_problem, in_shards
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.settings import Settings
from jaxdist.step.signature import Signature
from jaxdist.step.tracing import jaxpr_of, traced


class Held(NamedTuple):
    """An argument of a step, as a device holds it.

    Attributes:
      name: of the leaf.
      role: ``"batch"``, what `jaxdist.zero` is given it as (``"state"``, ``"parameter"``), or ``""``.
      bytes: of a device.
      host: whether they are in the host's memory.
    """

    name: str
    role: str
    bytes: int
    host: bool = False


@dataclass(frozen=True)
class Ahead:
    """A step for devices that need not be here.

    Attributes:
      lowered: as of ``jax.jit(step).lower``.
      levels: of the uses of `jaxdist.zero` in the step, as it was written.
      knows_parameters: whether it is known which arguments are the parameters.
      arguments: of the step.
      shared: how many devices in a row share what is kept in shards; 0: all.
      flops: of a device, an entry of anything but a contraction as one.
    """

    lowered: Any
    levels: frozenset[int]
    knows_parameters: bool
    arguments: tuple[Held, ...]
    shared: int
    flops: int


def ahead(
    settings: Settings,
    cache: ProgramCache,
    signature: Signature,
    leaves: Sequence[Any],
    mesh: Mesh,
    level: int | None = None,
    scale: float = 1,
    hosts: Sequence[Any] | None = None,
    shared: int | None = None,
    apart: bool | None = None,
) -> Ahead:
    """The step for other devices than this job's, which need not be here; nothing is sent, no array is made.

    Args:
      settings: of the step.
      cache: of the step, makes its programs.
      signature: of the call.
      leaves: of its arguments, arrays or `jax.ShapeDtypeStruct`s; those of the batch with the examples of all devices
        together.
      mesh: of them.
      level: of ZeRO, in place of that which the step says.
      scale: times as many examples as those of the batch.
      hosts: of each device.
      shared: how many devices in a row share what is kept in shards, 0: all; in place of what the step says.
      apart: whether the devices have a memory of their own, beside the host's; None: as they say.

    Raises:
      ValueError: the batch can't be divided over the devices.
    """
    avals = [abstract(x) for x in leaves]
    for i in signature.batch if scale != 1 else ():
        shape = avals[i].shape
        avals[i] = jax.ShapeDtypeStruct((round(shape[0] * scale), *shape[1:]), avals[i].dtype)
    names = [signature.names[i] for i in signature.batch]
    if problem := batch_problem(names, [avals[i] for i in signature.batch], [1] * len(names)):
        raise ValueError(problem)
    step = jaxpr_of(settings.step, signature, avals, mesh, settings.axis_name, settings.check_finite)
    trace = traced(step, signature, avals, mesh, level, hosts, shared, apart)
    layouts = list(trace.layouts)
    for i in signature.state:
        if in_shards(leaves[i]):
            layouts[i] = layouts[i] or choose(avals[i].shape, mesh.size)
    seen: list[Placed | None] = []
    program = cache.make(trace, signature, avals, layouts, mesh, "xla", lambda _, placed: seen.append(placed))
    splits = dict(zip(signature.batch, program.batch, strict=True))
    held = []
    for i, (a, how) in enumerate(zip(avals, layouts, strict=True)):
        split = NamedSharding(mesh, P(AXIS)) if i in splits else sharding(mesh, how)
        shape = how.physical(a.shape) if how else a.shape
        if i in splits:
            shape = (splits[i].chunk * mesh.size, *shape[1:])
        held.append(jax.ShapeDtypeStruct(shape, a.dtype, sharding=split, weak_type=a.weak_type))
    lowered = program.ahead("lower", [held[i] for i in signature.state], [held[i] for i in signature.batch])
    block = trace.infer.block(trace.jaxpr)
    placed = seen[-1] or trace.infer.place(block, [REPLICATED] * len(block.inputs))  # None: on one device
    sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in held]
    roles = [*map(trace.marks.roles.get, range(len(held)))]
    arguments = tuple(
        Held(name, "batch" if is_batch else role or "", size, bool(how and how.host))
        for name, is_batch, role, size, how in zip(
            signature.names, signature.is_batch, roles, sizes, layouts, strict=True
        )
    )
    levels = frozenset(trace.marks.levels)
    return Ahead(lowered, levels, "parameter" in roles, arguments, trace.infer.group, work(placed))
