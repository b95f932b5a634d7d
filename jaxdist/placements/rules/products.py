"""Options: send the examples where a sharded weight is larger, or the heads of a sequence rather than all keys.

Reference: Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3 (a weight split along its columns or rows).
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxdist.mesh import GROUP, SEQUENCE
from jaxdist.placements.model.block import TO_A_SUM, Node
from jaxdist.placements.model.factors import Factors
from jaxdist.placements.model.strategy import IN_PLACE, Strategy, nbytes
from jaxdist.placements.model.values import REPLICATED, Aval, Partial, Placement, Split, form, tile
from jaxdist.placements.rules.context import RuleContext, alternative

# One name for `_forward_slices` and `_backward_slices`: they pay off together, since a weight that is not gathered for
# one product need not be for the other.
SEND_EXAMPLES = "send the examples"


@alternative("dot_general", "conv_general_dilated", "gather", "scatter-add")
def _product(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    described = ctx.block.factors(node)
    batch = [k for k, p in enumerate(ins) if isinstance(p, Split) and not p.of_state]
    sharded = [k for k, p in enumerate(ins) if isinstance(p, Split) and p.of_state]
    if described is None or not batch or len(node.outs) > 1:
        return None
    splits = [p for p in ins if isinstance(p, Split)]
    examples = {described.operands[k][p.dim] for k in batch if isinstance(p := ins[k], Split)}
    if len(examples) > 1 or None in examples or any(isinstance(p, Partial) for p in ins):
        return None
    if any(jnp.issubdtype(ctx.block.avals[o].dtype, jax.dtypes.extended) for o in node.outs):
        return None  # picks from random keys
    # Only slices that one collective makes of each other (`in_one_collective`): others would be gathered on the way.
    if ctx.infer.axis.name == GROUP or any(p.whole or p.is_padded(ctx.n) or not p.is_tile(ctx.n) for p in splits):
        return None
    (example,) = examples
    assert example is not None
    if len(sharded) == 1:
        return _forward_slices(ctx, node, ins, described, sharded[0], example)
    return _backward_slices(ctx, node, ins, described, example) if not sharded else None


def _forward_slices(
    ctx: RuleContext, node: Node, ins: Sequence[Placement], described: Factors, sharded: int, example: int
) -> Strategy | None:
    """Multiply the batch with a weight in slices: ``x[b, i] @ w[i, o]``, where each device has some columns of `w`.

    All devices take all of `x`, make some columns of the result for all examples, and exchange these for all columns
    of their own examples. If each has some rows of `w`, they make summands of all, which are scattered by example.
    """
    weight = ins[sharded]
    assert isinstance(weight, Split)
    (result,), cut = described.results, described.operands[sharded][weight.dim]
    if cut is None or cut == example or example in described.operands[sharded] or example not in result:
        return None
    out = ctx.block.avals[node.outs[0]]
    back = tile(result.index(example), out.shape[result.index(example)], ctx.n)
    strategy = ctx.cut(node, ins, described, cut, weight)  # some columns of all rows, or summands of all
    if strategy is None:
        return None
    summands = out if isinstance(strategy.out_placements[0], Partial) else None
    if not _fits(ctx, node, ins, strategy, ctx.block.avals[node.ins[sharded]], summands):
        return None
    return replace(strategy, why_sent=IN_PLACE, out_forms=[back], name=SEND_EXAMPLES)


def _backward_slices(
    ctx: RuleContext, node: Node, ins: Sequence[Placement], described: Factors, example: int
) -> Strategy | None:
    """Make slices of a sum over the examples: ``x[b, i].T @ d[b, o]``, for some `i` each, of all examples.

    A gradient that no mark wants in slices is gathered afterwards: an all-reduce is a sum in slices and a gather.
    """
    (o,), (result,) = node.outs, described.results
    out, wanted = ctx.block.avals[o], ctx.infer.slices_wanted(ctx.block).get(o)
    gathered = wanted is None and node.backward and not _is_added_up_elsewhere(ctx, o)
    dim = ctx.infer.shard_dim(out.shape) if gathered else wanted
    if dim is None or described.reduced.get(example) != "sum" or (cut := result[dim]) is None:
        return None
    slices = ctx.infer.shard(dim, out.shape[dim])
    strategy = ctx.cut(node, ins, described, cut, slices)
    if strategy is None or slices.is_padded(ctx.n) or not _fits(ctx, node, ins, strategy, out):
        return None
    out_forms = [REPLICATED] if gathered else ()
    return replace(strategy, out_placements=[slices], why_sent=IN_PLACE, out_forms=out_forms, name=SEND_EXAMPLES)


def _is_added_up_elsewhere(ctx: RuleContext, o: int) -> bool:
    """Check whether a sum also runs over a different axis: one reduction then covers both."""
    user = ctx.block.last_user.get(o)
    while user and user.name in TO_A_SUM:
        user = ctx.block.last_user.get(user.outs[0])
    return user is not None and user.name == "jaxdist_all_reduce"


def _fits(
    ctx: RuleContext, node: Node, ins: Sequence[Placement], strategy: Strategy, weight: Aval, result: Aval | None = None
) -> bool:
    """Check that batch values held whole are at most as large as a slice of the weight: they take the memory saved."""
    operands = zip(ins, strategy.in_forms, node.ins, strict=True)
    batch = [(in_form, ctx.block.avals[i]) for p, in_form, i in operands if isinstance(p, Split) and not p.of_state]
    whole = sum(nbytes(aval) for in_form, aval in batch if not isinstance(in_form, Split))
    return whole + (nbytes(result) if result else 0) <= nbytes(weight) // ctx.n


# --- attention over a sequence in slices
#
# To compare its queries with all keys, a device gathers keys and values. Or an all-to-all gives it
# some heads at all positions, and a second one returns the results. That sends less with more
# devices, and divides the products too: Jacobs et al., *DeepSpeed Ulysses*, arXiv 2309.14509.


@alternative("dot_general")
def _heads(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Multiply two values in slices, cut along a dimension that both and the result have."""
    p, q = ins
    described = ctx.block.factors(node)
    if ctx.infer.axis.name != SEQUENCE or described is None or not isinstance(p, Split) or not isinstance(q, Split):
        return None
    if any(split.whole or split.of_state or split.outer > 1 or split.is_padded(ctx.n) for split in (p, q)):
        return None
    (a, b), (result,) = described.operands, described.results
    sizes = dict(zip(result, ctx.block.shapes(node.outs)[0], strict=True))
    heads = [f for f in result if f in a and f in b and sizes[f] % ctx.n == 0]
    along = a[p.dim], b[q.dim]
    if not heads or None in along or along[0] == along[1]:
        return None
    # An operand that is split along heads already, as the scores are, stays so.
    factor = next((f for f in along if f in heads), heads[-1])
    assert factor is not None
    strategy = ctx.cut(node, ins, described, factor, tile(0, sizes[factor], ctx.n))
    back = _sequence_factor(ctx, node, described, (p, q), factor)
    out_forms = [form(tile(result.index(back), sizes[back], ctx.n))] if back is not None else ()
    return strategy and replace(strategy, out_forms=out_forms, name="send the heads")


def _sequence_factor(
    ctx: RuleContext, node: Node, described: Factors, ins: tuple[Split, Split], heads: int
) -> int | None:
    """Return the result's factor along one sequence, to cut the result along again; None if it has two or none.

    With everything split along the sequence, for queries, keys and values of ``[head, position, feature]``::

        scores[h, q, k] = queries[h, q, d], keys[h, k, d]    two, `q` and `k`: the scores stay split by heads
        out[h, q, d] = scores[h, q, k], values[h, k, d]      one, `q`: it is split along the sequence again

    Where it takes the wrong one, lengths being equal by chance, the result is right, and sent once more.
    """
    candidates = set[int | None]()
    for p, other, dims, shape in zip(ins, ins[::-1], described.operands, ctx.block.shapes(node.ins), strict=True):
        if dims[p.dim] != heads:
            candidates.add(dims[p.dim])
        else:  # this compares positions: take factors as long as the other operand's
            candidates.update(f for f, n in zip(dims, shape, strict=True) if f != heads and n == other.size)
    candidates.intersection_update(described.results[0])
    return candidates.pop() if len(candidates) == 1 else None
