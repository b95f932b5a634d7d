"""The results of inference: a strategy for each operation, and the placements of a whole block."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.placements.block import Block, Node
from jaxdist.placements.values import REPLICATED, Deferred, Form, Partial, Placement, Split

UNKNOWN = (  # the reason to compute an operation whole if it has no description
    "jaxdist does not know this operation. If it is your own, jaxdist.placements.register describes it; "
    "if it is JAX's, please report it: https://github.com/jaxdist/jaxdist/issues"
)
IN_PLACE = "instead of a weight, which is larger"  # the reason that batch values are sent although a weight could be


@dataclass(eq=False)
class Strategy:
    """A way to run an operation on the devices."""

    takes: Sequence[Form | None]  # the form of each operand; None if it is only taken once its result is made
    gives: Sequence[Placement]  # the placement of each result
    run: Callable[[Any, Node, list[Any]], Sequence[Any]] | None = None  # ``run(emitter, node, operands) -> results``
    make: Callable[[Any, Node, Any], Any] | None = None  # of a deferred result: ``make(emitter, node, form) -> result``
    slicewise: bool = False  # a result slice needs only the same slices of operands of its shape
    bodies: "Sequence[Placed]" = ()  # for control flow
    exchanges: bool = False  # it communicates on its own
    why: str = ""  # the reason that every device computes the whole operation
    instead: str = ""  # the reason that its operands are sent, although an alternative exists
    then: Sequence[Form] = ()  # the form to convert each result to at once, if any
    name: str = ""  # the option's name; the default option has none
    seconds: dict[bool, float] = field(default_factory=dict)  # that it computes, with and without its memory traffic


@dataclass(eq=False)
class Move:
    """A value that changes its form."""

    node: Node  # the operation that needs the new form
    kind: str  # ``"all-gather"``, ``"all-to-all"``, ``"all-reduce"``, ``"reduce-scatter"``
    aval: Any  # the value's logical type
    stored: bool  # it is sharded between steps, or depends only on such values
    why: str  # the reason that slices do not suffice, or `IN_PLACE`
    waited_for: bool = False  # a product needs it, and unlike shards it cannot be fetched ahead
    again: bool = False  # it was sent for a different operation before and is still present

    @property
    def bytes(self) -> int:
        """Return the size of the whole value."""
        return nbytes(self.aval)


@dataclass(eq=False)
class Placed:
    """A block with settled placements."""

    block: Block
    ins: tuple[Form, ...]  # the forms of its inputs
    axis: str  # the name of the axis that it is placed over
    strategies: list[Strategy] = field(default_factory=list)  # one per operation
    at: list[Any] = field(default_factory=list)  # the placement of each value
    outs: tuple[Form, ...] = ()  # the forms in which outputs are returned
    given: tuple[Placement, ...] = ()  # the placements of the outputs
    own: list[Move] = field(default_factory=list)  # changes of form outside loops and branches
    summed: frozenset[int] = frozenset()  # inputs given as summands and added up inside
    matrices: int = 0  # the number of components in it (`jaxdist.placements.matrices`)

    def returning(self, infer: Any, wants: Sequence[Form | None]) -> "Placed":
        """Return this block with outputs converted to these forms; None keeps a form."""
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
        """Return the forms in which a value is used; None stands for an unsettled one."""
        block, taken = self.block, set[Form | None]()
        seen, todo = {i}, [i]
        for own in todo:  # the list grows by unsettled elementwise results
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
        """Return the placement of an output; a deferred one takes the slice that all uses take."""
        if isinstance(p := self.given[k], Deferred):
            used = self.forms_of(self.block.outputs[k], returned=False)
            if len(used) == 1 and isinstance(to := used.pop(), Split):
                return to
        return p

    def blocks(self, times: int = 1) -> "Iterator[tuple[Placed, int]]":
        """Yield the block and those in its loops and branches, with how often each runs."""
        yield self, times
        for node, strategy in zip(self.block.nodes, self.strategies, strict=True):
            for body in strategy.bodies:
                yield from body.blocks(times * node.turns)

    @property
    def moves(self) -> list[tuple[Move, int]]:
        """Return values that change form, in loops and branches too, with how often each does."""
        return [(move, times) for one, times in self.blocks() for move in one.own]

    @property
    def communicates(self) -> bool:
        """Check whether a device waits for others in this block."""
        return any(one.own or any(strategy.exchanges for strategy in one.strategies) for one, _ in self.blocks())


def sliced(
    given: Sequence[Placement], placed: Sequence[Placed], place: Callable[[Sequence[Placement]], Sequence[Placed]]
) -> tuple[Sequence[Placement], Sequence[Placed]]:
    """Cut values that bodies only use in one slice before the bodies: their new placements, and the bodies'."""
    cut, block = list(given), placed[0].block
    for k in range(len(given)):
        if placed[0].ins[k] == REPLICATED and block.avals[block.inputs[k]].shape:
            taken = {to for one in placed for to in one.forms_of(one.block.inputs[k])}
            if len(taken) == 1 and isinstance(to := taken.pop(), Split):
                cut[k] = to
    # Not if that changes the outputs or adds messages.
    facts = lambda bodies: [(one.given, one.summed, len(one.moves)) for one in bodies]
    if cut != list(given) and facts(again := place(cut)) == facts(placed):
        return cut, again
    return given, placed


def nbytes(aval: Any) -> int:
    """Return the size of a whole value."""
    return math.prod(aval.shape) * (8 if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else aval.dtype.itemsize)
