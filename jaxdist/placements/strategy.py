"""What inference settles: a strategy for each operation, and all of a block's together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.placements.block import Block, Node
from jaxdist.placements.values import REPLICATED, Deferred, Form, Partial, Placement, Split

UNKNOWN = (
    "jaxdist does not know this operation. If it is your own, jaxdist.placements.register describes it; "
    "if it is JAX's, please report it: https://github.com/jaxdist/jaxdist/issues"
)
"""Why an operation has to be computed whole of which there is no description."""

IN_PLACE = "in place of a weight, which is larger"
"""Why values of a batch move where they need not."""


@dataclass(eq=False)
class Strategy:
    """How an operation runs on the devices."""

    # the form in which it takes each operand; None: it does not, until its deferred result is made
    takes: Sequence[Form | None]
    gives: Sequence[Placement]  # the placement of each result
    # ``run(emitter, node, operands) -> results``, each what a device holds
    run: Callable[[Any, Node, list[Any]], Sequence[Any]] | None = None
    make: Callable[[Any, Node, Any], Any] | None = None  # of a deferred result: ``make(emitter, node, form) -> result``
    slicewise: bool = False  # a slice of that is made of the same slices of operands of its shape
    bodies: Sequence[Placed] = ()  # of control flow
    exchanges: bool = False  # it talks to other devices by itself
    why: str = ""  # the operation is computed whole on every device, for this reason
    instead: str = ""  # its operands move for this reason, where something else could
    then: Sequence[Form] = ()  # the form into which each result is brought at once; (): it stays as it is made
    name: str = ""  # of the option, where the operation has others; "": what is taken unless another one costs less


@dataclass(eq=False)
class Move:
    """A value that changes its form."""

    node: Node  # the operation that needs it so
    kind: str  # ``"all-gather"``, ``"all-to-all"``, ``"all-reduce"``, ``"reduce-scatter"``
    aval: Any  # the value's logical type
    stored: bool  # it is kept in shards between steps, or made of such alone
    why: str  # what the operation can't do on slices, or `IN_PLACE`
    waited_for: bool = False  # a product follows from it, and it can't be fetched ahead, as what is kept in shards can
    again: bool = False  # it has moved for another operation already, and stays

    @property
    def bytes(self) -> int:
        """Of the whole value."""
        return nbytes(self.aval)


@dataclass(eq=False)
class Placed:
    """A block whose placements are settled."""

    block: Block  # its operations
    ins: tuple[Form, ...]  # how it is given its inputs
    axis: str  # the name of the axis that it is placed over
    strategies: list[Strategy] = field(default_factory=list)  # by operation
    at: list[Any] = field(default_factory=list)  # by value: its placement
    outs: tuple[Form, ...] = ()  # in which form it returns its outputs
    given: tuple[Placement, ...] = ()  # how they come
    own: list[Move] = field(default_factory=list)  # what changes its form, outside loops and branches
    summed: frozenset[int] = frozenset()  # inputs that came as summands and were added up inside
    matrices: int = 0  # how many components work on whole matrices in it (`jaxdist.placements.matrices`)

    def returning(self, infer: Any, wants: Sequence[Form | None]) -> Placed:
        """The same, with its outputs in these forms; None: as they come."""
        outs = tuple(own if want is None else want for own, want in zip(self.outs, wants, strict=True))
        inputs = {i: k for k, i in enumerate(self.block.inputs)}
        summed = {
            inputs[i]
            for i, to in zip(self.block.outputs, outs, strict=True)
            if i in inputs and isinstance(self.at[i], Partial) and not isinstance(to, Partial)
        }
        makers = self.block.makers
        moves = [
            Move(makers[i], kind, self.block.avals[i], isinstance(p, Split) and p.stored, "")
            for i, p, to in zip(self.block.outputs, self.given, outs, strict=True)
            if i in makers and (kind := infer.move(p, to, self.block.avals[i]))
        ]
        return replace(self, outs=outs, summed=self.summed | summed, own=[*self.own, *moves])

    def forms_of(self, i: int, returned: bool = True) -> set[Form | None]:
        """The forms in which a value is used; None: in one that is not settled yet."""
        block, taken = self.block, set[Form | None]()
        seen, todo = {i}, [i]
        for own in todo:  # and what is made of it entry by entry, and not settled yet either
            if returned:
                taken.update(to for o, to in zip(block.outputs, self.outs, strict=True) if o == own)
            for k in block.users.get(own, ()):
                node, strategy = block.nodes[k], self.strategies[k]
                if strategy.make is None:
                    taken.update(to or REPLICATED for o, to in zip(node.ins, strategy.takes, strict=True) if o == own)
                elif not strategy.slicewise or block.avals[own].shape != block.avals[node.outs[0]].shape:
                    taken.add(None)
                elif node.outs[0] not in seen:
                    seen.add(node.outs[0])
                    todo.append(node.outs[0])
        return taken

    def returned(self, k: int) -> Placement:
        """How an output comes; if it may come in any form, in that in which it is used before."""
        if isinstance(p := self.given[k], Deferred):
            used = self.forms_of(self.block.outputs[k], returned=False)
            if len(used) == 1 and isinstance(to := used.pop(), Split):
                return to
        return p

    def alike(self, other: Placed) -> bool:
        """Whether another placing of the block returns the same, and moves as much."""
        return (self.given, self.summed, len(self.moves)) == (other.given, other.summed, len(other.moves))

    def blocks(self, times: int = 1) -> Iterator[tuple[Placed, int]]:
        """The block and those in its loops and branches, and how often each runs."""
        yield self, times
        for node, strategy in zip(self.block.nodes, self.strategies, strict=True):
            for body in strategy.bodies:
                yield from body.blocks(times * node.turns)

    @property
    def moves(self) -> list[tuple[Move, int]]:
        """What changes its form, in loops and branches too, and how often."""
        return [(move, times) for one, times in self.blocks() for move in one.own]

    @property
    def communicates(self) -> bool:
        """Whether a device waits for others in it."""
        return any(one.own or any(strategy.exchanges for strategy in one.strategies) for one, _ in self.blocks())


def cuts(bodies: Sequence[Placed]) -> dict[int, Split]:
    """The inputs that are on every device, and of which the bodies use one slice alone; and which that is."""
    found: dict[int, Split] = {}
    for k, own in enumerate(bodies[0].ins):
        if own == REPLICATED and bodies[0].block.avals[bodies[0].block.inputs[k]].shape:
            taken = {to for placed in bodies for to in placed.forms_of(placed.block.inputs[k])}
            if len(taken) == 1 and isinstance(to := taken.pop(), Split):
                found[k] = to
    return found


def sliced(
    given: Sequence[Placement],
    placed: Sequence[Placed],
    place: Callable[[Sequence[Placement]], Sequence[Placed]],
) -> tuple[Sequence[Placement], Sequence[Placed]]:
    """Cut what bodies use in slices alone once, before them, if nothing else changes.

    Returns `given` and `placed` after that.
    """
    if slices := {k: to for k, to in cuts(placed).items() if k < len(given)}:
        cut = [slices.get(k, p) for k, p in enumerate(given)]
        again = place(cut)
        if all(a.alike(b) for a, b in zip(again, placed, strict=True)):
            return cut, again
    return given, placed


def nbytes(aval: Any) -> int:
    """Of a whole value."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * 8
    return math.prod(aval.shape) * aval.dtype.itemsize
