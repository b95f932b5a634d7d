"""Which part of a step's result is the next value of which argument: by structure and types, and by what follows from
what.

A leaf of the result *carries* a leaf of the arguments if it is that leaf, changed by additions, selections and factors:
``w - lr * grad`` carries `w`, and so does a moving average, but a loss carries nothing that it is computed from. How
much of it is left is looked at as well: a gradient with decay has a little of the weights in it, ``grad + 1e-4 * w``,
and a difference ``new - w`` nothing. What differentiation makes of an argument on its way back is a gradient: it
carries nothing, and nothing of the weights of which it is the gradient once these are added with a factor that is not
known, ``grad + decay * w``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxdist import compat
from jaxdist.errors import StepError
from jaxdist.ir.control_flow import CHECKPOINT, CONTROL_FLOW, Scan, While, branches, checkpointed
from jaxdist.ir.interpreter import subjaxprs
from jaxdist.ir.operations import ADDITION, CARRIES, PIECES, WRITES
from jaxdist.placements.block import Block, Node, number
from jaxdist.placements.infer import Infer

Carry = Mapping[int, float]
"""By input: how much of it is in a value, 1 for all of it."""

_NOTHING: Carry = {}
_ENOUGH = 0.1
"""A next value has more than this of the old one; weight decay in a gradient, say, has less."""
_SOME = 0.5
"""In place of a factor whose value is not known while the step is traced."""
_MOST = 0.75
"""The same of ``1 - rate``."""


class Flow(NamedTuple):
    """What a value has of the inputs.

    Attributes:
      depends: the inputs on which it depends, as a set of bits.
      has: what it has of them.
      derived: a derivative, or what follows from one.
      slopes: the inputs on which those derivatives depend, as bits.
    """

    depends: int
    has: Carry
    derived: bool = False
    slopes: int = 0

    def carries(self, i: int) -> bool:
        """Whether it is made of the input `i`, changed."""
        return self.has.get(i, 0) > _ENOUGH


def flows(infer: Infer, block: Block) -> list[Flow]:
    """For each output of a step the inputs on which it depends, and what it has of them."""
    return _flow(infer, block, [Flow(1 << i, {i: 1.0}) for i in range(len(block.inputs))])


def _flow(infer: Infer, block: Block, inputs: Sequence[Flow]) -> list[Flow]:
    at = [Flow(0, _NOTHING)] * len(block.avals)
    factors = {i: _factor(value) for i, value in block.known.items()}
    for i, flow in zip(block.inputs, inputs, strict=True):
        at[i] = flow
    for node in block.nodes:
        args = [at[i] for i in node.ins]
        every, slopes, derived = 0, 0, node.backward or (node.name in CONTROL_FLOW and _differentiates(node.eqn))
        for flow in args:
            every |= flow.depends
            slopes |= flow.slopes
        slopes, derived = every if derived else slopes, derived or any(flow.derived for flow in args)
        # On the way back there are gradients, whatever they are multiplied by.
        carried = [_NOTHING] * len(node.outs) if node.backward else _carried(infer, block, node, args, factors)
        if node.name == "broadcast_in_dim" and (not block.avals[node.ins[0]].shape or node.ins[0] in factors):
            factors[node.outs[0]] = factors.get(node.ins[0])
        elif node.name in ("add", "sub") and not block.avals[node.outs[0]].shape:
            known = [factors.get(i) for i in node.ins if i in factors]
            if len(known) == 1 and known[0] is not None:
                factors[node.outs[0]] = _MOST * known[0]
        for o, carry in zip(node.outs, carried, strict=True):
            at[o] = Flow(every, carry, derived, slopes)
    return [at[i] for i in block.outputs]


def _carried(
    infer: Infer, block: Block, node: Node, args: list[Flow], factors: Mapping[int, float | None]
) -> Sequence[Carry]:
    name, params, nothing = node.name, node.eqn.params, [_NOTHING] * len(node.outs)
    if name == "optimization_barrier":
        return [flow.has for flow in args]
    shapes, shape = [block.avals[i].shape for i in node.ins], block.avals[node.outs[0]].shape if node.outs else ()
    if name in CARRIES or name == "select_n":
        first = 1 if name == "select_n" else 0  # the condition
        kept = {k: args[k].has for k in range(first, len(args)) if args[k].has and shapes[k] == shape}
        if name in ("sub", "neg") and (minus := len(args) - 1) in kept:
            kept[minus] = {i: -amount for i, amount in kept[minus].items()}
        if name in ADDITION or name == "sub":
            slopes = 0  # of what is a gradient, added to something
            for k, flow in enumerate(args):
                if flow.derived and not flow.has and not (name == "sub" and k):
                    slopes |= flow.slopes
            total = _joined(kept.values(), float.__add__)
            return [{i: amount for i, amount in total.items() if abs(amount) > _SOME or not slopes >> i & 1}]
        return [_joined(kept.values(), max, len(kept) < len(args) - first)]
    if name in WRITES:
        return [args[0].has]
    if name in PIECES:
        return [_joined((flow.has for flow in args), max)] * len(node.outs)
    if name in ("mul", "div"):

        def scaled(k: int, by: int) -> Carry:
            i = node.ins[by]
            if not args[k].has or not (i in factors or (shape and not shapes[by])):
                return _NOTHING
            factor = factors.get(i)
            if factor is None or (name == "div" and not factor):
                factor = _SOME
            elif name == "div":
                factor = 1 / factor
            return {i: amount * factor for i, amount in args[k].has.items()}

        return [_joined((scaled(0, 1), scaled(1, 0) if name == "mul" else _NOTHING), float.__add__)]
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
        return [_joined((flow.has for flow in outs), max) for outs in zip(*every, strict=True)]
    if name in CHECKPOINT:
        body = infer.block(checkpointed(params), node.backward)
        return [flow.has for flow in _flow(infer, body, args)]
    return nothing


def _loop(infer: Infer, body: Block, args: list[Flow], consts: int, carries: int) -> list[Carry]:
    """What comes out of a loop carries what went in, if a turn's result carries its own start."""
    nothing = Flow(0, _NOTHING)
    missing = len(body.inputs) - consts - carries
    inner = [*[nothing] * consts, *(Flow(1 << k, {k: 1.0}) for k in range(carries)), *[nothing] * missing]
    outs = _flow(infer, body, inner)[:carries]
    return [args[consts + k].has if flow.carries(k) else _NOTHING for k, flow in enumerate(outs)]


def _differentiates(eqn: JaxprEqn) -> bool:
    """Whether there is a derivative in the body of a loop or a branch."""
    return any(compat.in_backward_pass(inner) or _differentiates(inner) for sub in subjaxprs(eqn) for inner in sub.eqns)


def _factor(value: Any) -> float | None:
    """The number that a constant is, if it is one."""
    found = number(value)
    return None if found is None or jnp.iscomplexobj(found) or not math.isfinite(found) else float(found)


def _joined(carries: Iterable[Carry], how: Callable[[float, float], float], others: bool = False) -> Carry:
    """What a value has that is made of several; `others`: also of what has nothing."""
    carries = [carry for carry in carries if carry]
    if len(carries) == 1 and not others:
        return carries[0]
    out: dict[int, float] = {}
    for carry in carries:
        for i, amount in carry.items():
            out[i] = how(out[i], amount) if i in out else amount
    return {i: how(0.0, amount) for i, amount in out.items()} if others else out


def match(
    out_tree: Any,
    out_avals: Sequence[Any],
    flows: Sequence[Flow],
    arguments: Sequence[tuple[Any, list[int], str]],
    avals: Sequence[Any],
) -> tuple[list[int | None], frozenset[int]]:
    """Match a step's result with its arguments.

    Tuples, lists and dicts of the result are searched from the outside in; each argument is matched once.

    Args:
      out_tree: structure of the result.
      out_avals: types of its leaves.
      flows: of its leaves (`flows`).
      arguments: that are state: structure, positions of the leaves, name.
      avals: types of the arguments' leaves.

    Returns:
      For each leaf of the result the leaf of the arguments whose next value it is, or None for an aux value. And those
      leaves of the arguments that may be given up for it: what has the structure of an argument and is its gradient, or
      a direction that follows from it, is kept on the devices as the argument is, and the argument stays.

    Raises:
      StepError: a part of the result may as well be the next value of two arguments.
    """
    left = [a for a in arguments if a[1]]
    matched: list[int | None] = [None] * out_tree.num_leaves
    taken: list[tuple[int, list[int], int]] = []  # first leaf, the argument's leaves, how many of them are carried

    def score(first: int, tree: Any, argument: tuple[Any, list[int], str]) -> tuple[int, int] | None:
        structure, leaves, _ = argument
        if tree != structure or not all(
            out_avals[first + k].shape == avals[i].shape and _kind(out_avals[first + k].dtype) == _kind(avals[i].dtype)
            for k, i in enumerate(leaves)
        ):
            return None
        carried = sum(flows[first + k].carries(i) for k, i in enumerate(leaves))
        depends = sum(flows[first + k].depends >> i & 1 for k, i in enumerate(leaves))
        # A loss may have the type of a state, and depend on it. A key that was split is none the less the next one.
        if len(leaves) == 1 and not carried and not (depends and _moves_on(avals[leaves[0]])):
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
        """The same as `parts`, without the whole."""
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
        # What is clear first, and of that what carries most: what is left may be clear then.
        (tree, first), best, tied = max(
            (r for r in ranked if len(r[2]) == 1), key=lambda ranking: ranking[1], default=ranked[0]
        )
        open_parts.remove((tree, first))
        if not tied:  # its argument was another part's: what it is made of may be some other one's
            open_parts += within(tree, first)
            continue
        if len(tied) > 1 and best[1] and places(out_tree, 0, tied[0]) < len(tied):
            if not best[0] and _is_gradient(flows[first : first + tree.num_leaves], avals, tied[0][1]):
                continue  # of one of them, and the next value of none
            names = " or ".join(name for _, _, name in tied)
            raise StepError(
                f"a part of the result may be the next value of {names}: it has the structure and types of each, "
                "and follows from them alike. Return the other one too (as it is, if it does not change)"
            )
        matched[first : first + tree.num_leaves] = tied[0][1]
        taken.append((first, tied[0][1], best[0]))
        left.remove(tied[0])
    trains = any(carried for _, _, carried in taken)
    given_up = frozenset(
        i for first, leaves, carried in taken
        if carried or not _is_gradient(flows[first : first + len(leaves)], avals, leaves, trains) for i in leaves
    )  # fmt: skip
    return matched, given_up


def _is_gradient(found: Sequence[Flow], avals: Sequence[Any], leaves: Sequence[int], trains: bool = False) -> bool:
    """Whether a part of a result that carries nothing of an argument of its structure may be the gradient of that.

    Args:
      found: of the part's leaves.
      avals: types of all arguments' leaves.
      leaves: positions of the argument's.
      trains: the step moves some other argument: then what does not follow from this one is what it remembers next.
    """
    if any(map(_moves_on, (avals[i] for i in leaves))):  # nobody differentiates by these
        return False
    if trains and not any(flow.depends >> i & 1 for flow, i in zip(found, leaves, strict=True)):
        return False
    return any(flow.derived for flow in found) and not any(flow.carries(i) for flow in found for i in flow.has)


def _children(tree: Any, first: int) -> list[tuple[Any, int]]:
    """The parts of a structure, each with the position of its first leaf."""
    sizes = (child.num_leaves for child in tree.children())
    return list(zip(tree.children(), itertools.accumulate(sizes, initial=first), strict=False))


def _moves_on(aval: Any) -> bool:
    """Whether what depends on a value of this type, and has its type, is its next one: a key, a position."""
    return not jnp.issubdtype(aval.dtype, jnp.inexact)


def _kind(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return "float" if jnp.issubdtype(dtype, jnp.inexact) else "bool" if jnp.issubdtype(dtype, jnp.bool_) else "int"
