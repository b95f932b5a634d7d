"""The cost of a placed step on one device: FLOPs, seconds, and messages."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxdist import compat
from jaxdist.ir.interpreter import bodies
from jaxdist.ir.operations import CONTRACTION, is_elementwise
from jaxdist.machine import Machine
from jaxdist.placements.model.block import Block, Node, flatten
from jaxdist.placements.model.named_kernels import twin_of
from jaxdist.placements.model.strategy import Inference, Propagation, Strategy, itemsize
from jaxdist.placements.model.values import REPLICATED, Split, local_shape

# FLOPs for a matrix, divided by both dimensions and the smaller one (Golub and Van Loan, *Matrix Computations*).
_FACTORIZATION = {
    "cholesky": 1 / 3, "eig": 25, "eigh": 9, "geqrf": 2, "hessenberg": 10 / 3, "householder_product": 2, "lu": 2 / 3,
    "qr": 4, "schur": 25, "svd": 20, "triangular_solve": 1, "tridiagonal": 4 / 3,
}  # fmt: skip
# Operations that run a program unchanged on each device, and the parameter that holds it.
_KERNELS = {"pallas_call": "jaxpr", "custom_partitioning": "call", "shard_map": "jaxpr", "jaxdist_own_code": "body"}
# Of cuDNN's attention, the products of queries and keys of one shape, twice their FLOPs.
_ATTENTION = {f"dot_product_attention_{name}": 2 * products
              for kernel, products in (("fwd", 2), ("bwd", 5), ("fp8_fwd", 2), ("fp8_bwd", 5))
              for name in (kernel, f"{kernel}_wrapper")}  # fmt: skip
_PRODUCTS = {"ragged_dot_general", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper"}
_NOT_ENTRYWISE = {*CONTRACTION, *_FACTORIZATION, *_KERNELS, *_ATTENTION, *_PRODUCTS, "ffi_call"}


def cost(placed: Propagation, infer: Inference, batch_devices: int = 1, memory: bool = True) -> float:
    """Estimate a device's seconds for a placed step: computing, sending, and waiting for messages."""
    # Other axes divide the examples among `batch_devices`: each computes and sends its share of the activations, but
    # all that is sent of the state.
    link, total = infer.link, seconds(placed, infer.axis.machine, memory) / batch_devices
    for message, times in placed.sent():
        total += times * link.seconds(message.kind, message.bytes) / (1 if message.of_state else batch_devices)
        total += times * (link.stall if message.waited_for else link.latency)
    return total


def seconds(placed: Propagation, machine: Machine, memory: bool = True) -> float:
    """Estimate the seconds that a device computes, without communication."""
    total = 0.0
    for part, times in placed.blocks():
        for node, strategy in zip(part.block.nodes, part.strategies, strict=True):
            # Bodies are among `blocks`, and XLA fuses what makes a deferred value into the loops of its users.
            if strategy.bodies or strategy.make is not None:
                continue
            if memory not in strategy.seconds:
                strategy.seconds[memory] = seconds_of(part.block, node, strategy, machine, memory)
            total += times * strategy.seconds[memory]
    return total


def seconds_of(block: Block, node: Node, strategy: Strategy, machine: Machine, memory: bool = True) -> float:
    """Estimate a device's seconds for an operation: its products, its memory traffic."""
    is_entrywise = node.name not in _NOT_ENTRYWISE and twin_of(node) is None
    if is_entrywise and (not memory or _is_in_a_loop(block, node)):
        return 0.0
    cost, dtype = flops(block, node, strategy), block.avals[node.outs[0]].dtype if node.outs else np.dtype("float32")
    size = itemsize(dtype)
    if is_entrywise:  # results count, once per fused loop
        return machine.seconds(0, cost * size)
    touched = zip((*node.ins, *node.outs), (*strategy.in_forms, *strategy.out_placements), strict=True)
    entries = sum(math.prod(local_shape(block.avals[i].shape, p)) for i, p in touched)
    return machine.seconds(cost, entries * size if memory else 0, dtype)


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
    """Find a local minimum of `value`: for each group in turn, move to the cheapest neighbor, while that helps."""
    while True:
        start = on
        for group in groups:
            # Among equals `min` keeps the first, `on`: each move is a gain, so this ends.
            on = min(on, *near(on, group), key=value)
        if on == start:
            return on


def flops(block: Block, node: Node, strategy: Strategy) -> int:
    """Count a device's FLOPs: one per entry, but for contractions and factorizations."""
    in_forms, out_placements = strategy.in_forms, strategy.out_placements
    sizes = [math.prod(local_shape(block.avals[o].shape, p)) for o, p in zip(node.outs, out_placements, strict=True)]
    if node.name == "dot_general":
        (contracted, _), _ = node.eqn.params["dimension_numbers"]
        # Slices of the result come of whole contracted dimensions; else the contracted ones may be cut.
        placement = None if isinstance(out_placements[0], Split) else in_forms[0]
        shape = local_shape(block.avals[node.ins[0]].shape, placement)
        return 2 * sizes[0] * math.prod(shape[d] for d in contracted)
    if node.name == "conv_general_dilated":
        # An entry of the result takes the entries of the kernel that lead to its feature.
        kernel = local_shape(block.avals[node.ins[1]].shape, in_forms[1])
        out = node.eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * sizes[0] * math.prod(kernel) // max(kernel[out], 1)
    if node.name in _FACTORIZATION:
        shape = local_shape(block.avals[node.ins[0]].shape, in_forms[0])
        return round(_FACTORIZATION[node.name] * math.prod(shape) * min(shape[-2:]))
    placed = list(zip((*node.ins, *node.outs), (*in_forms, *out_placements), strict=True))
    is_whole = lambda p: isinstance(p, Split) and p.whole  # it is cut later, for free
    shapes = [local_shape(block.avals[i].shape, None if is_whole(p) else p) for i, p in placed]
    if (twin := twin_of(node)) is not None or node.name in _KERNELS:
        splits = [(p, block.avals[i].shape[p.dim]) for i, p in placed if isinstance(p, Split) and not is_whole(p)]
        # The program is the whole kernel's: a device's share of it is that of the value that is cut most.
        share = min((min(p.rows / length, 1) for p, length in splits if length), default=1)
        program = twin or compat.closed(node.eqn.params[_KERNELS[node.name]])
        return round(share * (1 if twin else _runs(node)) * flops_of(program))
    if node.name in _ATTENTION:
        # Each entry of the queries meets all positions of the keys, which are never split (`named_kernels`).
        return _ATTENTION[node.name] * math.prod(shapes[0]) * shapes[1][2 if node.eqn.params["layout"] else 1]
    if node.name in _PRODUCTS:
        return _of_loops(block, node, shapes)
    if node.name == "ffi_call":  # unknown: as for a product of its three largest arrays, each over two of three loops
        arrays = sorted(map(math.prod, shapes), reverse=True)
        return 2 * math.isqrt(math.prod(arrays[:3])) if len(arrays) > 2 else sum(sizes)
    dtypes = [block.avals[o].dtype for o in node.outs]
    return sum(n for n, t in zip(sizes, dtypes, strict=True) if not jax.numpy.issubdtype(t, jax.dtypes.extended))


def _of_loops(block: Block, node: Node, shapes: Sequence[tuple[int, ...]]) -> int:
    """Count the FLOPs of a product on arrays of these shapes, the operands and then the results."""
    if (described := block.factors(node)) is None:
        return 2 * math.prod(shapes[-1])
    lengths = {
        f: n for dims, shape in zip(described.arrays, shapes, strict=True) for f, n in zip(dims, shape, strict=True)
    }
    # What no factor names is contracted. A row is in one of the groups, which are a factor.
    inner = math.prod(n for f, n in zip(described.operands[0], shapes[0], strict=True) if f is None)
    groups = block.avals[node.ins[2]].shape[-1] if node.name == "ragged_dot_general" else 1
    return 2 * inner * math.prod(n for f, n in lengths.items() if f is not None) // max(groups, 1)


def _runs(node: Node) -> int:
    """Return how often a kernel's program runs: for each point of its grid."""
    grid = node.eqn.params["grid_mapping"].grid if node.name == "pallas_call" else ()
    return math.prod(n for n in grid if isinstance(n, int))


@functools.lru_cache(maxsize=256)
def flops_of(closed: ClosedJaxpr) -> int:
    """Count the FLOPs of a program that each device runs unchanged; of branches, only the longest counts."""
    block, total = flatten(closed), 0
    for node in block.nodes:
        inner = [flops_of(body.closed) for body in bodies(node.eqn)]
        as_is = Strategy([REPLICATED] * len(node.ins), [REPLICATED] * len(node.outs))
        once = max(inner) if node.name == "cond" else sum(inner) if inner else flops(block, node, as_is)
        total += node.trip_count * once
    return total
