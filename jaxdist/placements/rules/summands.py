"""Operations on summands: the sum of results must be the result for the sum, for every input, infinite ones too."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxdist.ir.operations import ACROSS, ADDITION, CONTRACTION, LINEAR
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.strategy import Strategy
from jaxdist.placements.model.values import (
    REPLICATED,
    Deferred,
    Form,
    Number,
    Partial,
    Placement,
    Replicated,
    Split,
    form,
)
from jaxdist.placements.rules.run import run_wide

# Summands may be larger than their sum, and must not overflow where it does not: a factor may take 8 bits of the range.
_LARGE = 2**8


def _goes_on(block: Block, node: Node) -> bool:
    """Check whether a cotangent that is added up here is next added to others."""
    following = block.next.get(node.outs[0])
    if following is None or block.uses[node.outs[0]] != 1:
        return False
    # A weight with three uses has two additions in a row: left alone, each would add up its operands, and send twice.
    return node.backward and node.name in ADDITION and following.name in ADDITION


# Linear in the first operand, or in either, for any value of the other.
_IN_THE_FIRST, _IN_EITHER = LINEAR | {"cumsum", "fft"}, ADDITION | CONTRACTION | {"mul", "sub"}


def passes(block: Block, node: Node, i: int, ins: Sequence[Placement]) -> bool:
    """Check whether an operation may take a value as summands if that sends less: each result is a sum, too.

    Other operands must be the same on all devices. Where they are infinite, neither the result nor the sum of results
    is finite, but one may be NaN where the other is infinite. In 16 bits, summands could overflow where the sum does
    not.
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
    if node.name == "div":  # by 0, summands of both signs become inf and -inf, and their sum NaN
        return k == 0 and _is_never_zero(block, node.ins[1])
    return node.name in _IN_EITHER or (k == 0 and node.name in _IN_THE_FIRST)


# Operations that put entries of so many operands, the first ones, next to each other.
_PUT_TOGETHER = {"broadcast_in_dim": 1, "dynamic_update_slice": 2}
# Operations that add up their operands, or put them next to each other: which operands these are, by `slice`.
_OF_TERMS = {
    "add": slice(None), "sub": slice(None), "add_any": slice(None), "concatenate": slice(None),
    "dynamic_update_slice": slice(0, 2), "select_n": slice(1, None),
}  # fmt: skip


def linear(
    block: Block, may_stay_partial: frozenset[int], later: frozenset[int], node: Node, ins: Sequence[Placement]
) -> Strategy | None:
    """Apply the operation to summands if the sum of the results is the result for the sum."""
    avals, summands = [block.avals[i] for i in node.ins], [p for p in ins if isinstance(p, Partial)]
    unreduced_axes = summands[0].unreduced_axes
    if len(node.outs) != 1 or any(p.unreduced_axes != unreduced_axes for p in summands):
        return None
    partial, out = [isinstance(p, Partial) for p in ins], block.avals[node.outs[0]]
    gradient, added = all(p.gradient for p in summands), any(p.made for p in summands)
    if node.name == "jaxdist_all_reduce":  # over a different axis: one reduction over both
        unreduced_axes = tuple(dict.fromkeys((*unreduced_axes, *node.eqn.params["axes"])))
        return Strategy([form(summands[0])], [Partial(gradient, added, unreduced_axes)], lambda device, node, xs: xs)
    takes_summand = partial
    # Where the result is larger than the summand (a broadcast), to add up first sends less.
    size = max(a.size for a, is_summand in zip(avals, partial, strict=True) if is_summand)
    match node.name:
        case "convert_element_type":
            a, b = avals[0].dtype, out.dtype
            # One device wraps a sum of integers before it widens it (uint8: 96, not 608); a narrower float rounds each
            # summand.
            ok = _is_plain(a) and _is_plain(b) and jnp.promote_types(a, b) == b
        case "mul":
            ok = sum(partial) == 1 and _scales(ins[1 - partial.index(True)], out.dtype)
        case "div":
            ok = partial[0] and not partial[1] and _scales(ins[1], out.dtype, inverse=True)
        case "scatter-add":
            ok = out.size <= size and partial == [False, False, True] and passes(block, node, node.ins[2], ins)
        case name if name in _OF_TERMS:
            terms = range(len(ins))[_OF_TERMS[name]]
            ok = _are_added_later(block, may_stay_partial, node, [ins[k] for k in terms])
            ok = ok and not any(is_summand for k, is_summand in enumerate(partial) if k not in terms)
            takes_summand = [k in terms for k in range(len(ins))]
            # A term added to a gradient must not lose digits on the wire for it.
            gradient = gradient and all(partial[k] or is_zero(ins[k]) for k in terms)
        case name:
            ok = name in LINEAR | ACROSS and out.size <= size and not any(partial[1:])  # a start index is no summand
    if not ok and sum(partial) == 1 and (i := node.ins[partial.index(True)]) in later:
        ok = passes(block, node, i, ins)  # the search tries the cost of adding up later
    if unreduced_axes:  # other operands may differ across those axes' devices: a position, a slice, a mask
        known = all(is_summand or _known(p) is not None for is_summand, p in zip(partial, ins, strict=True))
        # Each device along those axes would count a whole term.
        added_whole = any(not is_summand and not is_zero(p) for is_summand, p in zip(partial, ins, strict=True))
        ok = ok and node.name not in ACROSS and known and not (added_whole and node.name in _OF_TERMS)
    if not ok:
        return None
    in_forms: list[Form] = [Partial(unreduced_axes=unreduced_axes) if takes else REPLICATED for takes in takes_summand]
    return Strategy(in_forms, [Partial(gradient, added, unreduced_axes)], run_wide)


def _are_added_later(block: Block, may_stay_partial: frozenset[int], node: Node, terms: Sequence[Placement]) -> bool:
    """Check whether terms stay summands: all are, or a loop or the next addition of a gradient adds them up anyway."""
    if all(isinstance(p, Partial) or is_zero(p) for p in terms):
        return True
    splits = [p for p in terms if isinstance(p, Split) and not p.whole]
    # A loop adds up over its iterations: a whole term counts on one device, a slice is put among zeros.
    if node.outs[0] in may_stay_partial and not any(p.of_state or p.outer > 1 for p in splits):
        return True
    return not splits and _goes_on(block, node)


def _is_plain(dtype: np.dtype) -> bool:
    """Check whether floats of a dtype widen without loss, even if a sum has overflowed."""
    return jnp.issubdtype(dtype, jnp.floating) and (jnp.dtype(dtype).itemsize > 2 or dtype == jnp.bfloat16)


def _known(p: Placement) -> Number | None:
    """Return the value of each entry if the program says so, else None."""
    return p.const if isinstance(p, (Replicated, Deferred)) else None


def _is_never_zero(block: Block, i: int) -> bool:
    """Check whether a value is put together of numbers other than 0, like the divisor in the gradient of `rfft`."""
    todo = [i]
    for k in todo:  # the list grows by what a value is made of
        number, maker = block.numbers.get(k), block.makers.get(k)
        parts = _PUT_TOGETHER.get(maker.name, 0) if maker else 0
        if not (parts if number is None else number):
            return False
        todo += maker.ins[:parts] if maker else ()
    return True


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
