"""The cost of a placed step on one device: FLOPs, seconds, and messages."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdist.ir.operations import CONTRACTION, FACTORISATION, is_elementwise
from jaxdist.machine import Machine
from jaxdist.placements.block import Block, Node
from jaxdist.placements.strategy import Placed, Strategy, nbytes
from jaxdist.placements.values import REPLICATED, Split, local_shape


def cost(placed: Placed, infer: Any, examples: int = 1, memory: bool = True) -> float:
    """Estimate a device's seconds for a placed step: computing, sending bytes, and stalling on
    messages that it waits for."""
    link, taken = infer.link, seconds(placed, infer.machine, memory) / examples
    for move, times in placed.moves:
        if not move.again:
            taken += times * link.seconds(move.kind, move.bytes) / (1 if move.stored else examples)
            taken += times * (link.stall if move.waited_for else link.latency)
    for one, times in placed.blocks():
        for node, strategy in zip(one.block.nodes, one.strategies, strict=True):
            if strategy.exchanges:  # counts as a sum of its results
                size = sum(nbytes(one.block.avals[o]) for o in node.outs)
                taken += times * (link.seconds("all-reduce", size) / examples + link.stall)
    return taken


def seconds(placed: Placed, machine: Machine, memory: bool = True) -> float:
    """Estimate the seconds that a device computes, without communication."""
    return sum(
        times * seconds_of(one.block, node, strategy, machine, memory)
        for one, times in placed.blocks()
        for node, strategy in zip(one.block.nodes, one.strategies, strict=True)
        if not strategy.bodies and strategy.make is None
    )


def seconds_of(block: Block, node: Node, strategy: Strategy, machine: Machine, memory: bool = True) -> float:
    """Estimate a device's seconds for an operation: its products, its memory traffic. Outside
    products and factorizations only results count, once per loop that XLA fuses."""
    cost, dtype = flops(block, node, strategy), block.avals[node.outs[0]].dtype if node.outs else np.dtype("float32")
    itemsize = 8 if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else dtype.itemsize
    if node.name not in CONTRACTION and node.name not in FACTORISATION:
        return 0.0 if not memory or _is_in_a_loop(block, node) else machine.seconds(0, cost * itemsize)
    touched = zip((*node.ins, *node.outs), (*strategy.takes, *strategy.gives), strict=True)
    entries = sum(math.prod(local_shape(block.avals[i].shape, p or REPLICATED)) for i, p in touched)
    return machine.seconds(cost, entries * itemsize if memory else 0, dtype)


def _is_in_a_loop(block: Block, node: Node) -> bool:
    """Check whether XLA fuses an operation into the loop of its only user."""
    if not is_elementwise(node.eqn.primitive) or block.uses[node.outs[0]] != 1:
        return False
    users = [block.nodes[k] for k in block.users.get(node.outs[0], ())]
    return any(is_elementwise(user.eqn.primitive) or user.name.startswith("reduce_") for user in users)


T = TypeVar("T")


def descend(
    on: frozenset[T],
    groups: Sequence[frozenset[T]],
    near: Callable[[frozenset[T], frozenset[T]], Sequence[frozenset[T]]],
    value: Callable[[frozenset[T]], float],
) -> frozenset[T]:
    """Find a local minimum of `value`: for each group in turn, move to the cheapest neighbor, while
    that helps."""
    while True:
        before = on
        for group in groups:
            on = min(on, *near(on, group), key=value)
        if on == before:
            return on


def flops(block: Block, node: Node, strategy: Strategy) -> int:
    """Count a device's FLOPs: one per entry, but for contractions and factorizations."""

    def size(i: int, p: object) -> int:
        shape = block.avals[i].shape
        return math.prod(p.shape(shape) if isinstance(p, Split) else shape)

    takes, gives = strategy.takes, strategy.gives
    if node.name == "dot_general":
        (contracted, _), _ = node.eqn.params["dimension_numbers"]
        p, shape = takes[0], block.avals[node.ins[0]].shape
        shape = p.shape(shape) if isinstance(p, Split) and not isinstance(gives[0], Split) else shape
        return 2 * size(node.outs[0], gives[0]) * math.prod(shape[d] for d in contracted)
    if node.name == "conv_general_dilated":
        p, kernel = takes[1], block.avals[node.ins[1]].shape
        kernel = p.shape(kernel) if isinstance(p, Split) else kernel
        out = node.eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * size(node.outs[0], gives[0]) * math.prod(kernel) // max(kernel[out], 1)
    if node.name in FACTORISATION:
        p, shape = takes[0], block.avals[node.ins[0]].shape
        shape = p.shape(shape) if isinstance(p, Split) else shape
        return round(FACTORISATION[node.name] * math.prod(shape) * min(shape[-2:]))
    numbers = [o for o in node.outs if not jax.numpy.issubdtype(block.avals[o].dtype, jax.dtypes.extended)]
    return sum(size(o, p) for o, p in zip(node.outs, gives, strict=True) if o in numbers)
