"""Which summands may travel compressed: gradients, and nothing else.

A gradient is what differentiation made by adding up over the batch, an array, and leads to the next state alone: from
a statistic of the batch (BatchNorm's, a normaliser's) values follow that are split over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from jaxdist.placements.strategy import Placed
from jaxdist.placements.values import Partial, Split


def compressible(placed: Placed, sources: Sequence[int | None]) -> dict[int, frozenset[int]]:
    """By the id of a placed block: its values that may travel compressed."""
    found: dict[int, frozenset[int]] = {}
    _walk(placed, [source is not None for source in sources], found)
    return found


def _walk(placed: Placed, ends: Sequence[bool], found: dict[int, frozenset[int]]) -> list[tuple[bool, bool]]:
    """For each input: whether it leads to a next state, and whether a value of the batch follows from it."""
    block = placed.block
    leads, follows = [False] * len(block.avals), [False] * len(block.avals)
    for i, ends_well in zip(block.outputs, ends, strict=True):
        leads[i] |= ends_well
    for node, strategy in zip(reversed(block.nodes), reversed(placed.strategies), strict=True):
        lead = any(leads[o] for o in node.outs)
        batch = any(
            follows[o] or (isinstance(p, Split) and not p.stored)
            for o, p in zip(node.outs, strategy.gives, strict=True)
        )
        for body in strategy.bodies:
            ends = [leads[o] and not follows[o] for o in node.outs]
            inner = _walk(
                body, ends if len(ends) == len(body.block.outputs) else [False] * len(body.block.outputs), found
            )
            batch = batch or any(b for (_, b), p in zip(inner, body.ins, strict=True) if not isinstance(p, Split))
        for i in node.ins:
            leads[i] |= lead
            follows[i] |= batch
    good = frozenset(
        o
        for node, strategy in zip(block.nodes, placed.strategies, strict=True)
        for o, p in zip(node.outs, strategy.gives, strict=True)
        if isinstance(p, Partial) and p.gradient and leads[o] and not follows[o]
        and block.avals[o].ndim and jnp.issubdtype(block.avals[o].dtype, jnp.floating)
    )  # fmt: skip
    found[id(placed)] = good & found.get(id(placed), good)
    return [(leads[i], follows[i]) for i in block.inputs]
