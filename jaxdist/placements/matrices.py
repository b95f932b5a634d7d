"""Find whole-matrix work on shards, such as Newton-Schulz iterations, in components, usually one per matrix.

On slices of a matrix, such work gathers it repeatedly, or every device repeats it; `owners` decides how to run it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.ir.interpreter import has_effect
from jaxdist.ir.operations import CONTRACTION, FOR_ITSELF, LINEAR, is_elementwise
from jaxdist.placements.block import Block, Classes, Node
from jaxdist.placements.strategy import Inference, Propagation, Strategy, nbytes
from jaxdist.placements.values import Partial, Placement, Replicated, Split


@dataclass(eq=False)
class Component:
    """A connected set of operations."""

    nodes: list[Node]  # in order
    ins: tuple[int, ...]  # values of their block that they take, without its constants
    outs: tuple[int, ...]  # values of theirs that other operations take
    stage: int  # operations of a stage wait for the results of earlier stages

    def block(self, outer: Block) -> Block:
        """These operations as a block of their own, with the numbers of values that they have outside."""
        known = {i: outer.known[i] for node in self.nodes for i in node.ins if i in outer.known}
        block = Block(outer.avals, list(self.ins), known, self.nodes, self.nodes, list(self.outs))
        block.count_uses()
        return block


def is_whole_work(node: Node, strategy: Strategy, at: Sequence[Placement], moved: Counter[int]) -> bool:
    """Check whether a placed operation gathers stored values, or is repeated on every device."""
    if strategy.bodies:
        return any(body.matrices for body in strategy.bodies)
    if node.name in CONTRACTION:
        out: Any = node.eqn.outvars[0].aval
        summed = isinstance(strategy.out_placements[0], Partial) and out.ndim > 1
        return moved[id(node)] > 0 or summed
    in_slices = any(isinstance(at[i], Split) for i in node.ins)
    return bool(strategy.why) and in_slices and not (node.name in LINEAR or is_elementwise(node.eqn.primitive))


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


def components(infer: Inference, placed: Propagation, moved: Counter[int]) -> list[Component]:
    """Find components. Control flow is one operation, unless more are inside than around it."""
    whole = [
        is_whole_work(n, s, placed.placements, moved)
        for n, s in zip(placed.block.nodes, placed.strategies, strict=True)
    ]
    if not any(whole):
        return []
    most = max((body.matrices for strategy in placed.strategies for body in strategy.bodies), default=0)
    found = _Finder(infer, placed, moved, whole, most).found()
    if most > max(1, len(found)):
        found = _Finder(infer, placed, moved, whole, max(1, len(found))).found()
    return found


_Places = dict[int, None]  # positions of operations in the block, as an ordered set
_Key = tuple[int, int]  # a stage, and a component in it


class _Finder:
    """Joins the operations of a block."""

    # A value has a stage and, if it depends on whole-matrix work of that stage, a component. An
    # operation that no component may contain ends a stage; the rest waits for it.

    def __init__(self, infer: Inference, placed: Propagation, moved: Counter[int], whole: Sequence[bool], most: int):
        self._most, self._whole = most, whole
        self.infer, self.placed, self.block = infer, placed, placed.block
        self._moved = [moved[id(node)] for node in self.block.nodes]
        self._maker = {o: k for k, node in enumerate(self.block.nodes) for o in node.outs}
        self._results = set(self.block.outputs)
        self._joined = Classes[int]()  # components
        count = len(self.block.avals)
        self._stage, self._component = [0] * count, [-1] * count
        self._of_batch = [False] * count
        for i in self.block.inputs:
            self._of_batch[i] = _is_of_batch(placed.placements[i]) or isinstance(placed.placements[i], Partial)
        self._at: list[_Key] = []  # stage and component of each operation
        self._alone: list[bool] = []  # whether one device may do it
        for node, strategy, is_whole in zip(self.block.nodes, placed.strategies, whole, strict=True):
            self._enter(node, strategy, is_whole)

    def _enter(self, node: Node, strategy: Strategy, is_whole: bool) -> None:
        of_batch = any(self._of_batch[i] for i in node.ins)
        for o in node.outs:
            p = self.placed.placements[o]
            self._of_batch[o] = _is_of_batch(p) or (of_batch and isinstance(p, Partial))
        stage = max((self._stage[i] for i in node.ins), default=0)
        joined = {i: self._joined.of(self._component[i]) for i in node.ins
                  if self._component[i] >= 0 and self._stage[i] == stage}  # fmt: skip
        keys = any(jnp.issubdtype(self.block.avals[i].dtype, jax.dtypes.extended) for i in (*node.ins, *node.outs))
        inside = not of_batch and not keys and _is_pure(node, strategy, self._most)
        # Matrices meet in few numbers, such as a norm of all: only whole-matrix work joins components.
        inside = inside and (is_whole or len(set(joined.values())) < 2)
        component = -1
        if not inside:
            stage += bool(joined)
        elif is_whole or joined:
            component = min(joined.values(), default=len(self._at))  # from its first operation
            for other in joined.values():
                self._joined.tie(other, component)
        self._at.append((stage, component))
        self._alone.append(inside)
        for o in node.outs:
            self._stage[o], self._component[o] = stage, component

    def _takes_all(self, k: int) -> bool:
        """Check whether an operation would gather returned slices, as picks from a sorted array do."""
        at, avals, node = self.placed.placements, self.block.avals, self.block.nodes[k]
        there = any(self._component[i] >= 0 and isinstance(at[i], Replicated) for i in node.ins
                    if self.infer.choose(avals[i].shape) is not None)  # fmt: skip
        gathers = node.name in CONTRACTION or all(isinstance(at[o], Replicated) for o in node.outs)
        return self._moved[k] > 0 or (there and gathers)

    def found(self) -> list[Component]:
        """Return the components, without operations that merely depend on them."""
        members: dict[_Key, _Places] = {}
        needed: dict[int, set[_Key]] = {}  # values, and the components that take them
        for k, node in reversed([*enumerate(self.block.nodes)]):
            stage, component = self._at[k]
            if component < 0:
                continue
            key = stage, self._joined.of(component)
            if self._whole[k] or self._takes_all(k) or any(key in needed.get(o, ()) for o in node.outs):
                members.setdefault(key, {})[k] = None
                for i in node.ins:
                    needed.setdefault(i, set()).add(key)
        return [self._of(members[key], key[0]) for key in sorted(members)]

    def _of(self, own: _Places, stage: int) -> Component:
        self._take_makers(own)
        nodes = [self.block.nodes[k] for k in sorted(own)]
        made = dict.fromkeys(o for node in nodes for o in node.outs)
        taken = dict.fromkeys(i for node in nodes for i in node.ins)
        ins = tuple(i for i in taken if i not in made and i not in self.block.known)
        return Component(nodes, ins, tuple(o for o in made if not self._is_for(o, own)), stage)

    def _is_for(self, i: int, own: _Places) -> bool:
        """Check whether only these operations take a value."""
        return i not in self._results and all(k in own for k in self.block.users.get(i, ()))

    def _take_makers(self, own: _Places) -> None:
        """Add operations that make their operands, such as a transposed copy, unless that sends more."""
        taken = [i for k in own for i in self.block.nodes[k].ins]
        for i in taken:  # grows
            k = self._maker.get(i, -1)
            if k < 0 or k in own or self._at[k][1] >= 0 or not self._alone[k]:
                continue
            node = self.block.nodes[k]
            sent = sum(map(self._bytes, set(node.ins).difference(taken)))
            if all(self._is_for(o, own) for o in node.outs) and sent <= sum(map(self._bytes, node.outs)):
                own[k] = None
                taken += node.ins

    def _bytes(self, i: int) -> int:
        return nbytes(self.block.avals[i]) if isinstance(self.placed.placements[i], Split) else 0


def _is_of_batch(p: Placement) -> bool:
    return isinstance(p, Split) and not p.of_state


def _is_pure(node: Node, strategy: Strategy, most: int) -> bool:
    if has_effect(node.eqn) or node.name in FOR_ITSELF:
        return False
    return all(
        body.matrices <= most
        and all(_is_pure(n, s, most) for n, s in zip(body.block.nodes, body.strategies, strict=True))
        for body in strategy.bodies
    )
