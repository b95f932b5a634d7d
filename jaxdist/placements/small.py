"""Small steps: where to compute all of it on every device takes less time than the messages between their parts.

The examples are gathered first, in one message. What is kept in shards stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxdist.placements.block import Block
from jaxdist.placements.cost import moves, seconds
from jaxdist.placements.infer import Infer
from jaxdist.placements.strategy import Placed, nbytes
from jaxdist.placements.values import Placement, Split

fewer = 2
"""Messages that must be saved. A step without coupling has two at most."""


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
    machine, link = infer.machine, infer.link
    moved = moves(placed)  # some of these travel together, but to know it the step has to be traced
    gathered = link.seconds("all-gather", sum(map(nbytes, avals)))
    computed = seconds(placed, machine)
    if moved < fewer or max(gathered, computed) > moved * link.latency:
        return placed
    whole = infer.place(block, ins, placed.outs, whole=frozenset(examples))
    before = messages(placed)
    more = gathered + seconds(whole, machine) - computed
    if more > before * link.latency:
        return placed
    whole = replace(whole, whole=True)
    saved = before - messages(whole)
    return whole if saved >= fewer and more <= saved * link.latency else placed
