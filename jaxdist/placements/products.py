"""Products of the batch with what is kept in slices: the smaller of the two travels.

Usually a weight is gathered, and what the devices make of its gradient is reduced into slices. Where the rows of the
batch are few beside a large weight, they travel instead: each device has all rows, multiplies them with its slice of
the weight, and an all-to-all gives each its own examples back; or it has of all rows the columns that meet its slice,
and a reduce-scatter adds the products up. A gradient is computed as a slice, from all rows. The FLOPs are the same.

Between groups of devices that share a weight rows travel in place of a gradient's slices, see `_from_all_groups`.

References:
  Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3 (a product with a weight split along its columns or rows);
  Xu et al., *GSPMD*, arXiv 2105.04663, section 3.5 (a product for which an operand is partitioned again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.ir.operations import ADDITION, SHAPE_ONLY
from jaxdist.mesh import GROUP
from jaxdist.placements.block import Node
from jaxdist.placements.cost import flops
from jaxdist.placements.describe import Factors
from jaxdist.placements.run import Cut, run_as_is
from jaxdist.placements.strategy import IN_PLACE, Move, Strategy, nbytes
from jaxdist.placements.values import PARTIAL, REPLICATED, Form, Partial, Placement, Split, form, is_wide, tile
from jaxdist.placements.walk import Walk, special


@special("dot_general", "gather", "scatter-add", "scatter_add")
def _product(walk: Walk, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    described = walk.factors(node)
    batch = [k for k, p in enumerate(ins) if isinstance(p, Split) and not p.stored]
    kept = [k for k, p in enumerate(ins) if isinstance(p, Split) and p.stored]
    if described is None or not batch or len(node.outs) > 1:
        return None
    splits = [p for p in ins if isinstance(p, Split)]
    examples = {described.operands[k][p.dim] for k in batch if isinstance(p := ins[k], Split)}
    if len(examples) > 1 or None in examples or any(isinstance(p, Partial) for p in ins):
        return None
    if any(jnp.issubdtype(walk.block.avals[o].dtype, jax.dtypes.extended) for o in node.outs):
        return None  # random keys, of which some are picked
    if any(p.whole or p.is_padded(walk.n) or not p.is_tile(walk.n) for p in splits):
        return None
    (example,) = examples
    assert example is not None
    if walk.infer.axis.name == GROUP:
        return None if kept else _from_all_groups(walk, node, ins, described, example)
    if len(kept) == 1:
        return _with_slices(walk, node, ins, described, kept[0], example)
    return _in_slices(walk, node, ins, described, example) if not kept else None


def _with_slices(
    walk: Walk, node: Node, ins: Sequence[Placement], described: Factors, kept: int, example: int
) -> Strategy | None:
    """The batch meets a weight of which each device has a slice."""
    weight = ins[kept]
    assert isinstance(weight, Split)
    (result,), cut = described.results, described.operands[kept][weight.dim]
    if cut is None or cut == example or example in described.operands[kept] or example not in result:
        return None
    out = walk.block.avals[node.outs[0]]
    back = tile(result.index(example), out.shape[result.index(example)], walk.n)
    kind = described.reduced.get(cut)
    if cut in result:  # each device: some columns of all rows
        made: Split | Partial = tile(result.index(cut), weight.size, walk.n)
    elif kind == "sum" and is_wide(out.dtype):  # each device: all columns of all rows, a summand
        made = PARTIAL
    else:
        return None
    takes = [form(weight.at(dims.index(cut))) if cut in dims else REPLICATED for dims in described.operands]
    moves = [(p, takes[k], aval) for k, p, aval in _of_batch(walk, node, ins)] + [(made, back, out)]
    if not _pays(walk, moves, weight, walk.block.avals[node.ins[kept]], lambda: _users(walk, node, node.ins[kept])):
        return None
    walk.placed.own.append(Move(node, walk.infer.move(made, back, out), out, stored=False, why=IN_PLACE))
    run = _ThenBack(Cut(described, cut, weight, kind), made, back)
    return Strategy(takes, [back], run, exchanges=True, instead=IN_PLACE)


def _in_slices(walk: Walk, node: Node, ins: Sequence[Placement], described: Factors, example: int) -> Strategy | None:
    """What is added up over the examples.

    If it is not wanted in slices, they are gathered: a sum that each device has is a sum in slices, and an all-gather.
    """
    (o,), (result,) = node.outs, described.results
    out, dim = walk.block.avals[o], walk.infer.marked(walk.block).get(o)
    gathered = dim is None and node.backward and walk.block.outermost and not _is_added_up_elsewhere(walk, o)
    dim = walk.infer.choose(out.shape) if gathered else dim
    if dim is None or described.reduced.get(example) != "sum" or (cut := result[dim]) is None:
        return None
    slices = walk.infer.shard(dim, out.shape[dim])
    takes = [form(slices.at(dims.index(cut))) if cut in dims else REPLICATED for dims in described.operands]
    if slices.is_padded(walk.n):
        return None
    moves = [(p, takes[k], aval) for k, p, aval in _of_batch(walk, node, ins)]
    if not _pays(walk, moves, slices, out, lambda: _terms(walk, node), most=1 if gathered else None):
        return None
    product = Cut(described, cut, slices, None)
    if not gathered:
        return Strategy(takes, [slices], product, instead=IN_PLACE)
    walk.placed.own.append(Move(node, "all-gather", out, stored=True, why=IN_PLACE))
    after = walk.next.get(o)
    turned = after.eqn.params["permutation"] if after and after.name == "transpose" else range(out.ndim)
    run = _ThenWhole(product, slices, tuple(turned))
    return Strategy(takes, [REPLICATED], run, exchanges=True, instead=IN_PLACE)


def _from_all_groups(
    walk: Walk, node: Node, ins: Sequence[Placement], described: Factors, example: int
) -> Strategy | None:
    """A gradient that is in slices within each group: the rows of all groups travel, and each group computes it, where
    slices would have to be added up. It takes more FLOPs, but nothing of the weight's size travels between groups."""
    (o,), parts = node.outs, walk.infer.mesh[-1].size
    out = walk.block.avals[o]
    if o not in walk.infer.last.marked(walk.block) or described.reduced.get(example) != "sum":
        return None
    rows = [(p, REPLICATED, aval) for _, p, aval in _of_batch(walk, node, ins)]
    size = sum(nbytes(aval) for *_, aval in rows)
    machine, link = walk.infer.machine, walk.infer.link
    instead = machine.seconds(flops(walk.block, node), 0, out.dtype) + _seconds(walk, rows)
    if size > nbytes(out) // parts or instead > link.seconds("all-reduce", nbytes(out)) / _terms(walk, node):
        return None
    return Strategy([REPLICATED] * len(ins), [REPLICATED], run_as_is, instead=IN_PLACE)


def _is_added_up_elsewhere(walk: Walk, o: int) -> bool:
    """Whether a sum is one over another axis too: then it is made over both at once."""
    after = walk.next.get(o)
    while after and after.name in _TO_A_SUM:
        after = walk.next.get(after.outs[0])
    return after is not None and after.name == "jaxdist_all_reduce"


def _users(walk: Walk, node: Node, i: int) -> int:
    """Of how many operations, this one among them, a weight would be gathered for once."""
    return sum(n.name == node.name and n.backward == node.backward for n in walk.block.nodes if i in n.ins)


_MANY = 1 << 30
_TO_A_SUM = ADDITION | SHAPE_ONLY | {"convert_element_type"}


def _terms(walk: Walk, own: Node) -> int:
    """Of how many cotangents, this one among them, the sum is that it is added to: they could be reduced as one.

    With those of other operations more than pays: a table's rows are few where its product with all words is large.
    """
    block, (i,) = walk.block, own.outs
    while block.uses[i] == 1 and i in walk.next and walk.next[i].name in _TO_A_SUM:
        (i,) = walk.next[i].outs
    count, todo = 0, [i]
    while todo:
        node = block.makers.get(todo.pop())
        if node is not None and node.name in _TO_A_SUM:
            todo += node.ins
        elif node is not None and (node is own or node.backward):
            count += 1 if node.name == own.name else _MANY
    return count


_Moved = tuple[Placement, Form, Any]
"""How a value comes, how it is needed, and its type."""


def _of_batch(walk: Walk, node: Node, ins: Sequence[Placement]) -> list[tuple[int, Split, Any]]:
    """The operands that are of the batch: which, how they come, and their types."""
    return [
        (k, p, walk.block.avals[i])
        for k, (p, i) in enumerate(zip(ins, node.ins, strict=True))
        if isinstance(p, Split) and not p.stored
    ]


def _pays(
    walk: Walk, moves: Sequence[_Moved], split: Split, aval: Any, sharing: Callable[[], int], most: int | None = None
) -> bool:
    """Whether values of the batch should travel in place of a weight.

    What each device has of them whole must be no more than its slice of the weight, so that it does not take the memory
    that the slices save.

    Args:
      walk: which places the block.
      moves: of values of the batch.
      split: of the weight, or of its gradient.
      aval: its type.
      sharing: counts the operations for which it would travel once. Asked last: it looks at all of the block.
      most: that may be so many; None: if it is worth it for each.
    """
    whole = sum(nbytes(aval) for p, to, aval in moves if not (isinstance(p, Split) and isinstance(to, Split)))
    taken, weight = _seconds(walk, moves), walk.infer.link.seconds("all-gather", nbytes(aval))
    if whole > nbytes(aval) // walk.n or taken > weight:
        return False
    count = sharing()
    return count <= most if most else taken <= weight / count


def _seconds(walk: Walk, moves: Sequence[_Moved]) -> float:
    """How long messages take that the operation waits for."""
    link = walk.infer.link
    return sum(walk.infer.sent(p, to, aval) / link.bandwidth + link.stall for p, to, aval in moves)


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


@dataclass(frozen=True)
class _ThenWhole:
    """A sum in slices, and all of these.

    Attributes:
      product: the operation on slices.
      slices: what it makes.
      turned: in what order of its dimensions it is taken next. It is gathered so: XLA makes a transpose a part of the
        product before it, and of what comes after a gather a slow loop.
    """

    product: Cut
    slices: Split
    turned: tuple[int, ...]

    def __call__(self, emitter: Any, node: Node, xs: list[Any]) -> Sequence[Any]:
        (x,) = self.product(emitter, node, xs)
        whole = emitter.gather(x.transpose(self.turned), self.turned.index(self.slices.dim), self.slices.size)
        return [whole.transpose(np.argsort(self.turned))]
