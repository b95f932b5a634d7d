"""The passes of a step: it is placed over an axis of the mesh after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import AXIS, GROUP, SEQUENCE, Axis
from jaxdist.placements.infer import Infer
from jaxdist.placements.layouts import spec
from jaxdist.placements.strategy import Placed
from jaxdist.placements.values import REPLICATED, Form, Placement, Split, form, tiles
from jaxdist.step.tracing import TracedStep

OfEachPass = Sequence[Placement]


@dataclass(frozen=True)
class Pass:
    """A step, placed over one axis."""

    infer: Infer  # over that axis
    placed: Placed  # with its values in slices along it
    ins: OfEachPass  # how its arguments come


def place(
    step: TracedStep,
    axes: Sequence[Axis],
    given: Sequence[OfEachPass],
    kept: Sequence[OfEachPass | None],
    emit: Callable[[Infer, Placed], ClosedJaxpr],
) -> list[Pass]:
    """Settle the placements of a step, over an axis after the other."""
    found, closed = list[Pass](), step.jaxpr
    for k in range(len(axes)):
        last = k == len(axes) - 1
        infer = step.infer if last and step.infer.mesh == axes else step.infer.over(axes, k)
        block = infer.block(closed)
        block.outermost = True
        ins = [placements[k] for placements in given]
        natural = infer.place(block, ins).given
        outer = found[-1].placed.outs if found and axes[k - 1].name == GROUP else [None] * len(kept)
        wants = [
            form(how[k]) if how else _wanted(made, before, axes, k, source is not None)
            for how, made, before, source in zip(kept, natural, outer, step.sources, strict=True)
        ]
        placed = infer.place(block, ins, wants)
        found.append(Pass(infer, placed, ins))
        if not last:
            closed = emit(infer, placed)
    return found


def _wanted(made: Placement, outer: Placement | None, axes: Sequence[Axis], k: int, carried: bool) -> Form:
    """Return the form in which a result without a layout leaves the `k`-th pass."""
    if isinstance(outer, Split):
        return tiles(outer.dim, outer.size, [axis.size for axis in _of_data(axes)])[-1]
    return form(made) if not carried and isinstance(made, Split) and _stays(made, axes, k) else REPLICATED


def _stays(p: Split, axes: Sequence[Axis], k: int) -> bool:
    """Check whether an aux value stays split over the `k`-th axis: the devices divide it (along both data axes, if
    there are two), or the step asked for shards."""
    own = axes[k]
    if p.stored:
        return own.name == AXIS and p.requested and p.is_tile(own.size)
    along = [own] if own.name == SEQUENCE else _of_data(axes)
    if own not in along[:1] or p.size % math.prod(axis.size for axis in along):
        return False
    return p.outer == 1 and not p.is_padded(own.size) and not p.whole


def _of_data(axes: Sequence[Axis]) -> list[Axis]:
    """The axes that split the batch's examples: one, or two, the second of them for shards."""
    return [axis for axis in axes if axis.name in (GROUP, AXIS)]


def spec_of(found: Sequence[Pass], placements: OfEachPass) -> P:
    """Return the spec of an array with these placements, one per pass."""
    axes = [one.infer.axis for one in found]
    cut = [(p.dim, axis.name) for p, axis in zip(placements, axes, strict=True) if isinstance(p, Split)]
    dims = [tuple(name for dim, name in cut if dim == d) for d in range(1 + max((dim for dim, _ in cut), default=-1))]
    return spec(dims)
