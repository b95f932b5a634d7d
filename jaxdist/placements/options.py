"""The choice among the options of a block's operations: those with which a device takes the least time for all of it.

A walk takes for each operation what moves least for it alone. Others that it offers are worth it for several at once,
or not at all: a weight that is not gathered for one product is gathered for the next, a gradient that is made in slices
is added to one that is not. So operations are switched together that share a weight, make terms of one sum, or are the
same line of the user's on the same shapes; in a descent over such groups, from none and from all of them switched. It
depends on the block alone, and counts what it tries: every rank finds the same.

References:
  Zheng et al., *Alpa*, arXiv 2201.12023, section 4 (the strategies of operations, and what it takes to get from one to
  the next); Li et al., *Automatically finding efficient layouts*, TOAST, arXiv 2508.15010.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from jaxdist.placements.block import TO_A_SUM, Block, Classes, Node
from jaxdist.placements.cost import cost, descend, seconds, sent_by
from jaxdist.placements.marks import used_in_slices
from jaxdist.placements.strategy import Placed, Weighed, nbytes
from jaxdist.placements.values import REPLICATED, Partial, Placement, Split
from jaxdist.placements.walk import Choice, Walk

_OPERATIONS, _FEWEST = 30_000, 8
"""How often a block is walked at most: less often the more operations it has, but not less than so often."""
_SURE = 1 / 5
"""How much longer messages are taken to be that only a switched option sends: estimates are no better than that."""

IN_SLICES = "sums that are used in slices are made so"
ALL = "computed whole on every device, of examples that are gathered first"
"""The names of options."""

On = frozenset[int]
"""The groups of operations that are switched."""


def best(
    infer: Any,
    block: Block,
    ins: Sequence[Placement],
    loose: frozenset[int] = frozenset(),
    whole: frozenset[int] = frozenset(),
) -> Placed:
    """A block, placed as costs least; without owners in it, other than in its bodies."""
    walk = Walk(infer, block, ins, loose, Choice(whole=whole))
    groups = _groups(walk)
    return _Descent(walk, groups).best() if groups else walk.placed


def or_whole(
    infer: Any, block: Block, placed: Placed, ins: Sequence[Placement], messages: Callable[[Placed], int]
) -> Placed:
    """A step as it is placed; or computed whole on every device, where that takes less time than the messages between
    its parts. What is kept in shards stays so."""
    examples = [k for k, p in enumerate(ins) if isinstance(p, Split) and not p.stored]
    if not examples:
        return placed
    link, machine = infer.link, infer.machine
    size = sum(nbytes(block.avals[block.inputs[k]]) for k in examples)
    gathered, computed = link.seconds("all-gather", size), seconds(placed, machine)
    moves = sum(times for _, times in placed.moves)
    if max(gathered, computed) > moves * link.latency:  # whichever of these travel together
        return placed
    whole = infer.place(block, ins, placed.outs, whole=frozenset(examples))
    more = gathered + seconds(whole, machine) - computed
    before = messages(placed)
    if more >= before * link.latency:  # nor if all of them were saved: it need not be traced
        return placed
    more -= (before - messages(whole)) * link.latency
    sent = link.sent("all-gather", size) + sent_by(whole, infer) - sent_by(placed, infer)
    one = Weighed((), ALL, more < 0, abs(more), -sent if more < 0 else sent)
    taken = replace(whole, whole=True) if one.taken else placed
    return replace(taken, weighed=[*taken.weighed, one])


class _Descent:
    """The search over groups of operations."""

    def __init__(self, walk: Walk, groups: Sequence[Choice]):
        self._infer, self._block, self._usually, self._groups = walk.infer, walk.block, walk, groups
        self._left = max(_FEWEST, _OPERATIONS // max(len(walk.block.nodes), 1))
        self._usual = _messages(walk.placed)
        cost = self._cost(walk.placed)
        self._known: dict[On, tuple[float, float, Placed]] = {On(): (cost, cost, walk.placed)}

    def best(self) -> Placed:
        """The end of a descent from all or none of them, whichever costs less."""
        groups = [On({k}) for k in range(len(self._groups))]
        start = min(On(), On().union(*groups), key=self._value)
        on = descend(start, groups, lambda on, group: [on ^ group], self._value)
        return replace(self._known[on][2], weighed=self._weighed(on))

    def _weighed(self, on: On) -> list[Weighed]:
        """What it would cost to switch each group once more."""
        _, cost, placed = self._known[on]
        sent, found = sent_by(placed, self._infer), list[Weighed]()
        for k, group in enumerate(self._groups):
            if (other := self._known.get(on ^ {k})) is not None:
                name, nodes = self._what(group)
                found.append(Weighed(nodes, name, k in on, other[1] - cost, sent_by(other[2], self._infer) - sent))
        return found

    def _what(self, group: Choice) -> tuple[str, list[Node]]:
        """The option that a group takes, and its operations."""
        names = {*group.names.values(), *group.everywhere}
        nodes = [
            node
            for node, one in self._usually.offers
            if one.name in names and (one.together or id(node) in group.names)
        ]
        if names:
            return names.pop(), nodes
        return IN_SLICES, [self._block.makers[i] for i in group.slices if i in self._block.makers]

    def _value(self, on: On) -> float:
        if on not in self._known:
            if not self._left:
                return float("inf")
            self._left -= 1
            chosen = [self._groups[k] for k in sorted(on)]
            choice = Choice(
                {node: name for one in chosen for node, name in one.names.items()},
                frozenset().union(*(one.everywhere for one in chosen)),
                {i: to for one in chosen for i, to in one.slices.items()},
                self._usually.choice.whole,
            )
            placed = self._usually.again(choice).placed
            cost, others = self._cost(placed), _messages(placed) - self._usual
            unsure = sum(times * self._infer.link.seconds(*message) for message, times in others.items())
            self._known[on] = cost + _SURE * unsure, cost, placed
        return self._known[on][0]

    def _cost(self, placed: Placed) -> float:
        """What the block costs, with its summands added up if nothing else does it. Options differ little in what a
        device reads and writes, and its caches may hold that."""
        if placed.block.outermost:
            wants = [REPLICATED if isinstance(p, Partial) else None for p in placed.given]
            placed = placed.returning(self._infer, wants)
        return cost(placed, self._infer, memory=False)


def _messages(placed: Placed) -> Counter[tuple[str, int]]:
    """The kind and bytes of what travels, and how often."""
    found = Counter[tuple[str, int]]()
    for move, times in placed.moves:
        if not move.again:
            found[move.kind, move.bytes] += times
    return found


def _groups(walk: Walk) -> list[Choice]:
    """What is switched together, in the order of the first operation of each."""
    classes = Classes[Hashable]()
    apart = [(node, one.name) for node, one in walk.offers if not one.together]
    for node, name in apart:
        for tie in (*_ties(walk, node), (node.name, node.line, *walk.shapes(node.ins))):
            classes.tie((id(node), name), (name, tie))
    groups: dict[Hashable, dict[int, str]] = {}
    for node, name in apart:
        groups.setdefault(classes.of((id(node), name)), {})[id(node)] = name
    found = [Choice(names) for names in groups.values()]
    together = dict.fromkeys(one.name for _, one in walk.offers if one.together)
    found += [Choice(everywhere=frozenset({name})) for name in together]
    if slices := used_in_slices(walk):
        found.append(Choice(slices=slices))
    return found


def _ties(walk: Walk, node: Node) -> list[Hashable]:
    """The weights that an operation takes, and the sums that its results are terms of."""
    block, found = walk.block, list[Hashable]()
    for i in map(block.source, node.ins):
        if i in walk.inputs:
            found.append(("weight", i))
    for o in node.outs:
        while block.uses[o] == 1 and o in walk.next and walk.next[o].name in TO_A_SUM:
            o = walk.next[o].outs[0]
        found.append(("sum", o))
    return found
