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

_LARGE = 2**8  # summands may be larger than their sum, and must not overflow where it does not


def _goes_on(block: Block, node: Node) -> bool:
    """Check whether a cotangent that is added up here is next added to others."""
    following = block.next.get(node.outs[0])
    if following is None or block.uses[node.outs[0]] != 1:
        return False
    return node.backward and node.name in ADDITION and following.name in ADDITION


# Linear in the first operand, or in either, whatever the other is.
_IN_THE_FIRST, _IN_EITHER = LINEAR | {"cumsum", "div", "fft"}, ADDITION | CONTRACTION | {"mul", "sub"}


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
        return k == 2 and is_zero(ins[0])
    if node.name == "pad":
        return k == 0 and is_zero(ins[1])
    return node.name in _IN_EITHER or (k == 0 and node.name in _IN_THE_FIRST)


def linear(
    block: Block, may_stay_partial: frozenset[int], later: frozenset[int], node: Node, ins: Sequence[Placement]
) -> Strategy | None:
    """Apply the operation to summands if the sum of the results is the result for the sum."""
    name, avals = node.name, [block.avals[i] for i in node.ins]
    if len(node.outs) != 1:
        return None
    out = block.avals[node.outs[0]]
    partial = [isinstance(p, Partial) for p in ins]
    size = max(a.size for a, s in zip(avals, partial, strict=True) if s)
    summands = [p for p in ins if isinstance(p, Partial)]
    gradient, added = all(p.gradient for p in summands), any(p.made for p in summands)
    unreduced_axes = summands[0].unreduced_axes
    if any(p.unreduced_axes != unreduced_axes for p in summands):
        return None
    if name == "jaxdist_all_reduce":  # over a different axis: one reduction over both
        unreduced_axes = tuple(dict.fromkeys((*unreduced_axes, *node.eqn.params["axes"])))
        return Strategy([form(summands[0])], [Partial(gradient, added, unreduced_axes)], lambda device, node, xs: xs)
    in_forms: list[Form] = [Partial(unreduced_axes=unreduced_axes) if s else REPLICATED for s in partial]
    ok = False
    if name in LINEAR or name in ACROSS:
        ok = out.size <= size and not any(partial[1:])  # not in where a slice starts
    elif name == "convert_element_type":
        a, b = avals[0].dtype, out.dtype
        ok = _is_plain(a) and _is_plain(b) and jnp.promote_types(a, b) == b
    elif name in ("add", "sub", "add_any", "concatenate", "dynamic_update_slice", "select_n"):
        terms = range(1 if name == "select_n" else 0, 2 if name == "dynamic_update_slice" else len(ins))
        every = all(partial[k] or is_zero(ins[k]) for k in terms)
        splits = [p for p in (ins[k] for k in terms) if isinstance(p, Split) and not p.whole]
        in_a_loop = node.outs[0] in may_stay_partial and not any(p.of_state or p.outer > 1 for p in splits)
        ok = every or in_a_loop or (not splits and _goes_on(block, node))
        ok = ok and not any(partial[k] for k in range(len(ins)) if k not in terms)
        in_forms = [Partial(unreduced_axes=unreduced_axes) if k in terms else REPLICATED for k in range(len(ins))]
        gradient = gradient and every  # a term added to a gradient must not lose digits on the wire for it
    elif name == "mul":
        other = ins[1 - partial.index(True)]
        ok = sum(partial) == 1 and _scales(other, out.dtype)
    elif name == "div":
        ok = partial[0] and not partial[1] and _scales(ins[1], out.dtype, inverse=True)
    elif name == "scatter-add":
        ok = out.size <= size and partial == [False, False, True] and passes(block, node, node.ins[2], ins)
    if not ok and sum(partial) == 1 and (i := node.ins[partial.index(True)]) in later:
        ok = passes(block, node, i, ins)
    if unreduced_axes:  # other operands may differ across those axes' devices: a position, a slice, a mask
        ok = ok and name not in ACROSS and all(s or _known(p) is not None for s, p in zip(partial, ins, strict=True))
    if not ok:
        return None
    return Strategy(in_forms, [Partial(gradient, added, unreduced_axes)], run_wide)


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
    if (number := _known(p)) is None or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    if jnp.dtype(dtype).itemsize < 4 and dtype != jnp.bfloat16:  # the sum may have overflowed before
        return False
    size = abs(number)
    return bool(np.isfinite(size) and (size >= 1 / _LARGE if inverse else size <= _LARGE))
