"""Compare a step with its program of several devices, at random points of a finite field, to the last digit."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as S

from jaxdist.communicators import lowering
from jaxdist.compilation.placed import PlacedStep
from jaxdist.ir.interpreter import equations
from jaxdist.mesh import passes
from jaxdist.placements.emit.emitter import Emitter, local_types
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.layouts import Layout, layout_of, sharding
from jaxdist.placements.model.layouts import layout as layout_on_mesh
from jaxdist.placements.model.strategy import Propagation, in_short
from jaxdist.placements.model.values import REPLICATED, Partial, Placement, Split
from jaxdist.placements.search.owners.assignment import Owned
from jaxdist.proof import field, rules  # noqa: F401  (they enter their tables)
from jaxdist.proof.evaluate import Evaluator, UncheckedError, in_field, is_complex, is_float

Value = Any  # an array, or a `Pair`


class Point(NamedTuple):
    """A point at which programs are evaluated."""

    order: np.ndarray  # of numbers, see `field.drawn_order`
    xs: Sequence[Value]  # the arguments


@dataclass(frozen=True)
class Verified:
    """The result of `jaxdist.verify`; true if the program is the step, and prints as text."""

    equal: bool | None  # None: not compared, for the reason in `unchecked`
    operations: int  # of the step that were compared
    points: int  # at which
    results: tuple[str, ...] = ()  # those that differ
    operation: str = ""  # the first one whose results on the devices are not slices or summands of the step's, if found
    line: str = ""  # of the user, where it stands
    placement: str = ""  # how each device should hold its result
    unchecked: str = ""  # an operation that is not evaluated in the field, and its line

    @property
    def chance(self) -> float:
        """The chance that a difference went unnoticed, for results of a degree of at most the number of operations."""
        return (max(self.operations, 1) / field.P) ** self.points

    def __bool__(self) -> bool:
        return bool(self.equal)

    def __str__(self) -> str:
        if self.equal is None:
            return f"not verified: {self.unchecked} has no exact counterpart"
        if self.equal:
            chance = f"a miss has a chance of {self.chance:.0e}"
            return f"equal: {self.operations} operations at {self.points} random points; {chance}"
        differ = f"{', '.join(self.results)} of the program {'is' if len(self.results) == 1 else 'are'} not the step's"
        if not self.operation:
            return differ
        place = f"{self.operation} at {self.line or 'an unknown line'}"
        return f"{differ}, from {place} on: a device should hold its result {self.placement}"


def verified(
    placed: PlacedStep, whole: Sequence[Any], count: int, strict: bool, on_all: Callable[[list[int]], list[int]]
) -> Verified:
    """Compare a step with its program. Every rank calls it.

    Args:
      placed: the step, and its program.
      whole: the leaves of the arguments that are not floats.
      count: the number of points.
      strict: see `Evaluator`.
      on_all: returns the results that differ on any rank, given those that differ on this one.
    """
    if strict and placed.compress:
        raise ValueError("strict=True with compress=: gradients are rounded, as it says, before they are added up")
    comparison = Comparison(placed, strict)

    def difference(point: Point) -> Verified | None:
        differing = on_all(comparison.differing(point))
        return first_difference(comparison, point, [_name(placed, k) for k in differing]) if differing else None

    return _at_points(placed.step.jaxpr, placed.avals, whole, count, difference)


def _at_points(
    step: ClosedJaxpr,
    avals: Sequence[Any],
    whole: Sequence[Any],
    count: int,
    difference: Callable[[Point], Verified | None],
) -> Verified:
    """Return the first difference at some random points, or that there is none."""
    try:
        for point in points(avals, whole, count):
            if (differ := difference(point)) is not None:
                return differ
    except UncheckedError as problem:  # of the program, and so on every rank
        return Verified(None, 0, 0, unchecked=str(problem))
    return Verified(True, _count(step), count)


def points(avals: Sequence[Any], whole: Sequence[Any], count: int) -> Iterator[Point]:
    """Yield random arguments of these types; `whole` has those that are not floats, which stay unchanged."""
    for seed in range(count):
        # Of two points in a row the second has the reverse order: a constant is above zero at one of them.
        order = field.drawn_order(np.random.default_rng(seed // 2), reverse=seed % 2 == 1)
        rng = np.random.default_rng([seed, 1])
        drawn = lambda aval, rng=rng: field.drawn(rng, aval.shape, is_complex(aval))
        xs = [drawn(aval) if is_float(aval) else x for aval, x in zip(avals, whole, strict=True)]
        yield Point(order, xs)


def compared(f: Callable[..., Any], g: Callable[..., Any], args: Sequence[Any], count: int, strict: bool) -> Verified:
    """Compare a function that XLA divides, if its arguments are sharded, with a different one on one device."""
    leaves = jax.tree.leaves(args)
    traced = [jax.make_jaxpr(function, return_shape=True)(*args) for function in (g, f)]
    programs, shapes = zip(*traced, strict=True)
    types = [(jax.tree.structure(x), [(y.shape, y.dtype) for y in jax.tree.leaves(x)]) for x in shapes]
    if types[0] != types[1]:  # a weak type is no other value
        raise ValueError(f"the functions return different types: {shapes[1]} and {shapes[0]}")
    names = [f"result{jax.tree_util.keystr(k)}" for k, _ in jax.tree_util.tree_leaves_with_path(shapes[0])]
    runs = [
        jax.jit(lambda order, xs, closed=closed, divides=divides: Evaluator(strict, divides, order).run(closed, xs))
        for closed, divides in zip(programs, (False, True), strict=True)
    ]
    avals = [v.aval for v in programs[0].jaxpr.invars]
    exact = lambda aval, x: x if _is_key(x) else np.asarray(x).astype(aval.dtype)
    whole = [None if is_float(aval) else exact(aval, x) for aval, x in zip(avals, leaves, strict=True)]

    def difference(point: Point) -> Verified | None:
        placed = [_put(drawn, x) for drawn, x in zip(point.xs, leaves, strict=True)]
        with jax.enable_x64(True):
            pairs = zip(names, runs[0](*point), runs[1](point.order, placed), strict=True)
        differing = tuple(name for name, wanted, got in pairs if not _is_whole(wanted, got))
        return Verified(False, _count(programs[0]), 1, differing) if differing else None

    return _at_points(programs[0], avals, whole, count, difference)


def _count(closed: ClosedJaxpr) -> int:
    return sum(1 for _ in equations(closed.jaxpr))


def _put(x: Value, like: Any) -> Value:
    """Return a value in the shards of an array."""
    return jax.tree.map(lambda part: jax.device_put(part, like.sharding), x) if isinstance(like, jax.Array) else x


def _name(placed: PlacedStep, k: int) -> str:
    tree = placed.step.tree
    names = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return f"result{jax.tree_util.keystr(names[k][0])}" if k < len(names) else "the counts of check_finite"


class Comparison:
    """A step and its program, each compiled once in the field."""

    def __init__(self, placed: PlacedStep, strict: bool):
        self.placed, self.strict, self.mesh = placed, strict, placed.run_mesh
        self._step = jax.jit(lambda order, xs: Evaluator(strict, order=order).run(placed.step.jaxpr, xs))
        self._program = placed.emitted.program
        self._parts = jax.jit(self._run)

    def differing(self, point: Point) -> list[int]:
        """Return the results, by number, whose parts on this process's devices differ from the step's."""
        layouts = zip(self.placed.layouts, point.xs, strict=True)
        with jax.enable_x64(True):
            wanted = self._step(*point)
            got = self._parts(point.order, [self._placed(layout, x) for layout, x in layouts])
        return [k for k, (x, y) in enumerate(zip(wanted, got, strict=True)) if not self._is_part(k, x, y)]

    def _run(self, order: Any, xs: Sequence[Value]) -> Sequence[Value]:
        """Return the results of the program of each device."""
        if self.placed.mesh.size == 1:
            return Evaluator(self.strict, order=order).run(self._program, xs)
        in_specs, out_specs = self.placed.specs()
        return self.on_devices(lambda e, xs: e.run(self._program, xs), in_specs, out_specs)(order, xs)

    @functools.cached_property
    def recorded(self) -> "list[tuple[_Recorder, Callable[..., Any]]]":
        """For each axis, what devices hold of each value, and a function that says whether that is the step's."""
        return [self._recorded(propagation, k) for k, propagation in enumerate(self.placed.emitted.propagations)]

    def _recorded(self, propagation: Propagation, k: int) -> "tuple[_Recorder, Callable[..., Any]]":
        recorder = _Recorder(propagation, marks=True)
        program, avals = recorder.program(local_types(propagation)), propagation.block.avals

        def local(e: Evaluator, xs: Sequence[Value]) -> list[Any]:
            for before in self.placed.emitted.propagations[:k]:
                xs = [_cut(x, f, before) for x, f in zip(xs, before.in_forms, strict=True)]
            env = _evaluated(e, propagation, xs)
            parts = [_cut(x, f, propagation) for x, f in zip(xs, propagation.in_forms, strict=True)]
            pairs = zip(recorder.held, e.run(program, parts), strict=True)
            same = [_is_held(in_field(env[i]), f, x, propagation, avals[i]) for (i, f), x in pairs]
            axes = tuple(axis.name for axis in passes(self.mesh))
            return [lax.pmin(jnp.stack(same).astype(np.int32), axes)]

        return recorder, jax.jit(self.on_devices(local, S(), S()))

    def on_devices(
        self, f: Callable[[Evaluator, Sequence[Value]], Sequence[Value]], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Run a function on each device of the mesh; its collectives go over the step's communicator."""

        def local(order: Any, xs: Sequence[Value]) -> Sequence[Value]:
            evaluated = lambda order, xs: f(Evaluator(self.strict, order=order), xs)
            made, results = jax.make_jaxpr(evaluated, return_shape=True)(order, xs)
            outs = lowering(self.placed.communicator, self.mesh).run(made, *jax.tree.leaves((order, xs)))
            return jax.tree.unflatten(jax.tree.structure(results), outs)

        specs = {"in_specs": (S(), in_specs), "out_specs": out_specs}
        return jax.shard_map(local, mesh=self.mesh, check_vma=False, **specs)

    def _placed(self, layout: Layout | None, x: Value) -> Value:
        """Put an argument on the mesh, with padding as it may be there."""
        layout = layout_on_mesh(*layout.cuts) if layout else None  # not in the host's memory

        def placed(x: Any) -> jax.Array:
            x = np.asarray(x)
            x = layout.padded(x, "edge" if x.size else "constant") if layout else x
            return jax.make_array_from_callback(x.shape, sharding(self.placed.mesh, layout), lambda index: x[index])

        if _is_key(x):
            return jax.random.wrap_key_data(placed(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jax.tree.map(placed, x)

    def _is_part(self, k: int, wanted: Value, got: Value) -> bool:
        placed, layout = self.placed, self.placed.result_layouts[k]
        if layout is None and placed.emitted.propagations:
            layout = layout_of(placed.emitted.propagations[-1].out_forms[k], passes(self.mesh)[-1])
        return _is_whole(wanted, got, layout)


def _is_whole(wanted: Value, got: Value, layout: Layout | None = None) -> bool:
    """Check the parts of a result that are on this process's devices."""
    if _is_key(wanted):
        wanted, got = map(jax.random.key_data, (wanted, got))
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)
    return all(_are_equal(np.asarray(x), y, layout) for x, y in pairs)


def _are_equal(wanted: np.ndarray, got: jax.Array, layout: Layout | None) -> bool:
    real = np.ones(wanted.shape, bool)
    if layout is not None and not layout.is_plain:
        wanted, real = layout.padded(wanted), layout.padded(real)
    return wanted.shape == got.shape and all(
        np.array_equal(np.asarray(shard.data)[here := real[shard.index]], wanted[shard.index][here])
        for shard in got.addressable_shards
    )


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# --- where it begins


class _Recorder(Emitter):
    """Returns all that a device holds of each value in the place of a program's results."""

    def run(self, xs: Sequence[Any]) -> list[Any]:
        super().run(xs)
        held = [(i, f, x) for node in self.block.nodes for i in node.outs for f, x in self._forms[i].items()]
        held += [(i, REPLICATED, x) for (i, _), x in self._fetched.items() if i in self.block.makers]
        self.held = [(i, f) for i, f, _ in held]
        return [x for *_, x in held]


def first_difference(comparison: Comparison, point: Point, results: Sequence[str]) -> Verified:
    """Follow the step through the axes of its mesh to the first operation whose parts differ from the step's."""
    differ = Verified(False, _count(comparison.placed.step.jaxpr), 1, tuple(results))
    for recorder, are_held in comparison.recorded:
        with jax.enable_x64(True):
            same = np.asarray(are_held(*point)[0])
        if not same.all():
            i, _ = recorder.held[int(np.argmin(same))]
            node = next(node for node in _operations(recorder.block) if i in node.outs)
            placement = in_short(recorder.placed.placements[i])
            return replace(differ, operation=node.label, line=node.line, placement=placement)
    return differ


def _evaluated(evaluator: Evaluator, propagation: Propagation, xs: Sequence[Value]) -> dict[int, Value]:
    """Return the values of a block, by number, before it is divided over the next axis."""
    block = propagation.block
    env = {i: evaluator.constant(value) for i, value in block.constants.items()}
    env.update(zip(block.inputs, xs, strict=True))
    for node in _operations(block):
        env.update(zip(node.outs, evaluator.equation(node.eqn, [env[i] for i in node.ins]), strict=True))
    return env


def _operations(block: Block) -> Iterator[Node]:
    """Yield the operations of a block, and in the place of one that stands for owners' work, that work."""
    for node in block.nodes:
        if isinstance(node, Owned):
            yield from (part for work in node.works for part in work.component.nodes)
        else:
            yield node


def _cut(x: Value, f: Placement, propagation: Propagation) -> Value:
    """Return this device's slice of a value, with copies of the last entry of each block for padding.

    `Emitter.cut` is not called: it is one of the things that are checked.
    """
    if not isinstance(f, Split):
        return x
    rows = np.arange(f.rows)
    place = lax.axis_index(propagation.axis.name) * f.chunk + rows % f.chunk
    index = jnp.minimum(place, f.size - 1) + rows // f.chunk * f.size
    return jax.tree.map(lambda x: jnp.take(x, index, axis=f.dim), x)


def _is_held(whole: Value, f: Placement, held: Value, propagation: Propagation, aval: Any) -> Any:
    """Check whether what devices hold in a form is a value."""
    if _is_key(whole):
        whole, held = map(jax.random.key_data, (whole, held))
    if isinstance(f, Partial):
        axes = (propagation.axis.name, *f.unreduced_axes)
        total = (
            (lambda x: field.fold(lax.psum(field.wide(x), axes))) if is_float(aval) else (lambda x: lax.psum(x, axes))
        )
        held = jax.tree.map(total, held)
    real: Any = True
    if isinstance(f, Split):
        whole, n = _cut(whole, f, propagation), propagation.axis.size
        place = lax.axis_index(propagation.axis.name) * f.chunk + np.arange(f.rows) % f.chunk
        if f.is_padded(n):
            leaf = jax.tree.leaves(whole)[0]
            real = (place < f.size).reshape([-1 if d == f.dim else 1 for d in range(leaf.ndim)])
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(held), strict=True)
    return jnp.stack([jnp.all((x == y) | ~jnp.asarray(real)) for x, y in pairs]).all()
