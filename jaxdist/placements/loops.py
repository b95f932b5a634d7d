"""Rules for loops (`scan`, `while`): carries settle before bodies are placed for good."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jaxdist.ir.interpreter import CONTROL_FLOW, bodies, has_effect, with_bodies
from jaxdist.ir.operations import ADDITION, FOR_ITSELF
from jaxdist.placements.block import Block, Node
from jaxdist.placements.cost import seconds
from jaxdist.placements.propagate import RuleContext, resolved, special
from jaxdist.placements.strategy import DeviceContext, Inference, Propagation, Strategy, nbytes, sliced
from jaxdist.placements.summands import is_zero
from jaxdist.placements.values import REPLICATED, Deferred, Partial, Placement, Replicated, Split, form, is_wide, tile

_ADDS = ADDITION | CONTROL_FLOW | {"sub", "convert_element_type", "select_n"}
_MOST_ROUNDS = 12


def inside(p: Placement) -> Placement:
    """Return the placement of a value inside a body."""
    if isinstance(p, Partial):
        return REPLICATED
    return replace(p, whole=False, requested=False) if isinstance(p, Split) else resolved(p)


def throughout(p: Placement) -> Placement:
    """Return the placement of a loop constant in a body; a deferred one takes the form used."""
    return p if isinstance(p, Deferred) else inside(p)


def join(a: Placement, b: Placement) -> Placement:
    """Return a placement that can hold both values, and that claims as little as possible."""
    if a == b:
        return a
    if isinstance(a, Split):
        if isinstance(b, Split) and a.of_state and not b.of_state:
            return replace(a, of_state=False) if form(a) == form(b) else replace(b, whole=False, requested=False)
        return a
    if isinstance(b, Split):
        return replace(b, whole=False, requested=False)
    if isinstance(a, Partial) and isinstance(b, Partial):
        return (
            Partial(a.gradient and b.gradient, unreduced_axes=a.unreduced_axes)
            if a.unreduced_axes == b.unreduced_axes
            else REPLICATED
        )
    return REPLICATED


def _carried(
    block: Block,
    init: Sequence[Placement],
    first: int,
    place: Callable[[Sequence[Placement]], Propagation],
    watch: Callable[[Sequence[Placement]], Collection[int]] = lambda _: (),
) -> tuple[Sequence[Placement], Propagation]:
    """Settle a loop's carries, so that a turn keeps them, and place its body; `watch` returns carries used outside."""
    consumers = {i: node.name for node in block.nodes for i in node.ins}
    at: list[Placement] = []
    for p, i in zip(init, block.inputs[first:], strict=False):
        adds = block.uses[i] == 1 and consumers.get(i) in _ADDS and is_wide(block.avals[i].dtype)
        # A sum that starts from a nonzero value is not a gradient, but may be parameters.
        start = Partial(is_zero(p) or (isinstance(p, Partial) and p.gradient), made=False)
        at.append(start if adds and not isinstance(p, Split) else inside(p))
    for _ in range(_MOST_ROUNDS):
        placed = place(at)
        needed = {*watch(at), *(k - first for k in placed.reduced_inputs)}
        new = [_after(a, b, k in needed) for k, (a, b) in enumerate(zip(at, placed.out_placements, strict=False))]
        if new == at:
            return at, placed
        at = new
    at = [p if isinstance(p, Split) else REPLICATED for p in at]
    return at, place(at)


def _after(a: Placement, b: Placement, needed: bool) -> Placement:
    """Return the placement that the next turn takes, if this one took `a` and returned `b`."""
    if not isinstance(a, Partial):
        return join(a, inside(b))
    if needed or not isinstance(b, Partial) or not b.made or b.unreduced_axes:
        return inside(b) if isinstance(b, Split) else REPLICATED
    return Partial(b.gradient, made=False)


def bound(placed: Sequence[Propagation]) -> Callable[..., Sequence[Any]]:
    """Return a function that runs control flow with placed bodies."""

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        made = {id(body.closed): device.body(one) for body, one in zip(bodies(node.eqn), placed, strict=True)}
        return device.bind(node, args, with_bodies(node.eqn, lambda closed: made[id(closed)]))

    return run


def _partial_carries(carry: Sequence[Placement]) -> frozenset[int]:
    return frozenset(k for k, p in enumerate(carry) if isinstance(p, Partial))


def _out(carry: Sequence[Placement]) -> list[Placement]:
    """Return the placements of a loop's results."""
    return [replace(p, made=True) if isinstance(p, Partial) else p for p in carry]


@special("scan")
def _scan(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    infer = ctx.infer
    (body,) = bodies(node.eqn)
    first, rest = body.carry.start, body.carry.stop
    block = infer.block(body.closed, node.backward)
    over_batch = any(isinstance(p, Split) and p.dim == 0 and not p.of_state for p in ins[rest:])
    if over_batch and (strategy := _own_turns(ctx, node, ins, block, first, rest)):
        return strategy
    later = ctx.added_up(node).intersection(body.ys)
    consts: Sequence[Placement] = [throughout(p) for p in ins[:first]]
    xs = [_unscanned(infer, inside(p), ctx.block.avals[i]) for p, i in zip(ins[rest:], node.ins[rest:], strict=True)]

    def place(consts: Any, carry: Any, xs: Any, wants: Any = None) -> Propagation:
        inner = [replace(p, dim=p.dim - 1) if isinstance(p, Split) else REPLICATED for p in xs]
        return infer.place(block, [*consts, *carry, *inner], wants, _partial_carries(carry) | later)

    def settle(xs: Sequence[Placement]) -> tuple[Sequence[Placement], Propagation]:
        return _carried(block, ins[first:rest], first, lambda carry: place(consts, carry, xs))

    carry, placed = settle(xs)
    examples = sum(nbytes(ctx.block.avals[i]) for i in node.ins[rest:])
    if over_batch and placed.communicates and _is_little(infer, examples):
        # Little sequential work: one gather of the batch may cost less than a message per turn.
        gathered = [p if isinstance(p, Split) and p.of_state else REPLICATED for p in xs]
        other, whole = settle(gathered)
        if not whole.communicates and seconds(whole, infer.machine) <= infer.link.latency:
            carry, xs, placed = other, gathered, whole
    consts, (placed,) = sliced(consts, [placed], lambda cut: [place(cut, carry, xs)])
    wants, out_placements = [form(p) for p in carry], _out(carry)
    for k in body.ys:
        p = resolved(_stacked(ctx, node.outs[k], placed.returned(k), k in later))
        wants.append(form(p))
        outer = replace(p, dim=p.dim + 1, whole=False, requested=False) if isinstance(p, Split) else p
        out_placements.append(Replicated() if isinstance(outer, Replicated) else outer)
    placed = place(consts, carry, xs, wants)
    return Strategy([form(p) for p in (*consts, *carry, *xs)], out_placements, bound([placed]), bodies=[placed])


def _stacked(ctx: RuleContext, o: int, p: Placement, later: bool) -> Placement:
    """Place a turn's part of a stacked result: large summands are reduced, unless they are added up later."""
    aval = ctx.block.avals[o]
    if not isinstance(p, Partial) or later or _is_little(ctx.infer, nbytes(aval)):
        return p
    dim = ctx.infer.marked(ctx.block).get(o)
    return ctx.infer.shard(dim - 1, aval.shape[dim]) if dim else REPLICATED


def _is_little(infer: Inference, size: int) -> bool:
    """Check whether to send an array once, before or after the loop, as it takes less than a message's latency."""
    # Larger arrays are sent in each turn, which overlaps with the next, straight into slices if a mark wants them.
    return infer.link.seconds("all-gather", size) <= infer.link.latency


def _unscanned(infer: Inference, p: Placement, aval: Any) -> Placement:
    """Move the split of a scanned array to a dimension that the loop does not run over."""
    if not isinstance(p, Split) or p.dim:
        return p
    parts = infer.devices
    dims = [d for d in range(1, len(aval.shape)) if aval.shape[d] >= parts]
    dims.sort(key=lambda d: aval.shape[d] % parts > 0)  # the first that the devices divide, else the first
    return tile(dims[0], aval.shape[dims[0]], parts, p.of_state) if dims else REPLICATED


def _own_turns(
    ctx: RuleContext, node: Node, ins: Sequence[Placement], block: Block, first: int, rest: int
) -> Strategy | None:
    """Split a loop over the batch whose turns are independent but for sums of results."""
    if any(has_effect(n.eqn) or n.name in FOR_ITSELF for n in block.nodes):
        return None
    carried = list(zip(block.inputs[first:rest], block.outputs, strict=False))
    for i, o in carried:
        n = block.makers.get(o)
        if n is None or n.name not in ADDITION or i not in n.ins or n.ins[0] == n.ins[1]:
            return None
        if block.uses[i] != 1 or block.uses[o] != 1 or not is_wide(block.avals[i].dtype):
            return None
    split = next(p for p in ins[rest:] if isinstance(p, Split) and p.dim == 0 and not p.of_state)
    if split.outer > 1 and carried and split.is_padded(ctx.n):
        return None
    to = form(split)
    params, count = node.eqn.params, rest - first
    body = jaxpr_as_fun(params["jaxpr"])

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        consts, carry, xs = args[:first], args[first:rest], args[rest:]
        padded = split.is_padded(device.n)
        counts = device.real(replace(split, dim=0), 1) if padded and carry else None

        def turn(carry: Any, xs: Any) -> Any:
            xs, real = xs
            outs = body(*consts, *[c.astype(a.dtype) for c, a in zip(carry, narrow, strict=True)], *xs)
            new = [o.astype(c.dtype) for o, c in zip(outs[:count], carry, strict=True)]
            if real is not None:
                new = [jnp.where(real, a, b) for a, b in zip(new, carry, strict=True)]
            return tuple(new), tuple(outs[count:])

        narrow = [block.avals[i] for i in block.inputs[first:rest]]
        settings = {k: params[k] for k in ("reverse", "unroll")}
        carry, ys = lax.scan(turn, tuple(carry), (tuple(xs), counts), length=split.rows, **settings)
        return [*carry, *ys]

    in_forms = [*[REPLICATED] * first, *[Partial()] * count, *[to] * (len(ins) - rest)]
    out_placements: list[Placement] = [Partial(gradient=node.backward)] * count
    out_placements += [replace(split, whole=False)] * (len(node.outs) - count)
    return Strategy(in_forms, out_placements, run)


@special("while")
def _while(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    infer = ctx.infer
    test, loop = bodies(node.eqn)
    cond, body = (infer.block(one.closed, node.backward) for one in (test, loop))
    cond_consts, consts = ([throughout(p) for p in one.split(ins)[0]] for one in (test, loop))
    if cond.avals[cond.outputs[0]].shape:
        return _batched_while(ctx, node, ins, cond_consts, consts, cond, body)

    def again(carry: Sequence[Placement]) -> Propagation:
        return infer.place(cond, [*cond_consts, *carry], [REPLICATED])

    def turn(consts: Sequence[Placement], carry: Sequence[Placement], wants: Any = None) -> Propagation:
        return infer.place(body, [*consts, *carry], wants, _partial_carries(carry))

    def needed(carry: Sequence[Placement]) -> list[int]:
        return [i - test.carry.start for i in again(carry).reduced_inputs]

    start = loop.split(ins)[1]
    carry, placed = _carried(body, start, loop.carry.start, lambda carry: turn(consts, carry), needed)
    consts, _ = sliced(consts, [placed], lambda cut: [turn(cut, carry)])
    found = again(carry), turn(consts, carry, [form(p) for p in carry])
    in_forms = [form(p) for p in (*cond_consts, *consts, *carry)]
    return Strategy(in_forms, _out(carry), bound(found), bodies=found)


def _batched_while(
    ctx: RuleContext,
    node: Node,
    ins: Sequence[Placement],
    cond_consts: Sequence[Placement],
    consts: Sequence[Placement],
    cond: Block,
    body: Block,
) -> Strategy:
    """Place the ``vmap`` of a loop: it runs until all examples are done, or a device's if no turn communicates."""
    infer, avals = ctx.infer, [ctx.block.avals[o] for o in node.outs]
    rank = len(cond.avals[cond.outputs[0]].shape)

    def place(to: Placement, first: Sequence[Placement], rest: Sequence[Placement]) -> Strategy:
        carry = [form(to)] * len(avals)
        placed = infer.place(cond, [*first, *carry], carry[:1]), infer.place(body, [*rest, *carry], carry)
        in_forms = [*map(form, (*first, *rest)), *carry]
        return Strategy(in_forms, [to] * len(avals), bound(placed), bodies=placed)

    split = next((p for p in (*cond_consts, *consts, *ins) if isinstance(p, Split) and p.dim < rank), None)
    if split is not None and all(a.shape[split.dim] == split.outer * split.size for a in avals):
        own = place(replace(split, whole=False), cond_consts, consts)
        if all(_is_local(infer, one) for one in own.bodies):
            return own
    return place(REPLICATED, [REPLICATED] * len(cond_consts), [REPLICATED] * len(consts))


def _is_local(infer: Inference, placed: Propagation) -> bool:
    """Check whether a device runs a block without communication."""
    outs = zip(placed.block.outputs, placed.out_placements, placed.out_forms, strict=True)
    return not placed.communicates and not any(infer.reshard(p, to, placed.block.avals[i]) for i, p, to in outs)
