"""A traced step on the devices of a mesh: the placement of each value, and the program of one device."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.communicators import Rules
from jaxdist.mesh import AXIS, GROUP, MODEL, SEQUENCE, Axis, axes_of_mesh, data_size, in_groups, passes
from jaxdist.placements.buckets import Fuse
from jaxdist.placements.emit import Emitter, compressible, local_types
from jaxdist.placements.layouts import Layout, sharding, spec
from jaxdist.placements.offload import staged
from jaxdist.placements.report import worth_splitting
from jaxdist.placements.strategy import Propagation
from jaxdist.placements.values import REPLICATED, Form, Placement, Split, form, tiles
from jaxdist.step.batch import is_keys, unsplit
from jaxdist.step.signature import Signature
from jaxdist.step.tracing import TracedStep, without_collections

_GATHERED_AT_ONCE = 64  # at most this fraction of the sharded state (1 / 64), to send fewer messages


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step for arguments of one type, on a mesh."""

    step: TracedStep
    signature: Signature  # of its arguments
    avals: Sequence[Any]  # their types
    layouts: Sequence[Layout | None]  # how each is kept, the batch as well; None: whole
    mesh: Mesh
    communicator: str | Rules
    bucket_bytes: int  # of a message of gradients
    compress: str | None  # the dtype that gradients are sent in, if not their own

    @functools.cached_property
    def over(self) -> Mesh:
        """The mesh that it runs on: the arguments' mesh, in groups if state is sharded within groups."""
        whole = data_size(self.mesh)
        shares = [cut.parts for how in self.layouts if how and (cut := how.by(AXIS))]
        return in_groups(self.mesh, max(self.step.groups, whole // min(shares, default=whole)))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of that mesh, the outermost first."""
        return axes_of_mesh(self.over)

    @functools.cached_property
    def batch(self) -> list[Layout]:
        """Layouts of the leaves of the batch."""
        return [how for i in self.signature.batch if (how := self.layouts[i])]

    @functools.cached_property
    def held(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the arguments once they are on the mesh: of their physical arrays."""
        return [
            jax.ShapeDtypeStruct(
                how.physical(a.shape) if how else a.shape, a.dtype, sharding=sharding(self.mesh, how),
                weak_type=a.weak_type,
            ) for a, how in zip(self.avals, self.layouts, strict=True)
        ]  # fmt: skip

    @functools.cached_property
    def padded(self) -> list[int]:
        """The leaves of the state whose shards have a padded end."""
        kept = enumerate(self.layouts[i] for i in self.signature.state)
        return [k for k, how in kept if how and not how.is_plain]

    @functools.cached_property
    def results(self) -> list[Layout | None]:
        """Layouts of the results that have the structure of an argument of the state."""
        return [None if i is None else self.layouts[i] for i in self.step.sources]

    @functools.cached_property
    def offloaded(self) -> dict[int, int | None]:
        """The arguments in the host's memory, and the result that takes the place of each."""
        sources = self.step.sources
        return {i: sources.index(i) if i in sources else None for i, how in enumerate(self.layouts) if how and how.host}

    @functools.cached_property
    def unreturned(self) -> set[int]:
        """The leaves of the state of whose structure the step returns nothing."""
        return set(self.signature.state).difference(self.step.sources)

    @functools.cached_property
    @without_collections()
    def emitted(self) -> tuple[ClosedJaxpr, Sequence[Propagation]]:
        """The program of a device, and its placement over each axis (empty on one device)."""
        if self.mesh.size == 1:
            return staged(self.step.jaxpr, self.offloaded, ()), ()
        closed, found = self.place()
        sizes = {i: self.avals[i].size * self.avals[i].dtype.itemsize for i in self.signature.state if self.layouts[i]}
        gathered, barriers = sum(sizes.values()) // _GATHERED_AT_ONCE, not self.step.infer.machine.kind.is_cpu
        fused = Fuse(self.bucket_bytes, self.axes, gathered, barriers=barriers)(closed)
        return staged(fused, self.offloaded, self.axes), found

    def place(self) -> tuple[ClosedJaxpr, list[Propagation]]:
        """Place and emit the step, over an axis of the mesh after the other."""
        step, axes, closed = self.step, passes(self.over), self.step.jaxpr
        given = [
            how.placements(a.shape, axes, of_state=not is_batch) if how else [REPLICATED] * len(axes)
            for is_batch, how, a in zip(self.signature.is_batch, self.layouts, self.avals, strict=True)
        ]
        kept = [how and how.placements(a.shape, axes) for how, a in zip(self.results, closed.out_avals, strict=True)]
        found = list[Propagation]()
        for k in range(len(axes)):
            last = k == len(axes) - 1
            infer = step.infer if last and step.infer.mesh == axes else step.infer.over(axes, k)
            block = infer.block(closed)
            block.outermost = True
            ins = [placements[k] for placements in given]
            natural = infer.place(block, ins).out_placements
            outer = found[-1].out_forms if found and axes[k - 1].name == GROUP else [None] * len(kept)
            wants = [
                form(how[k]) if how else _wanted(made, before, axes, k, source is not None)
                for how, made, before, source in zip(kept, natural, outer, step.sources, strict=True)
            ]
            found.append(placed := infer.place(block, ins, wants))
            may = compressible(placed, self.step.sources) if self.compress else {}
            marks = not last or bool(self.offloaded)
            closed = Emitter(infer, placed, may, self.compress, marks).program(local_types(placed))
        return closed, found

    def specs(self) -> tuple[list[P], list[P]]:
        """Return the specs of the arguments and of the results."""
        found = self.emitted[1]
        axes = [one.axis for one in found]
        ins, outs = (
            zip(*(one.in_forms for one in found), strict=True),
            zip(*(one.out_forms for one in found), strict=True),
        )
        return [_spec(axes, ps) for ps in ins], [_spec(axes, ps) for ps in outs]

    def result_shardings(self) -> list[NamedSharding] | None:
        """The shardings of results of a step in groups; None without groups."""
        # On the arguments' mesh where possible, so that the next call gets arguments of the same type.
        if self.over is self.mesh:
            return None

        def lie(own: P, how: Layout | None) -> NamedSharding:
            if how is not None:
                return sharding(self.mesh, how)
            dims = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in own]
            if any((GROUP in axes) != (AXIS in axes) for axes in dims):
                return NamedSharding(self.over, own)
            return NamedSharding(self.mesh, spec([tuple(name for name in axes if name != GROUP) for axes in dims]))

        return list(map(lie, self.specs()[1], self.results))

    def cut_by_model(self) -> dict[str, int]:
        """The leaves that the model axis cuts, by name, and the dimension."""
        kept = zip(self.signature.names, self.layouts, strict=True)
        return {name: cut.dim for name, how in kept if how and (cut := how.by(MODEL))}

    def padding(self) -> str:
        """Return what it costs that the devices do not divide the batch, or ""."""
        devices, sizes = data_size(self.mesh), {self.avals[i].shape[0] for i in self.signature.batch}
        rows = sizes.pop() if len(sizes) == 1 else 0
        if not (pad := -rows % devices):
            return ""
        plural = "s" * (rows > 1)
        return f"{rows} row{plural} over {devices} devices: {pad} of {rows + pad} computed rows are padding"

    def unsplit(self) -> str:
        """Return a hint for a step without a batch that has an argument worth splitting, or ""."""
        names = [
            name for _, at, name in self.signature.arguments
            if self.unreturned.issuperset(at) and any(self.avals[i].shape and not is_keys(self.avals[i]) for i in at)
        ]  # fmt: skip
        if not names or not any(map(worth_splitting, self.emitted[1])):
            return ""
        return unsplit(names, self.mesh.size, len({d.process_index for d in self.mesh.devices.flat}))


def _wanted(made: Placement, outer: Placement | None, axes: Sequence[Axis], k: int, carried: bool) -> Form:
    """Return the form in which a result without a layout leaves the `k`-th pass."""
    if isinstance(outer, Split):
        return tiles(outer.dim, outer.size, [axis.size for axis in _of_data(axes)])[-1]
    return form(made) if not carried and isinstance(made, Split) and _stays(made, axes, k) else REPLICATED


def _stays(p: Split, axes: Sequence[Axis], k: int) -> bool:
    """Check whether an aux value stays split over the `k`-th axis: devices divide it, or the step asked for shards."""
    own = axes[k]
    if p.of_state:
        return own.name == AXIS and p.requested and p.is_tile(own.size)
    along = [own] if own.name == SEQUENCE else _of_data(axes)
    if own not in along[:1] or p.size % math.prod(axis.size for axis in along):
        return False
    return p.outer == 1 and not p.is_padded(own.size) and not p.whole


def _of_data(axes: Sequence[Axis]) -> list[Axis]:
    """The axes that split the batch's examples: one, or two, the second of them for shards."""
    return [axis for axis in axes if axis.name in (GROUP, AXIS)]


def _spec(axes: Sequence[str], placements: Sequence[Placement]) -> P:
    """Return the spec of an array with these placements, one per axis."""
    cut = [(p.dim, axis) for p, axis in zip(placements, axes, strict=True) if isinstance(p, Split)]
    dims = [tuple(name for dim, name in cut if dim == d) for d in range(1 + max((dim for dim, _ in cut), default=-1))]
    return spec(dims)
