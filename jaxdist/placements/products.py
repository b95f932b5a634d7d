"""Products of the batch with what is kept in slices: the smaller of the two travels.

Usually a weight is gathered, and what the devices make of its gradient is reduced into slices. Where the rows of the
batch are few beside a large weight, they travel instead: each device has all rows, multiplies them with its slice of
the weight, and an all-to-all gives each its own examples back; or it has of all rows the columns that meet its slice,
and a reduce-scatter adds the products up. A gradient is computed as a slice, from all rows. The FLOPs are the same.

References:
  Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3 (a product with a weight split along its columns or rows);
  Xu et al., *GSPMD*, arXiv 2105.04663, section 3.5 (a product for which an operand is partitioned again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.placements.block import Node
from jaxdist.placements.describe import Factors
from jaxdist.placements.infer import Walk, special
from jaxdist.placements.run import Cut
from jaxdist.placements.strategy import IN_PLACE, Move, Strategy, nbytes
from jaxdist.placements.values import REPLICATED, Form, Partial, Placement, Split, form, is_wide

_MESSAGE = {True: 1 << 18, False: 1 << 23}
"""Bytes that travel in the time that a message more takes: between CPUs, between others."""


@special("dot_general")
def _product(walk: Walk, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    described = walk.factors(node)
    if described is None or walk.infer.group:
        return None
    stored = [isinstance(p, Split) and p.stored for p in ins]
    batch = [_is_even_batch(p, walk.n) for p in ins]
    if stored[0] != stored[1] and batch[stored.index(False)]:
        return _with_slices(walk, node, ins, described, stored.index(True))
    return _gradient(walk, node, ins, described) if all(batch) else None


def _with_slices(walk: Walk, node: Node, ins: Sequence[Placement], described: Factors, kept: int) -> Strategy | None:
    """The batch, times a weight of which each device has a slice."""
    rows, weight = ins[1 - kept], ins[kept]
    assert isinstance(rows, Split)
    assert isinstance(weight, Split)
    of_rows, of_weight = described.operands[1 - kept], described.operands[kept]
    example, cut = of_rows[rows.dim], of_weight[weight.dim]
    (result,) = described.results
    if not _is_even_tile(weight, walk.n) or example in of_weight or example not in result or cut is None:
        return None
    out = walk.block.avals[node.outs[0]]
    back = form(rows.at(result.index(example)))
    assert isinstance(back, Split)
    if cut in result and cut not in of_rows:  # each device: some columns of all rows
        takes: Form = REPLICATED
        made: Split | Partial = weight.at(result.index(cut))
        kind = None
    elif cut in of_rows and is_wide(out.dtype):  # each device: all columns of all rows, a summand
        takes, made = form(weight.at(of_rows.index(cut))), Partial()
        kind = "sum"
    else:
        return None
    here, there = (walk.block.avals[i] for i in (node.ins[1 - kept], node.ins[kept]))
    moves = [(rows, takes, here), (made, back, out)]
    users = sum(
        other.name == node.name and other.backward == node.backward and node.ins[kept] in other.ins
        for other in walk.block.nodes
    )
    if not _pays(walk, moves, nbytes(there), users):
        return None
    run = _ThenBack(Cut(described, cut, weight, kind), made, back)
    kind_back, _ = walk.infer.move(made, back, out)
    walk.placed.own.append(Move(node, kind_back, out, stored=False, why=IN_PLACE))
    forms: list[Form] = [form(weight), form(weight)]
    forms[1 - kept] = takes
    return Strategy(forms, [back], run, exchanges=True, instead=IN_PLACE)


def _gradient(walk: Walk, node: Node, ins: Sequence[Placement], described: Factors) -> Strategy | None:
    """What is added up over the examples of a batch, and is wanted in slices."""
    (o,), (result,) = node.outs, described.results
    out = walk.block.avals[o]
    dim = walk.infer.marked(walk.block).get(o)
    if dim is None:
        return None
    slices = walk.infer.shard(dim, out.shape[dim])
    examples = {dims[p.dim] for p, dims in zip(ins, described.operands, strict=True) if isinstance(p, Split)}
    having = [k for k, dims in enumerate(described.operands) if result[dim] in dims]
    if not _is_even_tile(slices, walk.n) or not examples <= set(described.reduced) or len(having) != 1:
        return None
    (k,) = having
    takes: list[Form] = [REPLICATED, REPLICATED]
    takes[k] = form(slices.at(described.operands[k].index(result[dim])))
    moves = [(p, to, walk.block.avals[i]) for p, to, i in zip(ins, takes, node.ins, strict=True)]
    if not _pays(walk, moves, nbytes(out)):
        return None
    cut = result[dim]
    assert cut is not None
    return Strategy(takes, [slices], Cut(described, cut, slices, None), instead=IN_PLACE)


def _pays(walk: Walk, moves: Sequence[tuple[Placement, Form, Any]], weight: int, users: int = 1) -> bool:
    """Whether values of the batch should travel in place of a weight.

    What each device has of them whole must be no more than its slice of the weight, so that it does not take the memory
    that the slices save.

    Args:
      walk: which places the block.
      moves: values of the batch, how they come, and how they are needed.
      weight: its bytes.
      users: operations that would share the gathered weight.
    """
    whole = sum(nbytes(aval) for p, to, aval in moves if not (isinstance(p, Split) and isinstance(to, Split)))
    sent = sum(walk.infer.move(p, to, aval)[1] for p, to, aval in moves)
    message = _MESSAGE[walk.infer.on_cpu]
    return whole <= weight // walk.n and sent + len(moves) * message <= weight // users


def _is_even_batch(p: Placement, devices: int) -> bool:
    return isinstance(p, Split) and not (p.stored or p.whole or p.is_padded(devices)) and p.is_tile(devices)


def _is_even_tile(p: Split, devices: int) -> bool:
    return p.is_tile(devices) and not p.is_padded(devices) and not p.whole


@dataclass(frozen=True)
class _ThenBack:
    """A product on slices of a weight, and each device's examples of it.

    Attributes:
      product: the operation on slices.
      made: what it makes.
      back: the examples.
    """

    product: Cut
    made: Split | Partial
    back: Split

    def __call__(self, emitter: Any, node: Node, xs: list[Any]) -> Sequence[Any]:
        (x,) = self.product(emitter, node, xs)
        return [emitter.to_slices(node.outs[0], x, self.made, self.back)]
