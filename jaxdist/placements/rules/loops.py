"""Rules for loops (`scan`, `while`): carries are placed before bodies are placed for good."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxdist.ir.interpreter import CONTROL_FLOW, bodies, with_bodies
from jaxdist.ir.operations import ADDITION
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.cost import cost, seconds
from jaxdist.placements.model.strategy import DeviceContext, Inference, Propagation, Run, Strategy, nbytes, sliced
from jaxdist.placements.model.values import (
    REPLICATED,
    Form,
    Partial,
    Placement,
    Replicated,
    Split,
    form,
    inside,
    is_wide,
    throughout,
    tile,
    whole_if_deferred,
)
from jaxdist.placements.rules.context import RuleContext, special
from jaxdist.placements.rules.own_iterations import own_iterations
from jaxdist.placements.rules.summands import is_zero

_ADDS = ADDITION | CONTROL_FLOW | {"sub", "convert_element_type", "select_n"}
_MOST_ROUNDS = 12
_HELD = 2  # times the largest array that iterations gather may be held throughout a loop
_TRIPS = 2  # of a `while`, assumed when its constants are gathered before it; `Node.trip_count` has 1, for costs


class Settled(NamedTuple):
    """A loop whose carries leave an iteration as they enter it."""

    carry: Sequence[Placement]
    body: Propagation


def join(a: Placement, b: Placement) -> Placement:
    """Return the strongest placement in the order of `_settled` that can hold both values.

    Of two splits of the batch that differ the first wins.
    """
    if a == b:
        return a
    if isinstance(a, Split):
        # A mix is of the batch: shards are gathered anew in the backward pass, activations are kept.
        if isinstance(b, Split) and a.of_state and not b.of_state:
            return replace(a, of_state=False) if form(a) == form(b) else b.alone()
        return a
    if isinstance(b, Split):
        return b.alone()
    if isinstance(a, Partial) and isinstance(b, Partial) and a.unreduced_axes == b.unreduced_axes:
        return Partial(a.gradient and b.gradient, unreduced_axes=a.unreduced_axes)
    return REPLICATED


def _settled(
    block: Block,
    init: Sequence[Placement],
    carry_inputs: Sequence[int],
    place_body: Callable[[Sequence[Placement]], Propagation],
    used_outside: Callable[[Sequence[Placement]], Collection[int]] = lambda _: (),
) -> Settled:
    """Place a loop's carries so that an iteration returns them as it took them, and its body.

    A carry starts with the strongest claim, and each round weakens those that the body does not keep::

        Partial, of a gradient    each device has a summand: the body only adds to it
        Partial                   the same, of other values: it must not be sent compressed
        Replicated                each device has the value
        Split, of state           each device has its slice, which is cut from a value for free, but not the reverse
        Split, of the batch       the same, of examples

    A carry only moves down this list (`_weaker`), so after at most four rounds for each carry nothing changes. Most
    loops take two rounds; after `_MOST_ROUNDS`, carries that are not Split stay whole: that is right, and sends more.

    Args:
      block: the body.
      init: the placements of the carries before the loop.
      carry_inputs: the positions of the carries among the body's inputs; they are its first outputs.
      place_body: places the body, given its carries.
      used_outside: returns the carries that must not be summands for others than the body, a `while`'s condition.
    """
    carry = [_first_claim(block, p, block.inputs[k]) for p, k in zip(init, carry_inputs, strict=True)]
    for _ in range(_MOST_ROUNDS):
        body = place_body(carry)
        outside, returned = used_outside(carry), body.out_placements[: len(carry)]
        reduced = [k in outside or i in body.reduced_inputs for k, i in enumerate(carry_inputs)]
        next_carry = [_weaker(p, q, needed) for p, q, needed in zip(carry, returned, reduced, strict=True)]
        if next_carry == carry:
            return Settled(carry, body)
        carry = next_carry
    carry = [p if isinstance(p, Split) else REPLICATED for p in carry]
    return Settled(carry, place_body(carry))


def _first_claim(block: Block, init: Placement, i: int) -> Placement:
    """Return the strongest placement that a carry may keep."""
    user = block.last_user.get(i)
    # One use, which adds: any other operation in the body would need the sum itself.
    adds = block.uses[i] == 1 and user is not None and user.name in _ADDS and is_wide(block.avals[i].dtype)
    if not adds or isinstance(init, Split):
        return inside(init)
    # A sum that starts from a nonzero value is not a gradient, but may be parameters.
    return Partial(is_zero(init) or (isinstance(init, Partial) and init.gradient), made=False)


def _weaker(taken: Placement, returned: Placement, reduced: bool) -> Placement:
    """Return the placement that the next iteration takes of a carry; `reduced`: something needs its sum."""
    if not isinstance(taken, Partial):
        return join(taken, inside(returned))
    # A summand to which nothing was added (`made`) is the value that came in: whole, it need not be sent afterwards.
    if reduced or not isinstance(returned, Partial) or not returned.made or returned.unreduced_axes:
        return inside(returned) if isinstance(returned, Split) else REPLICATED
    return Partial(returned.gradient, made=False)


def _gathered_before(
    infer: Inference, consts: Sequence[Placement], trips: int, settle: Callable[[Sequence[Placement]], Settled]
) -> tuple[Sequence[Placement], Settled]:
    """Return the placements of a loop's constants, and the loop: gathered before it, not in each turn, if cheaper.

    Each iteration gathers the largest of these anyway. The loop may hold twice as much: a recurrent layer's
    weights, but not, at level 3 of ZeRO, the parameters of a model that takes several microbatches.

    Args:
      infer: the axis.
      consts: the placements of the constants, the first inputs of the body.
      trips: the number of iterations.
      settle: places the carries and the body, given the constants.
    """
    loop = settle(consts)
    block = loop.body.block
    gathered = {block.source(message.value) for message in loop.body.messages if message.kind == "all-gather"}
    inputs = block.inputs[: len(consts)]
    sizes = {
        i: nbytes(block.avals[i]) for i, p in zip(inputs, consts, strict=True) if isinstance(p, Split) and i in gathered
    }
    before, held = set[int](), 0
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        if held + sizes[i] <= _HELD * max(sizes.values()):
            before.add(i)
            held += sizes[i]
    if before:
        whole = [REPLICATED if i in before else p for i, p in zip(inputs, consts, strict=True)]
        loop_of_whole = settle(whole)
        once = sum(infer.link.seconds("all-gather", sizes[i]) + infer.link.latency for i in before)
        if once + trips * cost(loop_of_whole.body, infer) < trips * cost(loop.body, infer):
            return whole, loop_of_whole
    return consts, loop


def bound(placed: Sequence[Propagation]) -> Run:
    """Return a function that runs control flow with placed bodies."""

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        # By identity, as `with_bodies` replaces each jaxpr wherever it is among the parameters.
        programs = {id(body.closed): device.body(p) for body, p in zip(bodies(node.eqn), placed, strict=True)}
        return device.bind(node, args, with_bodies(node.eqn, lambda closed: programs[id(closed)]))

    return run


def _partial_carries(carry: Sequence[Placement]) -> frozenset[int]:
    return frozenset(k for k, p in enumerate(carry) if isinstance(p, Partial))


def _result_placements(carry: Sequence[Placement]) -> list[Placement]:
    """Return the placements of a loop's results."""
    return [replace(p, made=True) if isinstance(p, Partial) else p for p in carry]


@special("scan")
def _scan(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Place a scan; each of these may place the body anew:

    1. Turns that share only sums: each device loops over its own examples (`own_iterations`), and that is all.
    2. xs split along the loop are split along a different dimension, or gathered (`_unscanned`).
    3. Carries settle (`_settled`), with constants unchanged or gathered before the loop (`_gathered_before`).
    4. Little work over the batch: xs whole, if no turn communicates then.
    5. Constants that turns use in one slice are cut before the loop (`sliced`).
    6. The body again, its outputs in the forms that the next turn and the stack take.
    """
    infer = ctx.infer
    (body,) = bodies(node.eqn)
    block = infer.block(body.closed, node.backward)
    consts_in, carry_in, xs_in = body.split(ins)
    over_batch = any(isinstance(p, Split) and p.dim == 0 and not p.of_state for p in xs_in)
    if over_batch and (strategy := own_iterations(ctx, node, ins, block, body.carry)):
        return strategy
    arrays = body.split(node.ins)[2]
    added_up = ctx.added_up(node).intersection(body.ys)
    xs = [_unscanned(infer, inside(p), ctx.block.avals[i]) for p, i in zip(xs_in, arrays, strict=True)]

    def place(
        consts: Sequence[Placement],
        carry: Sequence[Placement],
        xs: Sequence[Placement],
        wants: Sequence[Form] | None = None,
    ) -> Propagation:
        slices = [replace(p, dim=p.dim - 1) if isinstance(p, Split) else REPLICATED for p in xs]
        return infer.place(block, [*consts, *carry, *slices], wants, _partial_carries(carry) | added_up)

    def settle(consts: Sequence[Placement], xs: Sequence[Placement]) -> Settled:
        return _settled(block, carry_in, body.carry, lambda carry: place(consts, carry, xs))

    consts = [throughout(p) for p in consts_in]  # 3
    consts, loop = _gathered_before(infer, consts, node.trip_count, lambda consts: settle(consts, xs))
    if over_batch and loop.body.communicates and _is_little(infer, sum(nbytes(ctx.block.avals[i]) for i in arrays)):
        # 4. Little sequential work: one gather of the batch may cost less than a message per iteration.
        gathered = [p if isinstance(p, Split) and p.of_state else REPLICATED for p in xs]
        loop_of_whole = settle(consts, gathered)
        alone = not loop_of_whole.body.communicates
        if alone and seconds(loop_of_whole.body, infer.axis.machine) <= infer.link.latency:
            loop, xs = loop_of_whole, gathered
    carry = loop.carry
    consts, (placed,) = sliced(consts, [loop.body], lambda cut: [place(cut, carry, xs)])  # 5
    ys = [_place_stacked(ctx, node.outs[k], placed.returned(k), k in added_up) for k in body.ys]
    placed = place(consts, carry, xs, [form(p) for p in (*carry, *ys)])  # 6
    out_placements = [*_result_placements(carry), *map(_stacked, ys)]
    return Strategy([form(p) for p in (*consts, *carry, *xs)], out_placements, bound([placed]), bodies=[placed])


def _place_stacked(ctx: RuleContext, o: int, p: Placement, added_up: bool) -> Placement:
    """Place a turn's part of a stacked result: large summands are reduced, unless a surrounding loop adds them up."""
    aval = ctx.block.avals[o]
    if not isinstance(p, Partial) or added_up or _is_little(ctx.infer, nbytes(aval)):
        return whole_if_deferred(p)
    # Along dimension 0 of the stack are the iterations, all of which every device runs.
    dim = ctx.infer.slices_wanted(ctx.block).get(o)
    return ctx.infer.shard(dim - 1, aval.shape[dim]) if dim else REPLICATED


def _stacked(p: Placement) -> Placement:
    """Return the placement of a stack of values that are placed so."""
    if isinstance(p, Split):
        return p.along(p.dim + 1).alone()
    return REPLICATED if isinstance(p, Replicated) else p


def _is_little(infer: Inference, size: int) -> bool:
    """Check whether to send an array once, before or after the loop, as it takes less than a message's latency."""
    # Larger arrays are sent in each turn, which overlaps with the next, straight into slices if a mark wants them.
    return infer.link.seconds("all-gather", size) <= infer.link.latency


def _unscanned(infer: Inference, p: Placement, aval: Any) -> Placement:
    """Move the split of a scanned array to a dimension that the loop does not run over."""
    # Split by iterations, a row is on one device, and all need it in its iteration: that is a message in each.
    if not isinstance(p, Split) or p.dim:
        return p
    parts = infer.devices
    dims = [d for d in range(1, len(aval.shape)) if aval.shape[d] >= parts]
    dims.sort(key=lambda d: aval.shape[d] % parts > 0)  # the first that the devices divide, else the first
    return tile(dims[0], aval.shape[dims[0]], parts, p.of_state) if dims else REPLICATED


@special("while")
def _while(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    infer = ctx.infer
    test, loop = bodies(node.eqn)
    cond, body = infer.block(test.closed, node.backward), infer.block(loop.closed, node.backward)
    cond_consts, consts = ([throughout(p) for p in program.split(ins)[0]] for program in (test, loop))
    if cond.avals[cond.outputs[0]].shape:
        return _batched_while(ctx, node, ins, cond_consts, consts, cond, body)

    def place_cond(carry: Sequence[Placement]) -> Propagation:
        return infer.place(cond, [*cond_consts, *carry], [REPLICATED])

    def place_body(
        consts: Sequence[Placement], carry: Sequence[Placement], wants: Sequence[Form] | None = None
    ) -> Propagation:
        return infer.place(body, [*consts, *carry], wants, _partial_carries(carry))

    def reduced_by_cond(carry: Sequence[Placement]) -> list[int]:
        reduced = place_cond(carry).reduced_inputs
        return [k for k, i in enumerate(test.carry) if i in reduced]

    def settle(consts: Sequence[Placement]) -> Settled:
        return _settled(body, loop.split(ins)[1], loop.carry, lambda carry: place_body(consts, carry), reduced_by_cond)

    consts, (carry, placed) = _gathered_before(infer, consts, _TRIPS, settle)
    consts, _ = sliced(consts, [placed], lambda cut: [place_body(cut, carry)])
    both = place_cond(carry), place_body(consts, carry, [form(p) for p in carry])
    in_forms = [form(p) for p in (*cond_consts, *consts, *carry)]
    return Strategy(in_forms, _result_placements(carry), bound(both), bodies=both)


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

    def place(target: Placement, first: Sequence[Placement], body_consts: Sequence[Placement]) -> Strategy:
        carry = [form(target)] * len(avals)
        # The condition has an entry for each example, so it is cut as the carries are (`carry[:1]`), and nothing is
        # gathered.
        placed = infer.place(cond, [*first, *carry], carry[:1]), infer.place(body, [*body_consts, *carry], carry)
        in_forms = [*map(form, (*first, *body_consts)), *carry]
        return Strategy(in_forms, [target] * len(avals), bound(placed), bodies=placed)

    split = next((p for p in (*cond_consts, *consts, *ins) if isinstance(p, Split) and p.dim < rank), None)
    # Padding that copies no row (of state, of a scattered sum) might go on for ever.
    fits = split is not None and not split.is_padded(ctx.n)
    if split is not None and fits and all(a.shape[split.dim] == split.outer * split.size for a in avals):
        of_slices = place(replace(split, whole=False), cond_consts, consts)
        if all(_is_local(infer, body_placed) for body_placed in of_slices.bodies):
            return of_slices
    return place(REPLICATED, [REPLICATED] * len(cond_consts), [REPLICATED] * len(consts))


def _is_local(infer: Inference, placed: Propagation) -> bool:
    """Check whether a device runs a block without communication."""
    outs = zip(placed.block.outputs, placed.out_placements, placed.out_forms, strict=True)
    return not placed.communicates and not any(infer.reshard(p, target, placed.block.avals[i]) for i, p, target in outs)
