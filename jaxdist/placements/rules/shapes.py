"""Rules beyond factors: reshapes, broadcasts, iota, pieces of a batch, random bits."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist import compat
from jaxdist.ir.primitives import constraint_p, count_p, counts
from jaxdist.mesh import MODEL, axes_by_dim
from jaxdist.placements.model import values
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, Run, Sends, Strategy, nbytes
from jaxdist.placements.model.values import REPLICATED, Deferred, Form, Placement, Replicated, Split, form, reshaped
from jaxdist.placements.rules.context import RuleContext, alternative, special
from jaxdist.placements.rules.run import make_in_form, make_whole


@special("reshape")
def _reshape(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    p = ins[0]
    if len(ins) > 1 or node.eqn.params["dimensions"] is not None:
        return None
    old, new = ctx.block.shapes(node.ins)[0], ctx.block.shapes(node.outs)[0]
    if isinstance(p, Deferred):
        return Strategy([None], [Deferred(p.const)], make=_make_reshaped)
    if not isinstance(p, Split):
        return None
    result = reshaped(p, old, new)
    if result is None:
        return None
    run = lambda device, node, xs: [lax.reshape(xs[0], result.shape(new))]
    return Strategy([form(p)], [result.alone()], run)


def _make_reshaped(device: DeviceContext, node: Node, target: Form) -> jax.Array:
    (i,), (o,) = node.ins, node.outs
    old, new = device.block.avals[i].shape, device.block.avals[o].shape
    if not isinstance(target, Split):
        return lax.reshape(device.take(i, REPLICATED), new)
    if (operand := reshaped(target, new, old)) is None:
        return device.cut(device.take(o, REPLICATED), target)
    return lax.reshape(device.take(i, form(operand)), target.shape(new))


@special("broadcast_in_dim")
def _broadcast(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Keep the slices of a value that is repeated; gather a stored one before, unless a model axis cuts it."""
    p, described = ins[0], ctx.block.factors(node)
    old, new = ctx.block.shapes(node.ins)[0], ctx.block.shapes(node.outs)[0]
    if described is None or not new:
        return None
    follows = isinstance(p, Split) and described.operands[0][p.dim] is not None
    # Over a model axis, values that it meets are cut the same way: the rows' statistics of flash attention, by head.
    stays = ctx.infer.axis.name == MODEL or math.prod(old) == math.prod(new)
    if follows and (stays or not p.of_state):  # type: ignore[union-attr]
        return ctx.by_factors(node, ins, described)
    if isinstance(p, (Replicated, Deferred)):
        return Strategy([None], [Deferred(p.const)], make=make_in_form)
    # Sent before it is repeated, which makes it larger.
    return Strategy([REPLICATED], [Deferred()], make=make_in_form)


@special("iota")
def _iota(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    return None if ins else Strategy([], [Deferred()], make=_make_iota)


def _make_iota(device: DeviceContext, node: Node, target: Form) -> jax.Array:
    if not isinstance(target, Split):
        return device.bind(node, [])[0]
    params, aval = node.eqn.params, device.block.avals[node.outs[0]]
    shape, d = target.shape(aval.shape), params["dimension"]
    if target.dim != d:
        return device.bind(node, [], {**params, "shape": shape})[0]
    # As integers, since small floats cannot count far.
    positions = device.positions(target)
    positions = positions.astype(jnp.int64) if aval.shape[d] > 2**31 - 1 else positions
    return lax.broadcast_in_dim(positions.astype(aval.dtype), shape, (d,))


@special("concatenate", "slice", "split", "tile")
def _in_blocks(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Join, take or repeat whole blocks of a batch: each device does so with its slices of them."""
    # Two views of 8 examples, joined as in SimCLR over 2 devices: each joins its 4 and 4, which are no slice of 16 rows
    # but Split(0, size=8, chunk=4, outer=2). Taking one view of these again sends nothing.
    splits, params = [p for p in ins if isinstance(p, Split)], node.eqn.params
    if not splits:
        return None
    p, old, new = splits[0], ctx.block.shapes(node.ins), ctx.block.shapes(node.outs)
    d = p.dim
    match node.name:
        case "concatenate":
            along = params["dimension"] == d and not any(split.of_state for split in splits)
        case "slice":
            contiguous = params["strides"] is None or params["strides"][d] == 1
            along = contiguous and old[0][d] != new[0][d] and params["start_indices"][d] % p.size == 0
        case "split":
            along = params["axis"] == d
        case _:
            along = params["reps"][d] != 1
    if not along or any(shape[d] % p.size for shape in (*old, *new)):
        return None
    in_forms, out_placements = (
        [Split(d, p.size, p.chunk, shape[d] // p.size) for shape in shapes] for shapes in (old, new)
    )
    if any(isinstance(q, Split) and form(q) != in_form for q, in_form in zip(ins, in_forms, strict=True)):
        return None

    def local_sizes(sizes: Sequence[int], along: int | None = None) -> tuple[int, ...]:
        return tuple(n // p.size * p.chunk if along in (None, k) else n for k, n in enumerate(sizes))

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        local = {name: local_sizes(params[name], d) for name in ("start_indices", "limit_indices") if name in params}
        local.update({"sizes": local_sizes(params["sizes"])} if "sizes" in params else {})
        return device.bind(node, xs, {**params, **local})

    return Strategy(in_forms, [replace(split, of_state=p.of_state) for split in out_placements], run)


@special("rev")
def _reverse(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Reverse the batch: each device reverses its part, and the parts trade places."""
    p = ins[0]
    # Reversed, padding would come first, in front of the last row.
    if not isinstance(p, Split) or p.dim not in node.eqn.params["dimensions"] or p.outer > 1 or p.is_padded(ctx.n):
        return None
    aval = ctx.block.avals[node.ins[0]]
    if not jnp.issubdtype(aval.dtype, np.number):
        return None
    ends = [(i, ctx.n - 1 - i) for i in range(ctx.n)]
    run = lambda device, node, xs: [lax.ppermute(device.bind(node, xs)[0], device.axis, ends)]
    return Strategy([form(p)], [p.alone()], run, sends=[Sends("permute", nbytes(aval), of_state=p.of_state)])


@special("jaxdist_all_gather")
def _gathered(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Gather a split dimension over a different axis: each device gets its slice of each part."""
    p, params = ins[0], node.eqn.params
    # Two parts of 8 rows over 4 devices, Split(size=8, chunk=2), become 16 rows, Split(size=8, chunk=2, outer=2). That
    # sends over the other axis only: each device has 2 rows of each part.
    if not isinstance(p, Split) or p.dim != params["dim"] or p.outer > 1 or p.is_padded(ctx.n):
        return None
    if p.size * params["devices"] != params["size"]:
        return None
    result = replace(p.alone(), outer=params["devices"])
    run = lambda device, node, xs: device.bind(node, xs, {**params, "size": result.rows})
    return Strategy([form(p)], [result], run)


@special("jaxdist_shard")
def _mark(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Shard a marked value (`jaxdist.zero`)."""
    p, params = ins[0], node.eqn.params
    shape = ctx.block.shapes(node.ins)[0]
    requested = params["role"] in ("requested", "state")
    dim = ctx.infer.shard_dim(shape)
    if ctx.infer.level(node):
        # A leaf stays in the slices that it comes in; a gradient is cut as the state is that the optimizer adds it to.
        if isinstance(p, Split) and p.of_state and (params["role"] != "gradient" or p.dim == dim):
            return Strategy([form(p)], [replace(p, requested=requested, whole=False)], _kept_for_later_axes)
        if dim is not None:
            shard = replace(ctx.infer.shard(dim, shape[dim]), requested=requested)
            return Strategy([form(shard)], [shard], _kept_for_later_axes)
        p = p if isinstance(p, Split) else REPLICATED
    return _passed_on([p], _kept_for_later_axes)


@special("jaxdist_plain", "reshard", "layout_constraint", "mesh_cast", "device_put", "pvary")
def _same(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Pass the value on, for nested decorated steps and operations that only set a sharding."""
    return _passed_on(ins, lambda device, node, xs: xs)


def _passed_on(ins: Sequence[Placement], run: Run) -> Strategy:
    # A value that is whole on each device is passed on so: in slices, its next use would gather it.
    out_placements = [REPLICATED if isinstance(p, Deferred) else p for p in ins]
    in_forms = [REPLICATED if isinstance(p, Split) and p.whole else form(p) for p in out_placements]
    return Strategy(in_forms, out_placements, run)


def _kept_for_later_axes(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
    # The pass over the last axis reads the marks, and `offload` after it where the gradients are ready.
    return device.bind(node, xs) if device.marks else xs


# --- the user's constraints

CONSTRAINT = "as constrained"


def constrained_dim(node: Node, axis: str) -> int | None:
    """Return the dimension that a constraint of the user's divides over an axis alone."""
    spec = getattr(node.eqn.params.get("sharding"), "spec", None) if node.name == "sharding_constraint" else None
    return next((dim for dim, axes in enumerate(axes_by_dim(spec or ())) if axes == (axis,)), None)


def _constrained_later(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
    if not device.marks:
        return xs
    with compat.context_of(node.eqn):
        # A constraint may name several axes: each pass follows its own part.
        return [constraint_p.bind(xs[0], sharding=node.eqn.params["sharding"])]


@special("sharding_constraint")
def _unconstrained(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    return _passed_on(ins, _constrained_later)


@alternative("sharding_constraint")
def _constrained(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Take the slices that the user names for this axis in `jax.lax.with_sharding_constraint`."""
    (shape,), (p,) = ctx.block.shapes(node.ins), ins
    dim = constrained_dim(node, ctx.infer.axis.name)
    if dim is None or shape[dim] < ctx.n or (isinstance(p, Split) and p.dim == dim and not p.whole):
        return None
    slices = values.tile(dim, shape[dim], ctx.n)
    return Strategy([slices], [slices], _constrained_later, name=CONSTRAINT)


@special("jaxdist_count")
def _count(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Count the entries that each device holds."""
    in_form = form(ins[0]) if isinstance(ins[0], Split) else REPLICATED
    devices, (result,) = node.eqn.params["devices"], (ctx.block.avals[o] for o in node.outs)

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        x = xs[0]
        if isinstance(in_form, Split) and in_form.is_padded(device.n):
            # Padding is copies: a NaN in the last row would count several times.
            x = device.masked(x, in_form, 0)
        left = devices // device.n  # devices along the axes still to be placed
        counted = counts(x)[None] if left == 1 else count_p.bind(x, devices=left)
        return [device.gather(counted, 0, left * device.n)]

    return Strategy([in_form], [REPLICATED], run, sends=[Sends("all-gather", nbytes(result))])


# --- random bits
#
# Identical to ``jax.random`` with ``jax_threefry_partitionable`` (JAX's default): threefry makes an
# entry from the key and the entry's position, a counter in row-major order, and joins or folds the
# resulting words to the width (Salmon et al., *Parallel random numbers*, SC 2011). With other
# generators, or a counter of more than 32 bits, every device makes all bits and cuts them.


@special("random_bits")
def _bits(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    if not isinstance(ins[0], (Replicated, Deferred)):
        return None
    by_place = compat.makes_bits_by_place(ctx.block.avals[node.ins[0]].dtype)
    return Strategy([None], [Deferred()], make=_make_bits if by_place else make_whole)


def _make_bits(device: DeviceContext, node: Node, target: Form) -> jax.Array:
    (i,), (o,) = node.ins, node.outs
    keys, shape = device.block.avals[i].shape, device.block.avals[o].shape
    if not isinstance(target, Split):
        return device.bind(node, [device.take(i, REPLICATED)])[0]
    if target.dim < len(keys):  # slices of an array of keys
        return device.bind(node, [device.take(i, form(target))])[0]
    if math.prod(shape[len(keys) :]) >= 1 << 32:
        return make_whole(device, node, target)
    data = jax.random.key_data(device.take(i, REPLICATED))
    local, rank = target.shape(shape), len(shape)
    counter = jnp.zeros(local, jnp.uint32)
    for d in range(len(keys), rank):
        # A padded row counts as the one that it copies, so it draws the same bits.
        index = device.positions(target).astype(jnp.uint32) if d == target.dim else lax.iota(jnp.uint32, local[d])
        counter += lax.broadcast_in_dim(index * jnp.uint32(math.prod(shape[d + 1 :])), local, (d,))
    first, second = (lax.broadcast_in_dim(data[..., w], local, range(len(keys))) for w in range(2))
    high, low = compat.threefry(first, second, jnp.zeros_like(counter), counter)
    width = node.eqn.params["bit_width"]
    if width == 64:
        return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(jnp.dtype(f"uint{width}"))
