"""Find the summands that may be sent compressed: gradients, and nothing else.

A gradient is an array that differentiation added up over the batch, and leads to the next state alone. A statistic of
the batch (BatchNorm's, a normalizer's) also leads to values split over it.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxdist.placements.model.strategy import Propagation
from jaxdist.placements.model.values import Partial, Split


def compressible(placed: Propagation, sources: Sequence[int | None]) -> dict[int, frozenset[int]]:
    """Return the values of each placed block (by its id) that may be sent compressed."""
    compressible_values: dict[int, frozenset[int]] = {}
    _walk(placed, [source is not None for source in sources], compressible_values)
    return compressible_values


def _walk(
    placed: Propagation, ends: Sequence[bool], compressible_values: dict[int, frozenset[int]]
) -> list[tuple[bool, bool]]:
    """Return for each input: does it lead to a next state, does a batch value depend on it."""
    block = placed.block
    leads, follows = [False] * len(block.avals), [False] * len(block.avals)
    for i, ends_well in zip(block.outputs, ends, strict=True):
        leads[i] |= ends_well
    for node, strategy in zip(reversed(block.nodes), reversed(placed.strategies), strict=True):
        lead = any(leads[o] for o in node.outs)
        results = zip(node.outs, strategy.out_placements, strict=True)
        batch = any(follows[o] or (isinstance(p, Split) and not p.of_state) for o, p in results)
        for body in strategy.bodies:
            count = len(body.block.outputs)  # a loop's condition makes none of the results
            ends = [leads[o] and not follows[o] for o in node.outs] if count == len(node.outs) else [False] * count
            inner = _walk(body, ends, compressible_values)
            batch = batch or any(b for (_, b), p in zip(inner, body.in_forms, strict=True) if not isinstance(p, Split))
        for i in node.ins:
            leads[i] |= lead
            follows[i] |= batch
    good = frozenset(
        o
        for node, strategy in zip(block.nodes, placed.strategies, strict=True)
        for o, p in zip(node.outs, strategy.out_placements, strict=True)
        if isinstance(p, Partial) and p.gradient and leads[o] and not follows[o]
        and block.avals[o].ndim and jnp.issubdtype(block.avals[o].dtype, jnp.floating)
    )  # fmt: skip
    # Two loops with one body share its propagation: what both allow.
    compressible_values[id(placed)] = good & compressible_values.get(id(placed), good)
    return [(leads[i], follows[i]) for i in block.inputs]
