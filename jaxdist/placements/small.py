"""Small steps: where to compute all of it on every device takes less time than the messages between their parts.

The examples are gathered first, in one message. What is kept in shards stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxdist.placements.block import Block
from jaxdist.placements.infer import Infer
from jaxdist.placements.report import moves, work
from jaxdist.placements.strategy import Move, Placed, nbytes
from jaxdist.placements.values import REPLICATED, Placement, Split


@dataclass(frozen=True)
class Limits:
    """What is small.

    Attributes:
      batch: bytes of a batch.
      message: FLOPs that take less than a message: 50 us of a core.
      fewer: messages that must be saved. A step without coupling has two at most.
    """

    batch: int = 1 << 16
    message: int = 1 << 17
    fewer: int = 2


limits = Limits()


def at_once(
    infer: Infer, block: Block, placed: Placed, ins: Sequence[Placement], messages: Callable[[Placed], int]
) -> Placed:
    """A step as it is placed, or computed whole on every device.

    Args:
      infer: which placed it.
      block: the step as it was traced: that of `placed` may have owners in it, for examples that are split.
      placed: the step, each device computing its part.
      ins: how its arguments come.
      messages: how many a device sends in a placed step.

    Returns:
      A step that takes its arguments and returns its results in the same forms.
    """
    examples = [k for k, p in enumerate(ins) if isinstance(p, Split) and not p.stored]
    if not examples:
        return placed
    avals = [block.avals[block.inputs[k]] for k in examples]
    moved = moves(placed)  # some of these travel together, but to know it the step has to be traced
    if sum(map(nbytes, avals)) > limits.batch or moved < limits.fewer or work(placed) > limits.message * moved:
        return placed
    whole = infer.place(block, [REPLICATED if k in examples else p for k, p in enumerate(ins)], placed.outs)
    before = messages(placed)
    more = work(whole) - work(placed)
    if more > limits.message * before:
        return placed
    user = {i: node for node in reversed(block.nodes) for i in node.ins}
    gathered = [
        Move(user[i], "all-gather", a, False, "")
        for i, a in zip((block.inputs[k] for k in examples), avals, strict=True) if i in user
    ]  # fmt: skip
    whole = replace(whole, ins=placed.ins, own=[*gathered, *whole.own], whole=True)
    saved = before - messages(whole)
    return whole if saved >= limits.fewer and more <= limits.message * saved else placed
