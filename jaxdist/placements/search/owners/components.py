"""Find whole-matrix work on shards in components: sets of operations that one device can do alone for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.ir.interpreter import has_effect
from jaxdist.ir.operations import CONTRACTION, FOR_ITSELF, LINEAR, is_elementwise
from jaxdist.placements.model.block import Block, Node, UnionFind
from jaxdist.placements.model.strategy import Inference, Propagation, Strategy, nbytes
from jaxdist.placements.model.values import Partial, Placement, Replicated, Split


@dataclass(eq=False)
class Component:
    """A connected set of operations."""

    nodes: list[Node]  # in order
    ins: tuple[int, ...]  # values of their block that they take, without its constants
    outs: tuple[int, ...]  # values of theirs that other operations take
    stage: int  # operations of a stage wait for the results of earlier stages

    def block(self, outer: Block) -> Block:
        """These operations as a block of their own, with the numbers of values that they have outside."""
        constants = {i: outer.constants[i] for node in self.nodes for i in node.ins if i in outer.constants}
        block = Block(outer.avals, list(self.ins), constants, self.nodes, self.nodes, list(self.outs))
        block.count_uses()
        return block


def is_whole_work(node: Node, strategy: Strategy, placements: Sequence[Placement], moved: Counter[int]) -> bool:
    """Check whether an operation is whole-matrix work.

    That is a product that gathers or leaves summands; anything else, unless entrywise or linear, that every device
    repeats on values in slices; or control flow with components.
    """
    if strategy.bodies:
        return any(body.matrices for body in strategy.bodies)
    if node.name in CONTRACTION:
        out: Any = node.eqn.outvars[0].aval
        summed = isinstance(strategy.out_placements[0], Partial) and out.ndim > 1
        return moved[id(node)] > 0 or summed
    in_slices = any(isinstance(placements[i], Split) for i in node.ins)
    return strategy.is_repeated and in_slices and not (node.name in LINEAR or is_elementwise(node.eqn.primitive))


def bytes_moved(placed: Propagation) -> Counter[int]:
    """Return the bytes moved for each node (by its id), without those in bodies."""
    moved: Counter[int] = Counter()
    for message in placed.messages:
        if message.reshards:
            moved[id(message.node)] += message.bytes
    return moved


def bytes_sent(placed: Propagation, component: Component) -> int:
    """Return the bytes sent to the owner of a component and back: sliced inputs, and outputs."""
    sliced = [i for i in component.ins if isinstance(placed.placements[i], Split)]
    return sum(nbytes(placed.block.avals[i]) for i in (*sliced, *component.outs))


def most_inside(placed: Propagation) -> int:
    """Return the most components that a loop or branch of a block has."""
    return max((body.matrices for strategy in placed.strategies for body in strategy.bodies), default=0)


def components(infer: Inference, placed: Propagation, moved: Counter[int]) -> list[Component]:
    """Find components. A loop or branch is one operation of them, or has components of its own, if these are more."""
    pairs = zip(placed.block.nodes, placed.strategies, strict=True)
    is_whole = [is_whole_work(node, strategy, placed.placements, moved) for node, strategy in pairs]
    if not any(is_whole):
        return []
    inside = most_inside(placed)
    found = _Finder(infer, placed, moved, is_whole).find(inside)
    # With a loop over several matrices as one operation there are fewer: the loop divides its own, and is left out.
    if inside > max(1, len(found)):
        found = _Finder(infer, placed, moved, is_whole).find(max(1, len(found)))
    return found


class _ValueFacts(NamedTuple):
    """The dependencies of a value."""

    stage: int = 0  # of the whole-matrix work that it depends on
    component: int | None = None  # the number of that work's component in the stage, if it is in one
    of_batch: bool = False  # an activation, or a sum of activations on its way to a device


class _OperationFacts(NamedTuple):
    """The stage and component of an operation."""

    stage: int
    component: int | None
    movable: bool  # one device may do it alone


class _Finder:
    """Joins the operations of a block to components: first in program order (`_visit`), then back (`_members`).

    A value has a stage and, if it depends on whole-matrix work of that stage, a component. An operation that no
    component may contain ends the stage of its operands, and what follows waits for it. Two matrices::

        position  operation             forward                                  back: a member?
        0         a1 = w1 @ w1.T        stage 0, component 0: it starts one      yes: whole-matrix work
        1         a2 = w2 @ w2.T        stage 0, component 1                     yes
        2         s1 = 2 * a1           stage 0, component 0: its operand's      yes: 3 needs it
        3         b1 = s1 @ w1          stage 0, component 0                     yes
        4         u1 = w1 - b1          stage 0, component 0                     no: it can be done on slices
        5         n = |a1| + |a2|       stage 1, in none: they meet in a number
        6         c1 = b1 / n           stage 1, in none
        7         d1 = c1 @ c1.T        stage 1, component 7: it starts one      yes
    """

    def __init__(self, infer: Inference, placed: Propagation, moved: Counter[int], is_whole: Sequence[bool]):
        self._infer, self._placed, self._block, self._moved = infer, placed, placed.block, moved
        self._is_whole = is_whole  # for each operation, whether it is whole-matrix work
        self._outputs = frozenset(placed.block.outputs)
        self._joined = UnionFind[int]()  # components that are one
        self._values = [_ValueFacts()] * len(self._block.avals)
        self._operations: list[_OperationFacts] = []
        self._position = {o: k for k, node in enumerate(self._block.nodes) for o in node.outs}

    def find(self, inside: int) -> list[Component]:
        """Return the components; a loop or branch with more than `inside` of its own is in none: it divides these."""
        placements = self._placed.placements
        for i in self._block.inputs:
            summand = isinstance(placements[i], Partial)
            self._values[i] = _ValueFacts(of_batch=_is_of_batch(placements[i]) or summand)
        for node, strategy, whole in zip(self._block.nodes, self._placed.strategies, self._is_whole, strict=True):
            self._operations.append(self._visit(node, strategy, whole, inside))
        return [self._component(members, stage) for stage, members in self._members()]

    def _visit(self, node: Node, strategy: Strategy, is_whole: bool, inside: int) -> _OperationFacts:
        """Put an operation into the component that it extends, or let it end the stage of its operands.

        One whose operands are of no component is in none, unless it is whole-matrix work itself: that starts one.
        """
        operands = [self._values[i] for i in node.ins]
        of_batch = any(operand.of_batch for operand in operands)
        stage = max((operand.stage for operand in operands), default=0)
        touched = {self._joined.of(x.component) for x in operands if x.component is not None and x.stage == stage}
        keys = any(jnp.issubdtype(self._block.avals[i].dtype, jax.dtypes.extended) for i in (*node.ins, *node.outs))
        movable = not of_batch and not keys and _is_pure(node, strategy, inside)
        # Matrices meet in few numbers, such as a norm of all: only whole-matrix work joins components.
        movable = movable and (is_whole or len(touched) < 2)
        component = None
        if not movable:
            stage += bool(touched)
        elif is_whole or touched:
            component = min(touched, default=len(self._operations))
            for other in touched:
                self._joined.tie(other, component)
        for o in node.outs:
            p = self._placed.placements[o]
            follows = _is_of_batch(p) or (of_batch and isinstance(p, Partial))
            self._values[o] = _ValueFacts(stage, component, follows)
        return _OperationFacts(stage, component, movable)

    def _members(self) -> list[tuple[int, set[int]]]:
        """Return the stage and the operations of each component, without those that merely depend on it.

        Backwards, from whole-matrix work and what gathers: to this belongs what members of the component take. What
        follows them and nothing of theirs takes can be done on slices of the owner's result.
        """
        members: dict[tuple[int, int], set[int]] = {}  # by stage and component
        takers: dict[int, set[tuple[int, int]]] = {}  # of each value, the components that need it
        for k, node in reversed([*enumerate(self._block.nodes)]):
            operation = self._operations[k]
            if operation.component is None:
                continue
            key = operation.stage, self._joined.of(operation.component)
            needed = any(key in takers.get(o, ()) for o in node.outs)
            if self._is_whole[k] or needed or self._moved[id(node)] > 0 or self._takes_whole(node):
                members.setdefault(key, set()).add(k)
                for i in node.ins:
                    takers.setdefault(i, set()).add(key)
        return [(stage, members[stage, component]) for stage, component in sorted(members)]

    def _takes_whole(self, node: Node) -> bool:
        """Check whether an operation takes whole what owners return in slices, as picks from a sorted array do."""
        placements = self._placed.placements
        if node.name not in CONTRACTION and not all(isinstance(placements[o], Replicated) for o in node.outs):
            return False
        made_whole = [
            i for i in node.ins if self._values[i].component is not None and isinstance(placements[i], Replicated)
        ]
        return any(self._infer.shard_dim(self._block.avals[i].shape) is not None for i in made_whole)

    def _component(self, members: set[int], stage: int) -> Component:
        members = self._with_makers(members)
        nodes = [self._block.nodes[k] for k in sorted(members)]
        results = dict.fromkeys(o for node in nodes for o in node.outs)
        operands = dict.fromkeys(i for node in nodes for i in node.ins)
        ins = tuple(i for i in operands if i not in results and i not in self._block.constants)
        return Component(nodes, ins, tuple(o for o in results if not self._is_for(o, members)), stage)

    def _is_for(self, i: int, members: set[int]) -> bool:
        """Check whether only these operations take a value."""
        return i not in self._outputs and members.issuperset(self._block.users.get(i, ()))

    def _with_makers(self, members: set[int]) -> set[int]:
        """Add operations that make their operands, such as a transposed copy, unless that sends more."""
        members, operands = set(members), [i for k in sorted(members) for i in self._block.nodes[k].ins]
        for i in operands:  # the list grows by the operands of added operations
            k = self._position.get(i)
            if k is None or k in members:
                continue
            node, operation = self._block.nodes[k], self._operations[k]
            if operation.component is not None or not operation.movable:
                continue
            sent = sum(map(self._bytes, set(node.ins).difference(operands)))
            if all(self._is_for(o, members) for o in node.outs) and sent <= sum(map(self._bytes, node.outs)):
                members.add(k)
                operands += node.ins
        return members

    def _bytes(self, i: int) -> int:
        return nbytes(self._block.avals[i]) if isinstance(self._placed.placements[i], Split) else 0


def _is_of_batch(p: Placement) -> bool:
    return isinstance(p, Split) and not p.of_state


def _is_pure(node: Node, strategy: Strategy, inside: int) -> bool:
    """Check whether an operation depends on its operands only, and has few enough components of its own."""
    if has_effect(node.eqn) or node.name in FOR_ITSELF:
        return False
    return all(
        body.matrices <= inside
        and all(_is_pure(n, s, inside) for n, s in zip(body.block.nodes, body.strategies, strict=True))
        for body in strategy.bodies
    )
