"""A traced step on the devices of a mesh: the placement of each value, and the program of one device."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.communicators import Rules
from jaxdist.compat import under_no_mesh
from jaxdist.compilation.signature import Avals, Signature, is_keys
from jaxdist.compilation.tracing import TracedStep, without_collections
from jaxdist.errors import StepError
from jaxdist.mesh import AXIS, GROUP, MODEL, SEQUENCE, Axis, axes_by_dim, axes_of_mesh, data_size, in_groups, passes
from jaxdist.placements.emit.buckets import Fuse
from jaxdist.placements.emit.compressible import compressible
from jaxdist.placements.emit.emitter import Emitter, local_types
from jaxdist.placements.emit.offload import staged
from jaxdist.placements.model.layouts import Layout, layout_of, sharding, spec
from jaxdist.placements.model.strategy import Propagation
from jaxdist.placements.model.values import REPLICATED, Form, Placement, Split, form, tiles
from jaxdist.placements.report import worth_splitting

_STATE_PER_GATHER = 64  # at most this fraction of the sharded state (1 / 64), to send fewer messages


class Emitted(NamedTuple):
    """A step as a program of one device."""

    program: ClosedJaxpr
    propagations: Sequence[Propagation]  # over each axis; none on one device


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step for arguments of one type, on a mesh."""

    step: TracedStep
    signature: Signature  # of its arguments
    avals: Avals  # their types
    layouts: Sequence[Layout | None]  # of each, the batch as well; None: whole on each device
    mesh: Mesh
    communicator: str | Rules
    bucket_bytes: int  # of a message of gradients
    compress: str | None  # the dtype that gradients are sent in, if not their own

    @functools.cached_property
    def run_mesh(self) -> Mesh:
        """The mesh that it runs on: the arguments' mesh, in groups if state is sharded within groups."""
        devices = data_size(self.mesh)
        parts = [cut.parts for layout in self.layouts if layout and (cut := layout.by(AXIS))]
        groups = max(self.step.groups, devices // min(parts, default=devices))
        if groups > 1 and AxisType.Explicit in self.mesh.axis_types:
            raise StepError(
                f"zero(within=) keeps state in {groups} groups of devices, for which a mesh {dict(self.mesh.shape)} "
                "with Explicit axes has no axis: set or pass one with Auto axes"
            )
        return in_groups(self.mesh, groups)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of that mesh, the outermost first."""
        return axes_of_mesh(self.run_mesh)

    @functools.cached_property
    def batch(self) -> list[Layout]:
        """Layouts of the leaves of the batch."""
        return [layout for i in self.signature.batch if (layout := self.layouts[i])]

    @functools.cached_property
    def physical_types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the arguments once they are on the mesh, with padding and sharding."""
        return [
            jax.ShapeDtypeStruct(
                layout.physical(aval.shape) if layout else aval.shape, aval.dtype,
                sharding=sharding(self.mesh, layout), weak_type=aval.weak_type,
            ) for aval, layout in zip(self.avals, self.layouts, strict=True)
        ]  # fmt: skip

    @functools.cached_property
    def padded(self) -> list[int]:
        """The leaves of the state whose shards have a padded end, counted among the leaves of the state."""
        layouts = enumerate(self.layouts[i] for i in self.signature.state)
        return [k for k, layout in layouts if layout and not layout.is_plain]

    @functools.cached_property
    def result_layouts(self) -> list[Layout | None]:
        """Layouts of the results that have the structure of an argument of the state."""
        return [None if i is None else self.layouts[i] for i in self.step.sources]

    @functools.cached_property
    def offloaded(self) -> dict[int, int | None]:
        """The arguments in the host's memory, and the result that takes the place of each."""
        sources, layouts = self.step.sources, enumerate(self.layouts)
        return {i: sources.index(i) if i in sources else None for i, layout in layouts if layout and layout.host}

    @functools.cached_property
    def unreturned(self) -> set[int]:
        """State leaves with no matching result."""
        return set(self.signature.state).difference(self.step.sources)

    @functools.cached_property
    @under_no_mesh
    @without_collections
    def emitted(self) -> Emitted:
        """The program of a device, with its messages in buckets and its offloaded state in stages."""
        if self.mesh.size == 1:
            return Emitted(staged(self.step.jaxpr, self.offloaded, ()), ())
        closed, propagations = self.place()
        # Messages of one kind are joined up to a size: gradients by the user's option, gathered state by what it may
        # take of a device's memory at once.
        state = [self.avals[i] for i in self.signature.state if self.layouts[i]]
        gathered_bytes = sum(aval.size * aval.dtype.itemsize for aval in state) // _STATE_PER_GATHER
        # XLA for CPUs drops barriers before it schedules: there `Fuse` delays gathers in another way.
        barriers = not self.step.infer.axis.machine.kind.is_cpu
        fused = Fuse(self.bucket_bytes, self.axes, gathered_bytes, barriers=barriers)(closed)
        return Emitted(staged(fused, self.offloaded, self.axes), propagations)

    def place(self) -> Emitted:
        """Place and emit the step, over an axis of the mesh after the other.

        What is emitted for one axis is the program of a device along it, and the step that is placed over the next.
        """
        step, axes, closed = self.step, passes(self.run_mesh), self.step.jaxpr
        ins_by_axis = [
            layout.placements(aval.shape, axes, of_state=not is_batch) if layout else [REPLICATED] * len(axes)
            for is_batch, layout, aval in zip(self.signature.is_batch, self.layouts, self.avals, strict=True)
        ]
        outs_by_axis = [
            layout and layout.placements(aval.shape, axes)
            for layout, aval in zip(self.result_layouts, closed.out_avals, strict=True)
        ]
        propagations = list[Propagation]()
        for k in range(len(axes)):
            is_last = k == len(axes) - 1
            # The last axis is the one that the step was analyzed for: what was inferred then is not inferred anew.
            infer = step.infer if is_last and step.infer.axis.mesh == axes else step.infer.over(axes, k)
            block = infer.block(closed)
            block.outermost = True
            ins = [by_axis[k] for by_axis in ins_by_axis]
            # First as the results come by themselves, then as they are to leave: an aux value may stay as it comes.
            natural = infer.place(block, ins).out_placements
            # Groups, and the devices of each, divide one batch: the second of these passes goes on with the slices of
            # the first.
            along_groups = propagations and axes[k - 1].name == GROUP
            outer = propagations[-1].out_forms if along_groups else [None] * len(outs_by_axis)
            out_forms = [
                form(by_axis[k]) if by_axis else _out_form(placement, over_groups, axes, k, source is not None)
                for by_axis, placement, over_groups, source in zip(
                    outs_by_axis, natural, outer, step.sources, strict=True
                )
            ]
            propagations.append(placed := infer.place(block, ins, out_forms))
            may_compress = compressible(placed, self.step.sources) if self.compress else {}
            marks = not is_last or bool(self.offloaded)
            closed = Emitter(placed, may_compress, self.compress, marks).program(local_types(placed))
        return Emitted(closed, propagations)

    def specs(self) -> tuple[list[P], list[P]]:
        """Return the specs of the arguments and of the results."""
        propagations = self.emitted.propagations
        axes = [placed.axis.name for placed in propagations]
        ins = zip(*(placed.in_forms for placed in propagations), strict=True)
        outs = zip(*(placed.out_forms for placed in propagations), strict=True)
        return [_spec(axes, by_axis) for by_axis in ins], [_spec(axes, by_axis) for by_axis in outs]

    def result_shardings(self) -> list[NamedSharding] | None:
        """The shardings of results of a step in groups, or over Explicit axes; None of others."""
        # On the arguments' mesh where possible, so that the next call gets arguments of the same type.
        is_explicit = AxisType.Explicit in self.mesh.axis_types  # types would say more than `sharding`: P('data', None)
        if self.run_mesh is self.mesh and not is_explicit:
            return None
        if self.mesh.size == 1:
            return [sharding(self.mesh, layout) for layout in self.result_layouts]

        def sharding_of(result_spec: P, layout: Layout | None) -> NamedSharding:
            if layout is not None:
                return sharding(self.mesh, layout)
            dims = axes_by_dim(result_spec)
            if any((GROUP in axes) != (AXIS in axes) for axes in dims):
                return NamedSharding(self.run_mesh, result_spec)
            return NamedSharding(self.mesh, spec([tuple(name for name in axes if name != GROUP) for axes in dims]))

        return list(map(sharding_of, self.specs()[1], self.result_layouts))

    def out_layouts(self) -> list[Layout | None]:
        """Layouts of all results as they come out of the program, of several devices."""
        innermost, forms = passes(self.run_mesh)[-1], self.emitted.propagations[-1].out_forms
        return [kept or layout_of(form, innermost) for kept, form in zip(self.result_layouts, forms, strict=True)]

    def cut_by_model(self) -> dict[str, int]:
        """The leaves that the model axis cuts, by name, and the dimension."""
        layouts = zip(self.signature.names, self.layouts, strict=True)
        return {name: cut.dim for name, layout in layouts if layout and (cut := layout.by(MODEL))}

    def padding(self) -> str:
        """Describe the padding added if the devices do not divide the batch, or return ""."""
        devices, sizes = data_size(self.mesh), {self.avals[i].shape[0] for i in self.signature.batch}
        rows = sizes.pop() if len(sizes) == 1 else 0
        if not (pad := -rows % devices):
            return ""
        plural = "s" * (rows > 1)
        return f"{rows} row{plural} over {devices} devices: {pad} of {rows + pad} computed rows are padding"

    def unsplit(self) -> list[str]:
        """The arguments worth splitting of a step without a batch."""
        names = [
            argument.name for argument in self.signature.arguments
            if self.unreturned.issuperset(argument.positions)
            and any(self.avals[i].shape and not is_keys(self.avals[i]) for i in argument.positions)
        ]  # fmt: skip
        return names if any(map(worth_splitting, self.emitted.propagations)) else []


def _out_form(
    natural: Placement, over_groups: Placement | None, axes: Sequence[Axis], k: int, is_next_state: bool
) -> Form:
    """Return the form in which a result without a layout leaves the `k`-th pass.

    `natural` is its placement by itself, `over_groups` the one over the groups of devices, if the axis is in a group.
    """
    if isinstance(over_groups, Split):
        return tiles(over_groups.dim, over_groups.size, [axis.size for axis in _of_data(axes)])[-1]
    stays = not is_next_state and isinstance(natural, Split) and _stays_split(natural, axes, k)
    return form(natural) if stays else REPLICATED


def _stays_split(split: Split, axes: Sequence[Axis], k: int) -> bool:
    """Check whether an aux value stays split over the `k`-th axis: devices divide it, or the step asked for shards."""
    axis = axes[k]
    if split.of_state:
        return axis.name == AXIS and split.requested and split.is_tile(axis.size)
    along = [axis] if axis.name == SEQUENCE else _of_data(axes)
    if axis not in along[:1] or split.size % math.prod(a.size for a in along):
        return False
    return split.outer == 1 and not split.is_padded(axis.size) and not split.whole


def _of_data(axes: Sequence[Axis]) -> list[Axis]:
    """The axes that split the batch's examples: one, or two, the second of them for shards."""
    return [axis for axis in axes if axis.name in (GROUP, AXIS)]


def _spec(axes: Sequence[str], placements: Sequence[Placement]) -> P:
    """Return the spec of an array with these placements, one per axis."""
    cut = [(p.dim, axis) for p, axis in zip(placements, axes, strict=True) if isinstance(p, Split)]
    dims = [tuple(name for dim, name in cut if dim == d) for d in range(1 + max((dim for dim, _ in cut), default=-1))]
    return spec(dims)
