"""Which part of a step's result is the next value of which argument: by structure and types, and by what follows from
what.

A leaf of the result *carries* a leaf of the arguments if it is that leaf, changed by additions, selections and factors:
``w - lr * grad`` carries `w`, and so does a moving average, but a loss carries nothing that it is computed from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.errors import StepError
from jaxdist.ir.control_flow import CHECKPOINT, Scan, While, branches, checkpointed
from jaxdist.ir.operations import CARRIES
from jaxdist.placements.block import Block, Node
from jaxdist.placements.infer import Infer

Flow = tuple[int, int]
"""Of a value: the inputs on which it depends, and those that it carries, as sets of bits."""


def flows(infer: Infer, block: Block) -> list[Flow]:
    """For each output of a step the inputs on which it depends, and those that it carries."""
    return _flow(infer, block, [(1 << i, 1 << i) for i in range(len(block.inputs))])


def _flow(infer: Infer, block: Block, inputs: Sequence[Flow]) -> list[Flow]:
    at: list[Flow] = [(0, 0)] * len(block.avals)
    scalars = set(block.known)
    for i, flow in zip(block.inputs, inputs, strict=True):
        at[i] = flow
    for node in block.nodes:
        args = [at[i] for i in node.ins]
        every = 0
        for deps, _ in args:
            every |= deps
        carried = _carried(infer, block, node, args, scalars)
        if node.name == "broadcast_in_dim" and (not block.avals[node.ins[0]].shape or node.ins[0] in scalars):
            scalars.add(node.outs[0])
        for o, carry in zip(node.outs, carried, strict=True):
            at[o] = (every, carry)
    return [at[i] for i in block.outputs]


def _carried(infer: Infer, block: Block, node: Node, args: list[Flow], scalars: set[int]) -> Sequence[int]:
    name, params, nothing = node.name, node.eqn.params, [0] * len(node.outs)
    if name == "optimization_barrier":
        return [carry for _, carry in args]
    shapes = [block.avals[i].shape for i in node.ins]
    if name in CARRIES or name == "select_n":
        shape, out = block.avals[node.outs[0]].shape, 0
        for k, (_, carry) in enumerate(args):
            if shapes[k] == shape and not (name == "select_n" and k == 0):
                out |= carry
        return [out]
    if name in ("mul", "div"):
        (_, a), (_, b) = args
        rank = len(block.avals[node.outs[0]].shape)

        def factor(k: int) -> bool:
            return node.ins[k] in block.known or (rank > 0 and (not shapes[k] or node.ins[k] in scalars))

        return [(a if factor(1) else 0) | (b if name == "mul" and factor(0) else 0)]
    if name == "scan":
        scan = Scan.of(params)
        body = infer.block(scan.body, node.backward)
        return _loop(infer, body, args, scan.consts, scan.carries) + nothing[scan.carries :]
    if name == "while":
        loop = While.of(params)
        body = infer.block(loop.body, node.backward)
        return _loop(infer, body, args[loop.cond_consts :], loop.body_consts, len(node.outs))
    if name == "cond":
        every = [_flow(infer, infer.block(b, node.backward), args[1:]) for b in branches(params)]
        out = list(nothing)
        for branch in every:
            out = [a | carry for a, (_, carry) in zip(out, branch, strict=True)]
        return out
    if name in CHECKPOINT:
        body = infer.block(checkpointed(params), node.backward)
        return [carry for _, carry in _flow(infer, body, args)]
    return nothing


def _loop(infer: Infer, body: Block, args: list[Flow], consts: int, carries: int) -> list[int]:
    """What comes out of a loop carries what went in, if a turn's result carries its own start."""
    missing = len(body.inputs) - consts - carries
    inner = [*args[:consts], *((1 << k, 1 << k) for k in range(carries)), *[(0, 0)] * missing]
    inner[:consts] = [(0, 0)] * consts
    outs = _flow(infer, body, inner)[:carries]
    return [args[consts + k][1] if carry & (1 << k) else 0 for k, (_, carry) in enumerate(outs)]


def match(
    out_tree: Any,
    out_avals: Sequence[Any],
    flows: Sequence[Flow],
    arguments: Sequence[tuple[Any, list[int], str]],
    avals: Sequence[Any],
) -> list[int | None]:
    """For each leaf of the result the leaf of the arguments whose next value it is, or None for an aux value.

    Tuples, lists and dicts of the result are searched from the outside in; each argument is matched once.

    Args:
      out_tree: structure of the result.
      out_avals: types of its leaves.
      flows: of its leaves (`flows`).
      arguments: that are state: structure, positions of the leaves, name.
      avals: types of the arguments' leaves.

    Raises:
      StepError: a part of the result may as well be the next value of two arguments.
    """
    left = [a for a in arguments if a[1]]
    matched: list[int | None] = [None] * out_tree.num_leaves

    def score(first: int, tree: Any, argument: tuple[Any, list[int], str]) -> tuple[int, int] | None:
        structure, leaves, _ = argument
        if tree != structure or not all(
            out_avals[first + k].shape == avals[i].shape and _kind(out_avals[first + k].dtype) == _kind(avals[i].dtype)
            for k, i in enumerate(leaves)
        ):
            return None
        own = [(bool(flows[first + k][1] >> i & 1), bool(flows[first + k][0] >> i & 1)) for k, i in enumerate(leaves)]
        carried, depends = sum(c for c, _ in own), sum(d for _, d in own)
        # A loss may have the type of a state, and depend on it. A key that was split is none the less the next one.
        alike = not depends or jnp.issubdtype(avals[leaves[0]].dtype, jnp.inexact)
        if len(leaves) == 1 and not carried and alike:
            return None
        return carried, depends

    def places(tree: Any, first: int, argument: tuple[Any, list[int], str]) -> int:
        """In how many parts of the result an argument's next value may be."""
        if score(first, tree, argument) is not None:
            return 1
        return sum(places(child, at, argument) for child, at in _children(tree, first))

    def parts(tree: Any, first: int) -> list[tuple[Any, int]]:
        """The outermost parts of a result that may be the next value of an argument."""
        if any(score(first, tree, argument) is not None for argument in left):
            return [(tree, first)]
        return within(tree, first)

    def within(tree: Any, first: int) -> list[tuple[Any, int]]:
        """As `parts`, but not the whole."""
        node = tree.node_data()
        if node is None or node[0] not in (tuple, list, dict):
            return []
        return [part for child, at in _children(tree, first) for part in parts(child, at)]

    open_parts = parts(out_tree, 0)
    while open_parts:
        ranked: list[tuple[tuple[Any, int], tuple[int, int], list[Any]]] = []
        for tree, first in open_parts:
            scores = [(s, argument) for argument in left if (s := score(first, tree, argument)) is not None]
            best = max((s for s, _ in scores), default=(0, 0))
            ranked.append(((tree, first), best, [argument for s, argument in scores if s == best]))
        # What is clear first: what is left may be clear then.
        (tree, first), best, tied = next((r for r in ranked if len(r[2]) == 1), ranked[0])
        open_parts.remove((tree, first))
        if not tied:  # its argument was another part's: what it is made of may be some other one's
            open_parts += within(tree, first)
            continue
        if len(tied) > 1 and best[1] and places(out_tree, 0, tied[0]) < len(tied):
            names = " or ".join(name for _, _, name in tied)
            raise StepError(
                f"a part of the result may be the next value of {names}: it has the structure and types of each, "
                "and follows from them alike. Return the other one too (as it is, if it does not change)"
            )
        matched[first : first + tree.num_leaves] = tied[0][1]
        left.remove(tied[0])
    return matched


def _children(tree: Any, first: int) -> list[tuple[Any, int]]:
    """The parts of a structure, each with the position of its first leaf."""
    sizes = (child.num_leaves for child in tree.children())
    return list(zip(tree.children(), itertools.accumulate(sizes, initial=first), strict=False))


def _kind(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return "float" if jnp.issubdtype(dtype, jnp.inexact) else "bool" if jnp.issubdtype(dtype, jnp.bool_) else "int"
