"""Rules for branches, checkpoints, callbacks, and the user's own code for each device."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, primitives

from jaxdist import compat
from jaxdist.ir.fingerprint import moves
from jaxdist.ir.interpreter import CHECKPOINT, CONTROL_FLOW, INLINED, Interpreter, axes_of, bodies, groups_of, walk
from jaxdist.ir.wire import kind_of, runs, whole_bytes
from jaxdist.mesh import AXIS, GROUP, Axis
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, MeshAxis, Propagation, Sends, Strategy, nbytes, sliced
from jaxdist.placements.model.values import REPLICATED, Partial, Placement, Replicated, Split, form, is_narrow
from jaxdist.placements.rules.context import RuleContext, inside, refuse, resolved, special, throughout
from jaxdist.placements.rules.loops import bound, join
from jaxdist.placements.rules.summands import is_zero


@special("cond")
def _cond(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    in_placements, out_placements, placed = _branches(ctx, node, ins[1:])
    return Strategy([REPLICATED, *map(form, in_placements)], out_placements, bound(placed), bodies=placed)


@special(CHECKPOINT)
def _checkpoint(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    in_placements, out_placements, placed = _branches(ctx, node, ins)

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        closed = device.body(placed[0])
        jaxpr = compat.with_constants_as_inputs(closed.jaxpr)
        return device.bind(node, [*closed.consts, *args], {**node.eqn.params, "jaxpr": jaxpr})

    return Strategy([form(p) for p in in_placements], out_placements, run, bodies=placed)


def _branches(
    ctx: RuleContext, node: Node, ins: Sequence[Placement]
) -> tuple[Sequence[Placement], list[Placement], Sequence[Propagation]]:
    """Return the placements of inputs, the shared placements of outputs, and the branches."""
    infer, may_stay_partial = ctx.infer, ctx.added_up(node)
    in_placements: Sequence[Placement] = [p if isinstance(p, Partial) else throughout(p) for p in ins]
    blocks = [infer.block(body.closed, node.backward) for body in bodies(node.eqn)]

    def place(in_placements: Sequence[Placement], wants: Any = None) -> list[Propagation]:
        return [infer.place(block, in_placements, wants, may_stay_partial) for block in blocks]

    placed: Sequence[Propagation] = place(in_placements)
    summed = {i for body in placed for i in body.reduced_inputs}
    if summed:  # a summand that one branch adds up, though others may not need to
        in_placements = [REPLICATED if i in summed else p for i, p in enumerate(in_placements)]
        placed = place(in_placements)
    in_placements, placed = sliced(in_placements, placed, place)
    out_placements: list[Placement] = []
    for outs in zip(*([body.returned(k) for k in range(len(body.out_placements))] for body in placed), strict=True):
        joined, *others = [resolved(p) for p in outs if not is_zero(p)] or [REPLICATED]
        for p in others:
            joined = join(joined, p)
        joined = inside(joined) if not isinstance(joined, Partial) else joined
        out_placements.append(Replicated() if isinstance(joined, Replicated) else joined)
    return in_placements, out_placements, place(in_placements, [form(p) for p in out_placements])


# --- code of the user's own for each device


@special("shard_map")
def _shard_map(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Apply the user's specs; the body is already the program of one device."""
    params, mesh = node.eqn.params, node.eqn.params["mesh"]
    sizes = {axis.name: axis.size for axis in ctx.infer.axis.mesh}
    groups = sizes.pop(GROUP, 1)
    sizes |= {AXIS: groups * sizes[AXIS]} if AXIS in sizes else {}
    if {name: size for name, size in mesh.shape.items() if size > 1} != {k: n for k, n in sizes.items() if n > 1}:
        raise refuse(node, f"its mesh is {dict(mesh.shape)}, and the step runs on {sizes}")
    if not sizes.keys() <= (named := params["newly_manual_axes"]):
        raise refuse(node, f"it names the axes {sorted(named)} of its mesh alone, of {list(sizes)}")

    def names(spec: Any) -> Cuts:
        axes_by_dim = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in spec]
        both = (GROUP, AXIS) if groups > 1 else (AXIS,)
        return tuple(
            tuple(name for axis in axes for name in (both if axis == AXIS else (axis,))) for axes in axes_by_dim
        )

    in_forms, out_placements = (tuple(map(names, params[name])) for name in ("in_specs", "out_specs"))
    return _own_code(ctx, node, compat.closed(params["jaxpr"]), in_forms, out_placements)


@special("jaxdist_own_code")
def _placed_own_code(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    params = node.eqn.params
    return _own_code(ctx, node, params["body"], params["ins"], params["outs"])


Cuts = tuple[tuple[str, ...], ...]  # the axes that cut each leading dimension of a value; the largest slices come first

# The program of one device, ``body``, in a program for several. ``ins`` and ``outs``: the `Cuts` of each operand and
# result; ``axes``: those over which the program is not placed yet.
own_code_p = Primitive("jaxdist_own_code")
own_code_p.multiple_results = True
own_code_p.def_abstract_eval(
    lambda *_, body, ins, outs, axes: [
        a.update(shape=_whole(a.shape, cuts, axes), weak_type=False)
        for a, cuts in zip(body.out_avals, outs, strict=True)
    ]
)


def _whole(shape: Sequence[int], cuts: Cuts, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the shape of the whole value, given the shape of a slice."""
    sizes = {axis.name: axis.size for axis in axes}
    by_dim = (*cuts, *((),) * (len(shape) - len(cuts)))
    return tuple(n * math.prod(sizes.get(name, 1) for name in names) for n, names in zip(shape, by_dim, strict=True))


def _own_code(ctx: RuleContext, node: Node, body: ClosedJaxpr, ins: Sequence[Cuts], outs: Sequence[Cuts]) -> Strategy:
    """Run the user's code per device; at the last axis of the mesh the body is inlined."""
    placed, mesh = ctx.infer.axis, ctx.infer.axis.mesh
    inner_axes = mesh[len(ctx.infer.axis.placed) :]

    def placement(i: int, cuts: Cuts) -> Placement:
        for d, names in enumerate(cuts):
            if placed.name in names:
                outer = math.prod(axis.size for axis in inner_axes if axis.name in names[: names.index(placed.name)])
                size = ctx.block.avals[i].shape[d] // outer
                return Split(d, size, size // placed.size, outer)
        return REPLICATED

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        if not inner_axes:
            return _Untyped([axis.name for axis in mesh]).run(body, *args)
        return own_code_p.bind(*args, body=body, ins=tuple(ins), outs=tuple(outs), axes=inner_axes)

    in_forms, out_placements = (
        [placement(i, cuts) for i, cuts in zip(values, of, strict=True)]
        for values, of in ((node.ins, ins), (node.outs, outs))
    )
    return Strategy(list(map(form, in_forms)), out_placements, run, sends=[*_sent_by(body, placed, mesh)])


def _sent_by(body: ClosedJaxpr, placed: MeshAxis, mesh: Sequence[Axis]) -> Iterator[Sends]:
    """Yield what the user's code sends; a message over several axes belongs to the outermost of them."""
    sizes = {axis.name: axis.size for axis in mesh}
    for eqn, within in walk(body):
        if not moves(eqn):
            continue
        names = {
            name for axis in axes_of(eqn) for name in ((GROUP, AXIS) if axis == AXIS else (axis,)) if name in sizes
        }
        if next((name for name in sizes if name in names), None) == placed.name:
            groups, kind = groups_of(eqn), kind_of(eqn)
            devices = max(map(len, groups)) if groups else math.prod(sizes[name] for name in names)
            for size in whole_bytes(eqn, kind, devices):
                yield Sends(kind, size, runs(within))


_TYPED = {*INLINED, *CONTROL_FLOW}  # primitives whose bodies are typed; a kernel's body is not


class _Untyped(Interpreter):
    """Evaluate the body of a typed ``shard_map`` in an untyped one."""

    worth_a_call = math.inf  # it would keep types

    def __init__(self, axes: Sequence[str]) -> None:
        self.data = tuple(name for name in axes if name in (GROUP, AXIS))
        super().__init__(
            {
                compat.pvary_p: lambda _, eqn, x: x,
                compat.psum_invariant_p: lambda _, eqn, x: lax.psum(x, eqn.params["axes"]),
                compat.all_gather_invariant_p: lambda _, eqn, x: lax.all_gather(
                    x, eqn.params["axis_name"], axis=eqn.params["all_gather_dimension"], tiled=eqn.params["tiled"]
                ),
            }
        )
        for name in ("reshape_p", "broadcast_in_dim_p", "reduce_sum_p", "iota_p", "dot_general_p"):
            self.rules[getattr(primitives, name)] = _without_sharding

    def eval_eqn(self, eqn: Any, *args: Any) -> Sequence[Any]:
        if len(self.data) > 1:  # types of literals also name the one-axis mesh
            args = tuple(x if isinstance(x, jax.Array) else _literal(x) for x in args)
        if len(self.data) > 1 and AXIS in axes_of(eqn):
            if eqn.primitive is primitives.axis_index_p:
                return [lax.axis_index(self.data)]
            (name,) = (name for name in ("axes", "axis_name") if name in eqn.params)
            axes = tuple(one for axis in axes_of(eqn) for one in (self.data if axis == AXIS else (axis,)))
            eqn = eqn.replace(params={**eqn.params, name: axes})
            if eqn.primitive not in self.rules:
                return compat.bind(eqn, eqn.params, args)
        return super().eval_eqn(eqn, *args)

    def touches(self, eqn: Any) -> bool:
        return eqn.primitive.name in _TYPED or (len(self.data) > 1 and AXIS in axes_of(eqn))

    def rewrite(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
        return jax.make_jaxpr(functools.partial(self.run, closed))(*types)


def _literal(x: Any) -> Any:
    return compat.with_weak_type(jnp.asarray(np.asarray(x)), jax.typeof(x).weak_type)


def _without_sharding(_: Interpreter, eqn: Any, *args: Any) -> Any:
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}
    return compat.bind(eqn, params, args)[0]


# --- effects


@special("debug_callback", "debug_print")
def _debug(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Run a debug callback once, on the root, with whole values."""
    if any("Ordered" in type(effect).__name__ for effect in node.eqn.effects):
        raise refuse(node, "ordered=True is not possible on several devices: JAX orders effects on one device only")
    _check_types(ctx, node)

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        lax.cond(device.index == 0, lambda xs: [device.bind(node, xs), ()][1], lambda xs: (), tuple(args))
        return []

    return Strategy([REPLICATED] * len(ins), [], run, why=f"{node.name} shows whole values")


@special("pure_callback", "io_callback")
def _callback(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Run a callback on the root and send its results to all."""
    outs = [ctx.block.avals[o] for o in node.outs]
    _check_types(ctx, node)

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        def call(xs: Any) -> tuple[Any, ...]:
            return tuple(device.bind(node, xs))

        nothing = lambda xs: tuple(jnp.zeros(a.shape, a.dtype) for a in outs)
        results = lax.cond(device.index == 0, call, nothing, tuple(args))
        return [device.from_root(x) for x in results]

    why = "a callback runs on the root"
    return Strategy([REPLICATED] * len(ins), [REPLICATED] * len(outs), run, sends=_sent_from_root(outs), why=why)


def _sent_from_root(avals: Sequence[Any]) -> list[Sends]:
    """Return what `Emitter.from_root` sends: a sum of one device's bits and zeros."""
    return [Sends("all-reduce", nbytes(aval)) for aval in avals if aval.size]


def _check_types(ctx: RuleContext, node: Node) -> None:
    # JAX unpacks what takes less than a byte on threads that wait for the other devices.
    for i in (*node.ins, *node.outs):
        if is_narrow(dtype := ctx.block.avals[i].dtype):
            raise refuse(node, f"on several devices a callback can't take or return {dtype}: convert it to int8")


@special("rng_uniform")
def _rng_uniform(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Let the root draw; otherwise each device would draw different numbers."""
    run = lambda device, node, xs: [device.from_root(x) for x in device.bind(node, xs)]
    sends = _sent_from_root([ctx.block.avals[o] for o in node.outs])
    return Strategy([REPLICATED] * len(ins), [REPLICATED] * len(node.outs), run, sends=sends)
