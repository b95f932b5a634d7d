"""Rules for the user's own code for each device: `jaxdist.per_device`, ``shard_map``."""

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
from jaxdist.ir.interpreter import CONTROL_FLOW, INLINED, Interpreter, axes_of, groups_of, walk
from jaxdist.ir.wire import kind_of, runs, whole_bytes
from jaxdist.mesh import AXIS, GROUP, Axis, axes_by_dim
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, MeshAxis, Sends, Strategy
from jaxdist.placements.model.values import REPLICATED, Placement, Split, form
from jaxdist.placements.rules.context import RuleContext, refuse, special


@special("shard_map")
def _shard_map(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Apply the user's specs; the body is already the program of one device."""
    params, mesh = node.eqn.params, node.eqn.params["mesh"]
    sizes = {axis.name: axis.size for axis in ctx.infer.axis.mesh}
    groups = sizes.pop(GROUP, 1)
    sizes |= {AXIS: groups * sizes[AXIS]} if AXIS in sizes else {}
    if {name: size for name, size in mesh.shape.items() if size > 1} != {k: n for k, n in sizes.items() if n > 1}:
        raise refuse(node, f"its mesh is {dict(mesh.shape)}, and the step runs on {sizes}")

    def names(spec: Any) -> Cuts:
        both = (GROUP, AXIS) if groups > 1 else (AXIS,)
        return tuple(
            tuple(name for axis in axes for name in (both if axis == AXIS else (axis,))) for axes in axes_by_dim(spec)
        )

    ins_cuts, outs_cuts = (tuple(map(names, params[name])) for name in ("in_specs", "out_specs"))
    return _own_code(ctx, node, compat.closed(params["jaxpr"]), ins_cuts, outs_cuts)


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
                # 16 rows by ``P(('data', 'model'))`` over data 2 x model 4: in each of the 2 blocks of 8 that the data
                # axis cuts later, the model axis, which is placed first, cuts slices of 2.
                outer = math.prod(axis.size for axis in inner_axes if axis.name in names[: names.index(placed.name)])
                size = ctx.block.avals[i].shape[d] // outer
                return Split(d, size, size // placed.size, outer)
        return REPLICATED

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        if not inner_axes:
            return _Untyped([axis.name for axis in mesh]).run(body, *args)
        return own_code_p.bind(*args, body=body, ins=tuple(ins), outs=tuple(outs), axes=inner_axes)

    in_placements, out_placements = (
        [placement(i, cuts) for i, cuts in zip(values, of, strict=True)]
        for values, of in ((node.ins, ins), (node.outs, outs))
    )
    return Strategy(list(map(form, in_placements)), out_placements, run, sends=[*sent_by(body, placed, mesh)])


def sent_by(body: ClosedJaxpr, placed: MeshAxis, mesh: Sequence[Axis]) -> Iterator[Sends]:
    """Yield the messages of the user's code; one over several axes belongs to the outermost of them."""
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
                primitives.sharding_constraint_p: lambda _, eqn, x: x,  # over an axis that the user's code leaves whole
                compat.psum_invariant_p: lambda _, eqn, x: lax.psum(x, eqn.params["axes"]),
                compat.all_gather_invariant_p: lambda _, eqn, x: lax.all_gather(
                    x, eqn.params["axis_name"], axis=eqn.params["all_gather_dimension"], tiled=eqn.params["tiled"]
                ),
            }
        )
        for name in ("reshape_p", "broadcast_in_dim_p", "reduce_sum_p", "iota_p", "dot_general_p"):
            self.rules[getattr(primitives, name)] = _without_sharding

    def eval_eqn(self, eqn: Any, *args: Any) -> Sequence[Any]:
        args = tuple(x if isinstance(x, jax.Array) else _literal(x) for x in args)  # typed, too
        if len(self.data) > 1 and AXIS in axes_of(eqn):
            # ``zero(within=)`` makes two axes of the data axis, and the user's code knows only the one.
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
