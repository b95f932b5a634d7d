"""Operations on summands: the sum of results must be the result for the sum, for every input, infinite ones too."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxdist.ir.operations import ACROSS, ADDITION, CONTRACTION, LINEAR
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.strategy import Strategy
from jaxdist.placements.model.values import REPLICATED, Deferred, Number, Partial, Placement, Replicated, Split, form
from jaxdist.placements.rules.run import run_wide

# Summands may be larger than their sum, and must not overflow where it does not: a factor may take 8 bits of the range.
_LARGE = 2**8


def _is_added_again(block: Block, node: Node) -> bool:
    """Check whether a cotangent that is added up here is next added to others."""
    following = block.last_user.get(node.outs[0])
    if following is None or block.uses[node.outs[0]] != 1:
        return False
    # A weight with three uses has two additions in a row: left alone, each would add up its operands, and send twice.
    return node.backward and node.name in ADDITION and following.name in ADDITION


# Linear in the first operand, or in either, for any value of the other.
_IN_THE_FIRST, _IN_EITHER = LINEAR | {"cumsum", "fft"}, ADDITION | CONTRACTION | {"mul", "sub"}


def passes(block: Block, node: Node, i: int, ins: Sequence[Placement]) -> bool:
    """Check whether an operation may take a value as summands if that sends less: each result is a sum, too.

    Other operands must be the same on all devices. Where they are infinite, or 0 below a gradient, neither the result
    nor the sum of results is finite, but one may be NaN where the other is infinite. In 16 bits, summands could
    overflow where the sum does not.
    """
    others = [p for o, p in zip(node.ins, ins, strict=True) if o != i]
    if len(node.outs) != 1 or len(others) + 1 < len(ins):
        return False
    if any(isinstance(p, Split) and not p.of_state for p in others):
        return False
    for dtype in (block.avals[i].dtype, block.avals[node.outs[0]].dtype):
        if not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize < 4:
            return False
    k = node.ins.index(i)
    if node.name == "scatter-add":
        # Onto zeros only: anything else each device would add once.
        return k == 2 and is_zero(ins[0])
    if node.name == "pad":
        return k == 0 and is_zero(ins[1])
    if node.name == "div":  # by 0, summands of both signs make NaN, as only a gradient may
        return k == 0 and (node.backward or bool(_known(ins[1])))
    return node.name in _IN_EITHER or (k == 0 and node.name in _IN_THE_FIRST)


# Operations that add up their operands, or put them next to each other: which operands these are, by `slice`.
_OF_TERMS = {
    "add": slice(None), "sub": slice(None), "add_any": slice(None), "concatenate": slice(None),
    "dynamic_update_slice": slice(0, 2), "select_n": slice(1, None),
}  # fmt: skip


def _terms(node: Node) -> range:
    """Return the operands of an operation that are terms of its result; none of most operations."""
    return range(len(node.ins))[_OF_TERMS.get(node.name, slice(0))]


def linear(
    block: Block, may_stay_partial: frozenset[int], added_later: frozenset[int], node: Node, ins: Sequence[Placement]
) -> Strategy | None:
    """Apply the operation to summands if the sum of the results is the result for the sum."""
    summands = [p for p in ins if isinstance(p, Partial)]
    unreduced_axes = summands[0].unreduced_axes
    if len(node.outs) != 1 or any(p.unreduced_axes != unreduced_axes for p in summands):
        return None
    gradient, added = all(p.gradient for p in summands), any(p.made for p in summands)
    if node.name == "jaxdist_all_reduce":  # over a different axis: one reduction over both
        unreduced_axes = tuple(dict.fromkeys((*unreduced_axes, *node.eqn.params["axes"])))
        return Strategy([form(summands[0])], [Partial(gradient, added, unreduced_axes)], lambda device, node, xs: xs)
    if not _is_linear(block, may_stay_partial, node, ins) and not _is_added_later(block, added_later, node, ins):
        return None
    if unreduced_axes and not _others_agree(node, ins):
        return None
    terms = _terms(node)
    # A term added to a gradient must not lose digits on the wire for it.
    gradient = gradient and all(isinstance(ins[k], Partial) or is_zero(ins[k]) for k in terms)
    summand = Partial(unreduced_axes=unreduced_axes)
    in_forms = [summand if isinstance(p, Partial) or k in terms else REPLICATED for k, p in enumerate(ins)]
    return Strategy(in_forms, [Partial(gradient, added, unreduced_axes)], run_wide)


def _is_linear(block: Block, may_stay_partial: frozenset[int], node: Node, ins: Sequence[Placement]) -> bool:
    """Check whether the sum of the results is the result for the sum, for any values, and no larger to send."""
    avals, out = [block.avals[i] for i in node.ins], block.avals[node.outs[0]]
    partial = [isinstance(p, Partial) for p in ins]
    # Where the result is larger than the summand (a broadcast), to add up first sends less.
    is_small = out.size <= max(a.size for a, is_summand in zip(avals, partial, strict=True) if is_summand)
    match node.name:
        case "convert_element_type":
            a, b = avals[0].dtype, out.dtype
            # One device wraps a sum of integers before it widens it (uint8: 96, not 608); a narrower float rounds each
            # summand.
            return _is_plain(a) and _is_plain(b) and jnp.promote_types(a, b) == b
        case "mul":
            return sum(partial) == 1 and _scales(ins[1 - partial.index(True)], out.dtype)
        case "div":
            return partial[0] and not partial[1] and _scales(ins[1], out.dtype, inverse=True)
        case "scatter-add":
            return is_small and partial == [False, False, True] and passes(block, node, node.ins[2], ins)
        case name if name in _OF_TERMS:
            terms = _terms(node)
            others_are_whole = not any(is_summand for k, is_summand in enumerate(partial) if k not in terms)
            return others_are_whole and _stay_summands(block, may_stay_partial, node, [ins[k] for k in terms])
        case name:
            return name in LINEAR | ACROSS and is_small and not any(partial[1:])  # a start index is no summand


def _is_added_later(block: Block, added_later: frozenset[int], node: Node, ins: Sequence[Placement]) -> bool:
    """Check whether the search wants the one summand added up after this operation, to try what that costs."""
    summands = [i for i, p in zip(node.ins, ins, strict=True) if isinstance(p, Partial)]
    return len(summands) == 1 and summands[0] in added_later and passes(block, node, summands[0], ins)


def _others_agree(node: Node, ins: Sequence[Placement]) -> bool:
    """Check that devices along unreduced axes, whose values are summands too, have the same other operands."""
    others = [p for p in ins if not isinstance(p, Partial)]
    # An operand that the program does not know may differ between them: a position, a slice, a mask.
    if node.name in ACROSS or any(_known(p) is None for p in others):
        return False
    # Each of them would count a whole term.
    return node.name not in _OF_TERMS or all(map(is_zero, others))


def _stay_summands(block: Block, may_stay_partial: frozenset[int], node: Node, terms: Sequence[Placement]) -> bool:
    """Check whether terms stay summands: all are, or a loop or the next addition of a gradient adds them up anyway."""
    if all(isinstance(p, Partial) or is_zero(p) for p in terms):
        return True
    splits = [p for p in terms if isinstance(p, Split) and not p.whole]
    # A loop adds up over its iterations: a whole term counts on one device, a slice is put among zeros.
    if node.outs[0] in may_stay_partial and not any(p.of_state or p.outer > 1 for p in splits):
        return True
    return not splits and _is_added_again(block, node)


def _is_plain(dtype: np.dtype) -> bool:
    """Check whether floats of a dtype widen without loss, even if a sum has overflowed."""
    return jnp.issubdtype(dtype, jnp.floating) and (jnp.dtype(dtype).itemsize > 2 or dtype == jnp.bfloat16)


def _known(p: Placement) -> Number | None:
    """Return the value of each entry if the program says so, else None."""
    return p.const if isinstance(p, (Replicated, Deferred)) else None


def is_zero(p: Placement) -> bool:
    """Check whether the program says that each entry is 0 (-0.0 too)."""
    return (number := _known(p)) is not None and bool(number == 0)


def _scales(p: Placement, dtype: np.dtype, inverse: bool = False) -> bool:
    """Check whether a factor may scale each summand: it is known, and makes none overflow."""
    # Integers round each summand in a division, 44 for 45. An unknown factor may be infinite, and ``0 * inf`` is NaN.
    if (number := _known(p)) is None or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    if jnp.dtype(dtype).itemsize < 4 and dtype != jnp.bfloat16:  # the sum may have overflowed before
        return False
    # Divided by 0, summands of both signs become inf and -inf, and their sum NaN.
    size = abs(number)
    return bool(np.isfinite(size) and (size >= 1 / _LARGE if inverse else size <= _LARGE))
