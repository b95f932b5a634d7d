"""Rules for branches and checkpoints: bodies that share their inputs' and results' placements."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxdist import compat
from jaxdist.ir.interpreter import CHECKPOINT, bodies
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, Propagation, Strategy, sliced
from jaxdist.placements.model.values import REPLICATED, Partial, Placement, Replicated, form, inside, throughout
from jaxdist.placements.rules.context import RuleContext, special
from jaxdist.placements.rules.loops import bound, join
from jaxdist.placements.rules.summands import is_zero


class _Branches(NamedTuple):
    """The placed bodies of a branch: one of them runs."""

    in_placements: Sequence[Placement]
    out_placements: Sequence[Placement]  # those that all of them return
    bodies: Sequence[Propagation]


@special("cond")
def _cond(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    placed = _branches(ctx, node, ins[1:])
    in_forms = [REPLICATED, *map(form, placed.in_placements)]
    return Strategy(in_forms, placed.out_placements, bound(placed.bodies), bodies=placed.bodies)


@special(CHECKPOINT)
def _checkpoint(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    placed = _branches(ctx, node, ins)

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        closed = device.body(placed.bodies[0])
        # A checkpoint holds an open jaxpr, which has no place for constants.
        jaxpr = compat.with_constants_as_inputs(closed.jaxpr)
        return device.bind(node, [*closed.consts, *args], {**node.eqn.params, "jaxpr": jaxpr})

    return Strategy([form(p) for p in placed.in_placements], placed.out_placements, run, bodies=placed.bodies)


def _branches(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> _Branches:
    """Place bodies that take the same operands so that their results have the same placements."""
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
        # Zeros take any form, so they do not weaken the results of the other branches.
        joined = functools.reduce(join, [p for p in outs if not is_zero(p)] or [REPLICATED])
        joined = inside(joined) if not isinstance(joined, Partial) else joined
        # Not with a constant: a different branch may have been taken.
        out_placements.append(Replicated() if isinstance(joined, Replicated) else joined)
    # Again, with the results in the joined forms.
    return _Branches(in_placements, out_placements, place(in_placements, [form(p) for p in out_placements]))
