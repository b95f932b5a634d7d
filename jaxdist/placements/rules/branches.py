"""Rules for branches and checkpoints: bodies that share their inputs' and results' placements."""

from collections.abc import Sequence
from typing import Any

from jaxdist import compat
from jaxdist.ir.interpreter import CHECKPOINT, bodies
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, Propagation, Strategy, sliced
from jaxdist.placements.model.values import (
    REPLICATED,
    Partial,
    Placement,
    Replicated,
    form,
    inside,
    throughout,
    whole_if_deferred,
)
from jaxdist.placements.rules.context import RuleContext, special
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
        # A checkpoint holds an open jaxpr, which has no place for constants.
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
        # Zeros take any form, so they do not weaken the results of the other branches.
        joined, *others = [whole_if_deferred(p) for p in outs if not is_zero(p)] or [REPLICATED]
        for p in others:
            joined = join(joined, p)
        joined = inside(joined) if not isinstance(joined, Partial) else joined
        # Not with a constant: a different branch may have been taken.
        out_placements.append(Replicated() if isinstance(joined, Replicated) else joined)
    # Again, with the results in the joined forms.
    return in_placements, out_placements, place(in_placements, [form(p) for p in out_placements])
