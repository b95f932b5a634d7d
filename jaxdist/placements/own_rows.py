"""Indices that are an example's own place, as in ``logits[jnp.arange(B), labels]``: each device has the rows they name.

Such a dimension of the operand runs along the batch of the indices, as a batching dimension of the gather would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxdist.placements.block import Node
from jaxdist.placements.rules import FACTORS
from jaxdist.placements.run import Cut
from jaxdist.placements.strategy import Strategy
from jaxdist.placements.summands import is_zero
from jaxdist.placements.values import Placement, Split
from jaxdist.placements.walk import Walk, special


@special("gather", *(name for name in FACTORS if name.startswith("scatter")))
def _own_rows(walk: Walk, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    if not any(isinstance(p, Split) for p in ins):
        return None
    numbers = node.eqn.params["dimension_numbers"]
    if node.name == "gather":
        single, mapped = numbers.collapsed_slice_dims, numbers.start_index_map
    else:
        single, mapped = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    described, shapes, operand = walk.factors(node), walk.shapes(node.ins), ins[0]
    assert described is not None
    for column, d in enumerate(mapped):
        if d not in single or (isinstance(operand, Split) and operand.dim != d):
            continue
        row = _place(walk, node.ins[1], column)
        if row is None or shapes[1][row] != shapes[0][d]:
            continue
        factor = described.operands[1][row]
        if factor is None:  # of a scatter that is not added up: its updates have one too
            factor = 1 + max((f for dims in described.operands for f in dims if f is not None), default=-1)
        if factor in described.operands[0]:  # the rows run along another dimension of the operand already
            continue
        held = _with(described.operands[0], d, factor)
        indices = _with(described.operands[1], row, factor)
        others = list(described.operands[2:])
        results = described.results
        if node.name != "gather":
            batch = [k for k in range(len(shapes[2])) if k not in numbers.update_window_dims]
            others = [_with(others[0], batch[row], factor)]
            results = (held,)
        reduced = {f: kind for f, kind in described.reduced.items() if f != factor}
        described = replace(described, operands=(held, indices, *others), results=results, reduced=reduced)
        strategy = walk.by_factors(node, ins, described)
        if strategy is not None and isinstance(strategy.run, Cut) and strategy.run.factor == factor:
            return replace(strategy, run=_OwnRows(strategy.run, row, column))
        return None
    return None


def _with(dims: tuple[int | None, ...], at: int, factor: int) -> tuple[int | None, ...]:
    return (*dims[:at], factor, *dims[at + 1 :])


@dataclass(frozen=True)
class _OwnRows:
    """A gather or scatter of rows that the device has: one column of the indices counts these instead."""

    cut: Cut
    row: int
    column: int

    def __call__(self, emitter: Any, node: Node, xs: list[Any]) -> Sequence[Any]:
        indices = jnp.asarray(xs[1])
        own = lax.broadcasted_iota(indices.dtype, indices.shape, self.row)
        column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
        return self.cut(emitter, node, [xs[0], jnp.where(column == self.column, own, indices), *xs[2:]])


def _place(walk: Walk, i: int, column: int) -> int | None:
    """The dimension of which one column of the indices is the entry's own place, if there is one."""
    node, last = walk.block.makers.get(i), walk.block.avals[i].ndim - 1
    if node is not None and node.name == "concatenate" and node.eqn.params["dimension"] == last:
        start = 0
        for operand in node.ins:
            width = walk.block.avals[operand].shape[last]
            if start <= column < start + width:
                return _counts(walk, operand) if width == 1 else None
            start += width
    return _counts(walk, i) if walk.block.avals[i].shape[last] == 1 else None


def _counts(walk: Walk, i: int) -> int | None:
    """The dimension along which each entry of a value is its own index, if there is one."""
    node = walk.block.makers.get(i)
    if node is None:
        return None
    params, new = node.eqn.params, walk.block.avals[i].shape
    if node.name == "iota":
        return params["dimension"]
    if node.name == "convert_element_type":
        return _counts(walk, node.ins[0])
    if node.name == "select_n" and len(node.ins) == 3:  # counted from the end if it is below zero, which it is not
        below = walk.block.makers.get(node.ins[0])
        if below is None or below.name != "lt" or below.ins[0] != node.ins[1] or not is_zero(walk.at[below.ins[1]]):
            return None
        return _counts(walk, node.ins[1])
    if node.name in ("broadcast_in_dim", "reshape") and len(node.ins) == 1:
        d, old = _counts(walk, node.ins[0]), walk.block.avals[node.ins[0]].shape
        if d is None:
            return None
        if node.name == "broadcast_in_dim":
            to = int(params["broadcast_dimensions"][d])
            return to if new[to] == old[d] else None
        longer = [k for k, n in enumerate(new) if n != 1]
        return longer[0] if len(longer) == 1 and new[longer[0]] == old[d] else None
    return None
