"""A step, traced for the types of its arguments and analyzed."""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from jaxdist.compat import trace_state_clean
from jaxdist.compilation import finite, modules
from jaxdist.compilation.calling import ANNOTATIONS, Layouts
from jaxdist.compilation.signature import (
    NUMBERS,
    Args,
    ArgumentLeaves,
    Avals,
    Kwargs,
    Leaf,
    Match,
    PyTree,
    Signature,
    Static,
    TreeDef,
    Type,
    is_array,
    match,
    unflattener,
    with_constants,
)
from jaxdist.device_map import DeviceMap
from jaxdist.ir.trace import inside_step, stepping, trace
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, automatic, data_size, in_groups, passes
from jaxdist.placements.model.layouts import Cut, Layout, choose, layout, on_host
from jaxdist.placements.search.groups import group
from jaxdist.placements.search.infer import Infer
from jaxdist.placements.search.marks import Marks, marks
from jaxdist.placements.search.model_axis import search
from jaxdist.placements.search.owners import requested_way
from jaxdist.runtime.context import get_context
from jaxdist.text import name_of, say_once


@dataclass(frozen=True, eq=False)
class StepJaxpr:
    """A step as a jaxpr, at logical shapes."""

    jaxpr: ClosedJaxpr  # its outputs are the leaves of the result; then, if there are findings, one more with them
    tree: TreeDef  # of the result
    checked: tuple[str, ...]  # what the findings are about (see `jaxdist.compilation.finite`)

    def match(self, arguments: Sequence[ArgumentLeaves], avals: Sequence[Type]) -> Match:
        """What the result has of these arguments, whose leaves have these types."""
        return match(self.tree, self.jaxpr.out_avals[: self.tree.num_leaves], arguments, avals)

    def returned(self, arguments: Sequence[ArgumentLeaves], avals: Sequence[Type]) -> list[int]:
        """The arguments whose structure, shapes and dtypes a part of the result has."""
        matched = self.match(arguments, avals)
        returned = {i for i in matched.sources if i is not None}
        # Of arguments of one structure, types cannot tell which one a result is the next value of: it may be any.
        returned.update(i for tied in matched.tied if not returned.isdisjoint(tied) for i in tied)
        return [k for k, argument in enumerate(arguments) if argument.positions and argument.positions[0] in returned]


@dataclass(frozen=True, eq=False)
class TracedStep(StepJaxpr):
    """A step and its analysis."""

    infer: Infer  # places it over the last axis: data, unless that has one device
    groups: int  # of devices, each with all of the state
    marks: Marks  # of `jaxdist.zero`
    layouts: tuple[Layout | None, ...]  # how the step wants each argument to be kept
    sources: tuple[int | None, ...]  # for each output, the argument whose layout it reuses, or None
    returned_as_often: frozenset[int]  # arguments whose structure occurs as often among the results


A = ParamSpec("A")
R = TypeVar("R")


def without_collections(function: Callable[A, R]) -> Callable[A, R]:
    """A function that pauses Python's garbage collector: a full pass over JAX's objects takes 0.1 s, four were made."""

    @functools.wraps(function)
    def call(*args: A.args, **kwargs: A.kwargs) -> R:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return call


class ShardDims:
    """The dimension along which an array of a shape is sharded into so many parts, or None: of leaves and gradients."""

    def __init__(self, parts: int):
        self._parts = parts
        self.chosen = dict[tuple[int, ...], int | None]()  # by shape; those of leaves take their marks into account

    def __call__(self, shape: tuple[int, ...]) -> int | None:
        if shape not in self.chosen:
            cut = choose(shape, self._parts)
            self.chosen[shape] = cut.dim if cut else None
        return self.chosen[shape]


@without_collections
def traced(
    step: StepJaxpr,
    signature: Signature,
    avals: Avals,
    mesh: Mesh,
    machine: Machine,
    level: int | None = None,
    shared: int | None = None,
    layouts: Layouts | None = None,
    model_dims: Mapping[int, int] | None = None,
) -> TracedStep:
    """Analyze a step for placement: marks, layouts, and arguments that results match.

    Args:
      level: of `jaxdist.zero`, in place of the step's own.
      shared: the number of devices in a row that share sharded state, in place of the step's own; 0 for all.
      layouts: the dimensions that the model axis cuts, if the user has said so.
      model_dims: the leaves of the state that come cut by the model axis, and the dimension.
    """
    closed = step.jaxpr
    infer, shard_dims, parts, groups = _sharing(closed, mesh, machine, level, shared)
    block = infer.block(closed)
    block.outermost = True
    # What the step returns of its state is kept like the argument that it is the next value of.
    batch = set(signature.batch)
    matched = step.match([a for a in signature.arguments if batch.isdisjoint(a.positions)], avals)
    # The counts of `check_finite` are one more output, and nobody's next value.
    sources = [*matched.sources, *[None] * (len(closed.out_avals) - step.tree.num_leaves)]
    # The model axis cuts first: a shard is of the slice that it leaves.
    by_model = _cut_by_model(layouts, signature, avals, mesh, infer, closed, sources, model_dims or {})
    shapes = [layout.local(aval.shape) for aval, layout in zip(avals, by_model, strict=True)]
    zero_marks = marks(infer, block)
    cuts = zero_marks.cuts(shapes, parts)
    # What is chosen for a leaf holds for its gradient and updates too, which have its shape.
    shard_dims.chosen.update({shape: cut.dim for shape, cut in zip(shapes, cuts, strict=True) if cut})
    all_layouts = [layout.with_cut(cut) for layout, cut in zip(by_model, cuts, strict=True)]
    offloaded = zero_marks.offloaded if infer.axis.machine.has_own_memory else set[int]()
    kept = tuple(_as_kept(all_layouts, shapes, offloaded, matched.tied, mesh.size))
    return TracedStep(
        closed, step.tree, step.checked, infer, groups, zero_marks, kept, tuple(sources), matched.returned
    )


def _sharing(
    closed: ClosedJaxpr, mesh: Mesh, machine: Machine, level: int | None, shared: int | None
) -> tuple[Infer, ShardDims, int, int]:
    """Return inference over the last axis, its sharding, the number of devices that share a leaf, and of groups."""
    if shared is None:  # `zero(within=)`
        shared = group(closed, DeviceMap.of(mesh, machine.hosts).hosts_of_parts)
    parts = shared or data_size(mesh)
    groups = data_size(mesh) // parts if parts > 1 else 1
    run_mesh = in_groups(mesh, groups)
    *outer_axes, axis = passes(run_mesh)
    # Only the data axis cuts state into shards; it is the last one that a step is placed over. Inference asks how a
    # shape is cut (`Infer.shard_dim`), for the first time once `traced` has cut the leaves.
    shard_dims = ShardDims(parts) if axis.name == AXIS else ShardDims(1)
    infer = Infer(axis, shard_dims, level, machine.over(run_mesh), requested_way(closed), outer_axes)
    return infer, shard_dims, parts, groups


def _as_kept(
    layouts: Sequence[Layout],
    shapes: Sequence[tuple[int, ...]],
    offloaded: Collection[int],
    tied: Iterable[Sequence[int]],
    devices: int,
) -> list[Layout | None]:
    """Return how the leaves of the state are kept between steps; None: whole on each device."""
    kept = [layout if layout.cuts else None for layout in layouts]
    for i in offloaded:
        kept[i] = on_host(kept[i], shapes[i], devices)
    # Arguments of one structure are kept the same way, so it does not matter which one a result replaces.
    for alike in tied:
        shared_layout = next((kept[i] for i in alike if kept[i]), None)
        for i in alike:
            kept[i] = shared_layout
    return kept


@without_collections
def jaxpr_of(
    step: Callable[..., PyTree], signature: Signature, avals: Avals, mesh: Mesh, check_finite: bool
) -> StepJaxpr:
    """Trace a step."""
    traces: list[tuple[TreeDef, tuple[str, ...]]] = []  # the structure of the result, and what is checked

    def flat(*args: PyTree) -> list[Leaf]:
        with stepping(findings := finite.Findings(automatic(mesh))):
            result = modules.run(step, args, signature.keywords)
            if check_finite:
                findings.look_at(result, "result")
        # Constants of the result are no outputs of the jaxpr: they are put back into the structure at each call.
        # Numbers are constants where some of the arguments' are, in modules of equinox.
        constant = NUMBERS if signature.numbers else ()
        leaves, whole = jax.tree.flatten(result)
        marked = [x if is_array(x) and not isinstance(x, constant) else Static(x) for x in leaves]
        outs = [x for x in marked if not isinstance(x, Static)]
        traces.append((with_constants(whole, marked), tuple(findings.names)))
        return [*outs, jnp.stack(findings.counts, 1)] if findings.names else outs

    with contextlib.suppress(AttributeError, TypeError):  # errors of JAX then name the step and its arguments
        functools.update_wrapper(flat, step, updated=())
    try:
        closed, axis, divided = trace(flat, _arguments(signature, avals))
    except Exception as error:
        error.add_note(f"in the step {name_of(step)!r}, decorated with jaxdist.data_parallel")
        if "set_mesh" in str(error) or "mesh: ()" in str(error):
            error.add_note(
                "a step is traced without a mesh. jax.sharding.reshard(x, jax.P(...)) needs none; with_sharding_"
                "constraint takes names of axes if jax.set_mesh has set their mesh"
            )
        raise
    if mesh.size > 1 and get_context().is_root:
        _warn_of_divisions(name_of(step), axis, divided, mesh)
    return StepJaxpr(closed, *traces[-1])


def _warn_of_divisions(step: str, axis: str, divided: Iterable[tuple[float, str]], mesh: Mesh) -> None:
    """Warn of a step that was written for `jax.pmap` and divides by the number of devices itself."""
    counts = {mesh.size, len(mesh.local_devices), DeviceMap.of(mesh).process_count} - {1}
    for line, count in {line: count for count, line in divided if count in counts}.items():
        say_once(
            f"step {step!r} divides a sum over the axis {axis!r} by {count:g} at {line}. The axis has size one inside "
            f"a step: lax.psum(x, {axis!r}) is x, of the whole batch, and x over the number of devices "
            f"1/{mesh.size} of it. Write lax.pmean(x, {axis!r}), or divide by lax.axis_size({axis!r})"
        )


@dataclass(frozen=True)
class _Argument:
    """The types of an argument's leaves: JAX rebuilds the argument from tracers, as `jax.jit` does."""

    tree: TreeDef
    types: Sequence[Leaf]  # tracers, once JAX has flattened it
    paths: tuple[str, ...]  # in the argument, for JAX's messages


jax.tree_util.register_pytree_with_keys(
    _Argument,
    lambda argument: (tuple(zip(argument.paths, argument.types, strict=True)), (argument.tree, argument.paths)),
    lambda tree_and_paths, tracers: unflattener(tree_and_paths[0])(tuple(tracers)),
)


def _arguments(signature: Signature, types: Avals) -> list[_Argument]:
    names = signature.names
    return [
        _Argument(
            argument.structure, [types[i] for i in argument.positions],
            tuple(names[i].removeprefix(argument.name) for i in argument.positions),
        )
        for argument in signature.arguments
    ]  # fmt: skip


def is_traced(args: Args, kwargs: Kwargs) -> bool:
    """Check whether JAX is tracing a call: under `jax.grad`, `jax.eval_shape`, or inside a step."""
    return inside_step() or (
        not trace_state_clean() and any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
    )


# --- the dimension of each leaf of the state that the model axis cuts


def _cut_by_model(
    layouts: Layouts | None,
    signature: Signature,
    avals: Avals,
    mesh: Mesh,
    infer: Infer,
    closed: ClosedJaxpr,
    sources: Sequence[int | None],
    model_dims: Mapping[int, int],
) -> list[Layout]:
    """Return the layout of each argument of a step along the model axis."""
    parts = mesh.shape.get(MODEL, 1)
    if parts == 1:
        dims = {}
    elif layouts is None or layouts == ANNOTATIONS:
        if layouts and not signature.annotated:
            names = ", ".join(signature.names[i] for i in signature.state[:8])
            raise ValueError(f"layouts={layouts!r}: no annotation of flax in {names} names the axis {MODEL!r}")
        infer = infer.over(passes(mesh), 0)
        block = infer.block(closed)
        block.outermost = True
        # An optimizer's statistics have the annotations of their parameters, and may have fewer dimensions.
        of_state = [(i, d) for i, d in signature.annotated if not signature.is_batch[i]]
        fixed = {**{i: d for i, d in of_state if d is None or d < len(avals[i].shape)}, **model_dims}
        dims = search(infer, block, signature.state, sources, signature.names, mesh.size // parts, fixed)
    else:
        dims = _named(layouts, signature, avals, parts)

    cuts = {i: Cut(MODEL, parts, d, -avals[i].shape[d] % parts) for i, d in dims.items() if d is not None}
    return [layout(cuts[i]) if i in cuts else layout() for i in range(len(avals))]


def _named(layouts: Mapping[str, int | None], signature: Signature, avals: Avals, parts: int) -> dict[int, int]:
    """The arguments that the user's expressions name, and the dimension."""
    dims = dict[int, int]()
    used = set[str]()  # expressions
    lacking = dict[str, str]()  # expressions that name a dimension that the leaf does not have
    for i in signature.state:
        name, shape = signature.names[i], avals[i].shape
        for expression, dim in layouts.items():
            # The first expression that is found in a name decides: an exception comes before its rule.
            if not re.search(expression, name):
                continue
            if dim is not None and shape and not -len(shape) <= dim < len(shape):
                lacking.setdefault(expression, f"leaf {name} has shape {shape}, and no dimension {dim}")
                break  # an optimizer's statistics of a parameter may have fewer dimensions
            used.add(expression)
            if dim is not None and shape and not jnp.issubdtype(avals[i].dtype, jax.dtypes.extended):
                dims[i] = dim % len(shape)
            break
    if useless := [expression for expression in lacking if expression not in used]:
        expression = useless[0]
        raise ValueError(
            f"layouts={{{expression!r}: {layouts[expression]}}}: {lacking[expression]} for the {parts} devices of the "
            f"axis {MODEL!r} to cut"
        )
    if unused := [expression for expression in layouts if expression not in used]:
        names = ", ".join(signature.names[i] for i in signature.state[:8])
        raise ValueError(f"layouts: {unused[0]!r} is found in no leaf of the state; its leaves are {names}")
    return dims
