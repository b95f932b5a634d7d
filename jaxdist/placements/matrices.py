"""Work on whole matrices in what a step keeps in shards: Newton-Schulz iterations, factorisations, their products.

On slices of a matrix such work gathers it over and over, or is repeated by every device. Here it is found: operations
that need all of a stored value, joined where one follows from the other, so that what is left are components which have
nothing to do with each other: usually one for each matrix. What to do with them is in `jaxdist.placements.owners`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.ir.interpreter import has_effect
from jaxdist.ir.operations import CONTRACTION, FOR_ITSELF, LINEAR, is_elementwise
from jaxdist.placements.block import Block, Node
from jaxdist.placements.strategy import Placed, Strategy, nbytes
from jaxdist.placements.values import Partial, Placement, Replicated, Split


@dataclass(eq=False)
class Component:
    """Operations that follow from one another."""

    nodes: list[Node]  # in order
    ins: tuple[int, ...]  # values of their block that they take, but for its constants
    outs: tuple[int, ...]  # values of theirs that others take
    stage: int  # those of a stage wait for the results of an earlier one

    def block(self, outer: Block) -> Block:
        """These operations as a block of their own."""
        block = Block()
        at: dict[int, int] = {}

        def number(i: int) -> int:
            if i not in at:
                at[i] = block.new(outer.avals[i])
                if i in outer.known:
                    block.known[at[i]] = outer.known[i]
            return at[i]

        block.inputs = [number(i) for i in self.ins]
        block.nodes = block.traced = [
            Node(n.eqn, tuple(map(number, n.ins)), tuple(map(number, n.outs)), n.backward, n.calls) for n in self.nodes
        ]
        block.outputs = [number(i) for i in self.outs]
        block.count_uses()
        return block


def is_whole_work(node: Node, strategy: Strategy, at: Sequence[Placement], moved: Counter[int]) -> bool:
    """Whether an operation, as it is placed, gathers what is stored, or is repeated by every device."""
    if strategy.bodies:
        return any(body.matrices for body in strategy.bodies)
    if node.name in CONTRACTION:
        out: Any = node.eqn.outvars[0].aval
        summed = isinstance(strategy.gives[0], Partial) and out.ndim > 1
        return moved[id(node)] > 0 or summed
    in_slices = any(isinstance(at[i], Split) for i in node.ins)
    return bool(strategy.why) and in_slices and not (node.name in LINEAR or is_elementwise(node.eqn.primitive))


def bytes_moved(placed: Placed) -> Counter[int]:
    """By id of a node: bytes that move for it, outside of bodies."""
    moved: Counter[int] = Counter()
    for move in placed.own:
        moved[id(move.node)] += move.bytes
    return moved


def bytes_sent(placed: Placed, component: Component) -> int:
    """That travel to the owner of a component and back: of what is in slices."""
    sliced = [i for i in component.ins if isinstance(placed.at[i], Split)]
    return sum(nbytes(placed.block.avals[i]) for i in (*sliced, *component.outs))


def components(infer: Any, placed: Placed, moved: Counter[int]) -> list[Component]:
    """Of a block. Control flow is an operation of one, unless there are more components in it than around it."""
    whole = [is_whole_work(n, s, placed.at, moved) for n, s in zip(placed.block.nodes, placed.strategies, strict=True)]
    if not any(whole):
        return []

    def joined(most: int) -> list[Component]:
        ways = [_Finder(infer, placed, moved, whole, most, apart).found() for apart in (False, True)]
        return max(ways, key=lambda found: max(Counter(one.stage for one in found).values(), default=0))

    most = max((body.matrices for strategy in placed.strategies for body in strategy.bodies), default=0)
    found = joined(most)
    if most > max(1, len(found)):
        found = joined(max(1, len(found)))
    return found


_Nodes = dict[int, Node]
"""Operations, by id."""
_Key = tuple[int, int]
"""A stage, and a component in it."""


class _Finder:
    """Joins the operations of a block.

    A value has a stage and, if it follows from work on whole matrices of that stage, a component. What may not be in a
    component ends a stage: the rest waits for it.
    """

    def __init__(self, infer: Any, placed: Placed, moved: Counter[int], whole: Sequence[bool], most: int, apart: bool):
        self._most, self._apart = most, apart
        self.infer, self.placed, self.block = infer, placed, placed.block
        self._parents: list[int] = []  # of components that were joined
        count = len(self.block.avals)
        self._stage, self._component = [0] * count, [-1] * count
        self._of_batch = [False] * count
        self._small = [infer.choose(aval.shape) is None for aval in self.block.avals]  # or broadcast from such
        for i in self.block.inputs:
            self._of_batch[i] = _is_of_batch(placed.at[i]) or isinstance(placed.at[i], Partial)
        self._at: list[_Key] = []  # stage and component of each operation
        self._alone: list[bool] = []  # whether one device may do it
        for node, strategy, is_whole in zip(self.block.nodes, placed.strategies, whole, strict=True):
            self._enter(node, strategy, is_whole)
        self._whole, self._moved, self._maker = whole, moved, self.block.makers
        self._position = {id(node): k for k, node in enumerate(self.block.nodes)}
        self._results = set(self.block.outputs)
        self._takers: dict[int, set[int]] = {}  # of each value, ids of operations
        for node in self.block.nodes:
            for i in node.ins:
                self._takers.setdefault(i, set()).add(id(node))

    def _root(self, component: int) -> int:
        while self._parents[component] != component:
            component = self._parents[component]
        return component

    def _enter(self, node: Node, strategy: Strategy, is_whole: bool) -> None:
        of_batch = any(self._of_batch[i] for i in node.ins)
        for o in node.outs:
            p = self.placed.at[o]
            self._of_batch[o] = _is_of_batch(p) or (of_batch and isinstance(p, Partial))
        stage = max((self._stage[i] for i in node.ins), default=0)
        joined = {i: self._root(self._component[i]) for i in node.ins
                  if self._component[i] >= 0 and self._stage[i] == stage}  # fmt: skip
        inside = not of_batch and self._may_be_inside(node, strategy)
        if inside and not is_whole and len(set(joined.values())) > 1:
            # Matrices meet in numbers that are few, as in the norm of all of them: not to be one for that.
            inside = not any(self._small[i] for i in joined)
        others = any(isinstance(self.placed.at[i], Split) and i not in joined for i in node.ins)
        if self._apart and inside and joined and others and all(self._small[i] for i in joined):
            stage, joined = stage + 1, {}
        component = -1
        if not inside:
            stage += bool(joined)
        elif is_whole or joined:
            roots = sorted(set(joined.values()))
            component = roots[0] if roots else len(self._parents)
            if not roots:
                self._parents.append(component)
            for other in roots[1:]:
                self._parents[other] = component
        self._at.append((stage, component))
        self._alone.append(inside)
        for o in node.outs:
            self._stage[o], self._component[o] = stage, component
            self._small[o] |= all(self._small[i] for i in node.ins)

    def _may_be_inside(self, node: Node, strategy: Strategy) -> bool:
        """Whether one device alone may do it."""
        values = (*node.ins, *node.outs)
        if any(jnp.issubdtype(self.block.avals[i].dtype, jax.dtypes.extended) for i in values):
            return False
        return _is_pure(node, strategy, self._most)

    def _takes_all(self, node: Node) -> bool:
        """Whether it would gather what comes back in slices, as the entry that is picked from a sorted array."""
        at, avals = self.placed.at, self.block.avals
        there = any(self._component[i] >= 0 and isinstance(at[i], Replicated) for i in node.ins
                    if self.infer.choose(avals[i].shape) is not None)  # fmt: skip
        gathers = node.name in CONTRACTION or all(isinstance(at[o], Replicated) for o in node.outs)
        return self._moved[id(node)] > 0 or (there and gathers)

    def found(self) -> list[Component]:
        """The components, without what only follows from them, unless fewer bytes travel with it."""
        members: dict[_Key, list[Node]] = {}
        followers: dict[_Key, list[Node]] = {}
        needed: dict[int, set[_Key]] = {}  # values, and the components that take them
        for node in reversed(self.block.nodes):
            stage, component = self._at[self._position[id(node)]]
            if component < 0:
                continue
            key = stage, self._root(component)
            whole = self._whole[self._position[id(node)]]
            if whole or self._takes_all(node) or any(key in needed.get(o, ()) for o in node.outs):
                members.setdefault(key, []).append(node)
                for i in node.ins:
                    needed.setdefault(i, set()).add(key)
            else:
                followers.setdefault(key, []).append(node)
        found = []
        for key, nodes in sorted(members.items()):
            own = {id(node): node for node in nodes}
            self._take_followers(own, followers.get(key, [])[::-1])
            self._take_makers(own)
            found.append(self._of(own, key[0]))
        return found

    def _of(self, own: _Nodes, stage: int) -> Component:
        nodes = sorted(own.values(), key=lambda node: self._position[id(node)])
        made = dict.fromkeys(o for node in nodes for o in node.outs)
        taken = dict.fromkeys(i for node in nodes for i in node.ins)
        ins = tuple(i for i in taken if i not in made and i not in self.block.known)
        return Component(nodes, ins, tuple(o for o in made if not self._is_for(o, own)), stage)

    def _is_for(self, i: int, own: _Nodes) -> bool:
        """Whether a value is taken by nothing but these operations."""
        return i not in self._results and all(taker in own for taker in self._takers.get(i, ()))

    def _take_followers(self, own: _Nodes, followers: Sequence[Node]) -> None:
        """Those of which less comes back, as a sum of squares."""
        before: dict[int, _Nodes] = {}  # by id of a follower: it and those that it follows from
        for node in followers:
            made = [before.get(id(self._maker[i]), {}) for i in node.ins if i in self._maker]
            before[id(node)] = {k: n for nodes in made for k, n in nodes.items()} | {id(node): node}
            self._take(own, before[id(node)])

    def _take_makers(self, own: _Nodes) -> None:
        """What makes more of its operands, as where a matrix is also needed transposed."""
        count = 0
        while count != len(own):
            count = len(own)
            makers = {i: self._maker[i] for node in own.values() for i in node.ins if i in self._maker}
            for node in makers.values():
                _, component = self._at[self._position[id(node)]]
                for_it = component < 0 and all(self._is_for(o, own) for o in node.outs)
                if for_it and self._alone[self._position[id(node)]]:
                    self._take(own, {id(node): node})

    def _take(self, own: _Nodes, more: _Nodes) -> None:
        """Add operations to those of a component, if fewer bytes travel then."""
        more = {k: node for k, node in more.items() if k not in own}
        values = {i for node in more.values() for i in (*node.ins, *node.outs)}
        without = self._sent(values, own) + sum(self._moved[k] for k in more)
        own.update(more)
        if self._sent(values, own) >= without:
            for k in more:
                del own[k]

    def _sent(self, values: Collection[int], own: _Nodes) -> int:
        """Bytes of some values that travel to these operations and back."""

        def travels(i: int) -> bool:
            if i in self._maker and id(self._maker[i]) in own:
                return not self._is_for(i, own)
            return isinstance(self.placed.at[i], Split) and any(taker in own for taker in self._takers.get(i, ()))

        return sum(nbytes(self.block.avals[i]) for i in values if travels(i))


def _is_of_batch(p: Placement) -> bool:
    return isinstance(p, Split) and not p.stored


def _is_pure(node: Node, strategy: Strategy, most: int) -> bool:
    if has_effect(node.eqn) or node.name in FOR_ITSELF:
        return False
    return all(
        body.matrices <= most
        and all(_is_pure(n, s, most) for n, s in zip(body.block.nodes, body.strategies, strict=True))
        for body in strategy.bodies
    )
