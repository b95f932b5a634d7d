"""Attention over a sequence in slices: keys and values are gathered, or the devices change places for heads.

Each device has some places of the sequence. To compare its queries with all keys it gathers these, and the values; or
an all-to-all gives it all places of some of the heads, and another one brings what it makes of them back. That sends
less the more devices there are, and divides the products as well.

References:
  Jacobs et al., *DeepSpeed Ulysses*, arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxdist.mesh import SEQUENCE
from jaxdist.placements.block import Node
from jaxdist.placements.rules import Factors
from jaxdist.placements.run import Cut
from jaxdist.placements.strategy import Strategy
from jaxdist.placements.values import Placement, Split, form, tile
from jaxdist.placements.walk import Walk, offer

NAME = "heads travel"
"""The name of the option."""


@offer("dot_general")
def _heads(walk: Walk, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """A product of two values in slices, cut along a dimension that both have and the result as well."""
    p, q = ins
    described = walk.factors(node)
    if walk.infer.axis.name != SEQUENCE or described is None or not isinstance(p, Split) or not isinstance(q, Split):
        return None
    if any(one.whole or one.stored or one.outer > 1 or one.is_padded(walk.n) for one in (p, q)):
        return None
    (a, b), (result,) = described.operands, described.results
    sizes = dict(zip(result, walk.shapes(node.outs)[0], strict=True))
    heads = [f for f in result if f in a and f in b and sizes[f] % walk.n == 0]
    along = a[p.dim], b[q.dim]
    if not heads or None in along or along[0] == along[1]:
        return None
    factor = next((f for f in along if f in heads), heads[-1])
    assert factor is not None
    takes = [form(tile(dims.index(factor), sizes[factor], walk.n)) for dims in (a, b)]
    made = tile(result.index(factor), sizes[factor], walk.n)
    back = _places(walk, node, described, (p, q), factor)
    run = Cut(described, factor, tile(0, sizes[factor], walk.n), None)
    then = [form(tile(result.index(back), sizes[back], walk.n))] if back is not None else ()
    return Strategy(takes, [made], run, then=then, name=NAME)


def _places(walk: Walk, node: Node, described: Factors, ins: tuple[Split, Split], heads: int) -> int | None:
    """The factor along which the result has the places of one sequence; None: it has those of two, or of none."""
    found = set[int | None]()
    for p, other, dims, shape in zip(ins, ins[::-1], described.operands, walk.shapes(node.ins), strict=True):
        if dims[p.dim] != heads:
            found.add(dims[p.dim])
        else:  # it is places compared with places: those that are as many as the other operand's
            found.update(f for f, n in zip(dims, shape, strict=True) if f != heads and n == other.size)
    found.intersection_update(described.results[0])
    return found.pop() if len(found) == 1 else None
