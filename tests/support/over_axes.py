"""A step placed over one axis of a mesh after another, with layouts of a test's own, and run on virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.communicators.xla import XlaLowering
from jaxdist.ir.trace import stepping, trace
from jaxdist.mesh import AXIS, Axis
from jaxdist.placements.emit import Emitter, local_types
from jaxdist.placements.infer import Infer
from jaxdist.placements.values import REPLICATED, Placement, tile

Layouts = Sequence[int | None]
"""Of each argument the dimension that an axis cuts."""


def jaxpr(fun: Callable[..., Sequence[Any]], args: Sequence[Any]) -> ClosedJaxpr:
    """A function of arrays, traced as a step is."""
    with stepping(Mesh(np.array(jax.devices()[:1]), (AXIS,))):
        return trace(fun, [jax.typeof(x) for x in args])


def placed(closed: ClosedJaxpr, axes: Mapping[Axis, Layouts], stored: Sequence[bool]) -> ClosedJaxpr:
    """What one device runs; its results are whole.

    Args:
      closed: the step.
      axes: and how each cuts the arguments.
      stored: which arguments are state.
    """
    before: list[Axis] = []
    for axis, dims in axes.items():
        infer = Infer(axis, lambda shape: None, before=before)
        ins: list[Placement] = [
            REPLICATED if d is None else tile(d, a.shape[d], axis.size, stored=kept)
            for a, d, kept in zip(closed.in_avals, dims, stored, strict=True)
        ]
        block = infer.block(closed)
        block.outermost = True
        whole = infer.place(block, ins, [REPLICATED] * len(block.outputs))
        closed = Emitter(infer, whole, marks=True).program(local_types(whole))
        before.append(axis)
    return closed


def cut(x: Any, axes: Mapping[Axis, int | None]) -> tuple[Any, P]:
    """An array with the padding that its slices have, and where these lie."""
    names: list[list[str]] = [[] for _ in np.shape(x)]
    blocks = [np.asarray(x)] if any(d is not None for d in axes.values()) else []
    if not blocks:
        return x, P()

    def slices(x: np.ndarray, rest: Sequence[tuple[Axis, int | None]]) -> np.ndarray:
        """Every device's slices along the axes, put together again."""
        if not rest:
            return x
        (axis, d), *after = rest
        if d is None:
            return slices(x, after)
        missing = -x.shape[d] % axis.size
        x = np.concatenate([x, np.repeat(x.take([-1], d), missing, d)], d) if missing else x
        return np.concatenate([slices(part, after) for part in np.split(x, axis.size, d)], d)

    for axis, d in axes.items():
        if d is not None:
            names[d].append(axis.name)
    return slices(blocks[0], list(axes.items())), P(*[tuple(n) or None for n in names])


def run(closed: ClosedJaxpr, args: Sequence[Any], axes: Mapping[Axis, Layouts], stored: Sequence[bool]) -> list[Any]:
    """The results of a step on virtual devices."""
    local = placed(closed, axes, stored)
    sizes = [axis.size for axis in axes]
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), [axis.name for axis in axes])
    parts = [cut(x, {axis: dims[i] for axis, dims in axes.items()}) for i, x in enumerate(args)]
    on_devices = jax.shard_map(
        lambda *xs: XlaLowering().run(local, *xs), mesh=mesh, in_specs=tuple(spec for _, spec in parts),
        out_specs=[P()] * len(closed.out_avals), check_vma=False,
    )  # fmt: skip
    return jax.jit(on_devices)(*[x for x, _ in parts])
