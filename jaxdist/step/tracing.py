"""A step, traced for the types of its arguments and analyzed."""

import contextlib
import functools
import gc
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from jaxdist.compat import trace_state_clean
from jaxdist.ir.trace import inside_step, stepping, trace
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, along_data, data_size, in_groups, passes
from jaxdist.placements.infer import Infer
from jaxdist.placements.layouts import Cut, Layout, choose, layout, on_host
from jaxdist.placements.marks import Marks, group, marks
from jaxdist.placements.owners import way
from jaxdist.placements.search import search
from jaxdist.runtime.context import get_context
from jaxdist.step import finite, modules
from jaxdist.step.calling import Layouts
from jaxdist.step.signature import NUMBERS, Signature, Static, is_array, match, unflattener, with_constants
from jaxdist.text import name_of

_log = logging.getLogger("jaxdist")


@dataclass(frozen=True, eq=False)
class StepJaxpr:
    """A step as a jaxpr, at logical shapes."""

    jaxpr: ClosedJaxpr  # its outputs are the leaves of the result; then, if there are findings, one more with them
    tree: Any  # of the result
    checked: tuple[str, ...]  # what the findings are about (see `jaxdist.step.finite`)

    def returned(self, arguments: Sequence[tuple[Any, list[int], str]], avals: Sequence[Any]) -> list[int]:
        """The arguments (structure, positions, name) whose structure, shapes and dtypes a part of the result has."""
        sources, _, alike = match(self.tree, self.jaxpr.out_avals[: self.tree.num_leaves], arguments, avals)
        like = {i for i in sources if i is not None}
        like.update(i for group in alike if not like.isdisjoint(group) for i in group)
        return [k for k, (_, at, _) in enumerate(arguments) if at and at[0] in like]


@dataclass(frozen=True, eq=False)
class TracedStep(StepJaxpr):
    """A step and its analysis."""

    infer: Infer  # places it over the axis along which state is kept in shards
    groups: int  # of devices, each with all of the state
    marks: Marks  # of `jaxdist.zero`
    layouts: tuple[Layout | None, ...]  # how the step wants each argument to be kept
    sources: tuple[int | None, ...]  # for each output the argument of its structure, like which it is kept, or None
    may_take: frozenset[int]  # the arguments of whose structure there are as many results as arguments


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause Python's garbage collector: a full pass over all of JAX's objects takes 0.1 s, and placing made four."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collections()
def traced(
    step: StepJaxpr,
    signature: Signature,
    avals: Sequence[Any],
    mesh: Mesh,
    machine: Machine,
    level: int | None = None,
    shared: int | None = None,
    layouts: Layouts | None = None,
    given: Mapping[int, int] | None = None,
) -> TracedStep:
    """Analyze a step for placement: marks, layouts, and arguments that results match."""
    closed, tree = step.jaxpr, step.tree
    dims: dict[tuple[int, ...], int | None] = {}

    def chosen(shape: tuple[int, ...]) -> int | None:
        if shape not in dims:
            cut = choose(shape, parts)
            dims[shape] = cut.dim if cut else None
        return dims[shape]

    if shared is None:
        shared = group(closed, along_data(mesh, machine.hosts))
    parts = shared or data_size(mesh)
    groups = data_size(mesh) // parts if parts > 1 else 1
    over = in_groups(mesh, groups)
    machine, (*before, axis) = machine.over(over), passes(over)
    infer = Infer(axis, chosen if axis.name == AXIS else lambda shape: None, level, machine, way(closed), before)
    block = infer.block(closed)
    block.outermost = True
    batch = set(signature.batch)
    arguments = [argument for argument in signature.arguments if batch.isdisjoint(argument[1])]
    sources, may_take, alike = match(tree, closed.out_avals[: tree.num_leaves], arguments, avals)
    sources += [None] * (len(closed.out_avals) - tree.num_leaves)
    outer = _cut_by_model(layouts, signature, avals, mesh, infer, closed, sources, given or {})
    shapes = [how.local(a.shape) for a, how in zip(avals, outer, strict=True)]
    found = marks(infer, block, level)
    cuts = found.cuts(shapes, parts)
    dims.update({shape: cut.dim for shape, cut in zip(shapes, cuts, strict=True) if cut})
    every = [how.with_cut(cut) for how, cut in zip(outer, cuts, strict=True)]
    kept = [how if how.cuts else None for how in every]
    if found.offloaded and machine.has_own_memory:
        kept = [
            on_host(how, shape, mesh.size) if i in found.offloaded else how
            for i, (how, shape) in enumerate(zip(kept, shapes, strict=True))
        ]
    for leaves in alike:
        how = next((kept[i] for i in leaves if kept[i]), None)
        for i in leaves:
            kept[i] = how
    return TracedStep(closed, tree, step.checked, infer, groups, found, tuple(kept), tuple(sources), may_take)


def jaxpr_of(
    step: Callable[..., Any], signature: Signature, avals: Sequence[Any], mesh: Mesh, check_finite: bool
) -> StepJaxpr:
    """Trace a step."""
    trees: list[tuple[Any, tuple[str, ...]]] = []

    def flat(*args: Any) -> list[Any]:
        with stepping(found := finite.Findings(mesh)):
            result = modules.run(step, args, signature.keywords)
            if check_finite:
                found.look_at(result, "result")
        constant = NUMBERS if signature.numbers else ()
        leaves, whole = jax.tree.flatten(result)
        marked = [x if is_array(x) and not isinstance(x, constant) else Static(x) for x in leaves]
        outs = [x for x in marked if not isinstance(x, Static)]
        trees.append((with_constants(whole, marked), tuple(found.names)))
        return [*outs, jnp.stack(found.counts, 1)] if found.names else outs

    with contextlib.suppress(AttributeError, TypeError):  # errors of JAX then name the step and its arguments
        functools.update_wrapper(flat, step, updated=())
    try:
        closed, axis, divided = trace(flat, _arguments(signature, avals))
    except Exception as error:
        error.add_note(f"in the step {name_of(step)!r}, decorated with jaxdist.data_parallel")
        if "mesh context" in str(error) or "context mesh" in str(error):
            error.add_note("a step is traced without the mesh of jax.set_mesh: leave out reshard and out_sharding=")
        raise
    if mesh.size > 1 and get_context().is_root:
        counts = {mesh.size, len(mesh.local_devices), len({d.process_index for d in mesh.devices.flat})} - {1}
        for line, count in {line: count for count, line in divided if count in counts}.items():
            say_once(
                f"step {name_of(step)!r} divides a sum over the axis {axis!r} by {count:g} at "
                f"{line}. The axis has size one inside a step: lax.psum(x, {axis!r}) is x, of the whole batch, and x "
                f"over the number of devices 1/{mesh.size} of it. Write lax.pmean(x, {axis!r}), or divide by "
                f"lax.axis_size({axis!r})"
            )
    return StepJaxpr(closed, *trees[-1])


@dataclass(frozen=True)
class _Argument:
    """The types of an argument's leaves, of which JAX makes the argument: as under `jax.jit` out of tracers alone."""

    tree: Any
    types: Sequence[Any]
    paths: tuple[str, ...]  # in the argument, for JAX's messages


jax.tree_util.register_pytree_with_keys(
    _Argument,
    lambda argument: (tuple(zip(argument.paths, argument.types, strict=True)), (argument.tree, argument.paths)),
    lambda about, tracers: unflattener(about[0])(tuple(tracers)),
)


def _arguments(signature: Signature, types: Sequence[Any]) -> list[_Argument]:
    names = signature.names
    return [
        _Argument(tree, [types[i] for i in at], tuple(names[i].removeprefix(parameter) for i in at))
        for tree, at, parameter in signature.arguments
    ]


@functools.cache
def say_once(text: str) -> None:
    """Warn, if it was not said before."""
    _log.warning("%s", text)


def is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether JAX is tracing a call: under `jax.grad`, `jax.eval_shape`, or inside a step."""
    return inside_step() or (
        not trace_state_clean() and any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
    )


# --- the dimension of each leaf of the state that the model axis cuts


def _cut_by_model(
    layouts: Layouts | None,
    signature: Signature,
    avals: Sequence[Any],
    mesh: Mesh,
    infer: Infer,
    closed: ClosedJaxpr,
    sources: Sequence[int | None],
    given: Mapping[int, int],
) -> list[Layout]:
    """Return the layout of each argument of a step along the model axis."""
    parts = mesh.shape.get(MODEL, 1)
    if parts == 1:
        dims = {}
    elif layouts is None:
        infer = infer.over(passes(mesh), 0)
        block = infer.block(closed)
        block.outermost = True
        dims = search(infer, block, signature.state, sources, signature.names, mesh.size // parts, given)
    else:
        dims = _named(layouts, signature, avals, parts)

    cuts = {i: Cut(MODEL, parts, dim, -avals[i].shape[dim] % parts) for i, dim in dims.items()}
    return [layout(cuts[i]) if i in cuts else layout() for i in range(len(avals))]


def _named(layouts: Layouts, signature: Signature, avals: Sequence[Any], parts: int) -> dict[int, int]:
    """The arguments that the user's expressions name, and the dimension."""
    found, used, lacking = dict[int, int](), set[str](), dict[str, str]()
    for i in signature.state:
        name, shape = signature.names[i], avals[i].shape
        for expression, dim in layouts.items():
            if not re.search(expression, name):
                continue
            if dim is not None and shape and not -len(shape) <= dim < len(shape):
                lacking.setdefault(expression, f"leaf {name} has shape {shape}, and no dimension {dim}")
                break  # an optimizer's statistics of a parameter may have fewer dimensions
            used.add(expression)
            if dim is not None and shape and not jnp.issubdtype(avals[i].dtype, jax.dtypes.extended):
                found[i] = dim % len(shape)
            break
    if none := [expression for expression in lacking if expression not in used]:
        raise ValueError(
            f"layouts={{{none[0]!r}: {layouts[none[0]]}}}: {lacking[none[0]]} for the {parts} devices of the axis "
            f"{MODEL!r} to cut"
        )
    if unused := [expression for expression in layouts if expression not in used]:
        names = ", ".join(signature.names[i] for i in signature.state[:8])
        raise ValueError(f"layouts: {unused[0]!r} is found in no leaf of the state; its leaves are {names}")
    return found
