"""The results of inference: a strategy for each operation, and the placements of a whole block."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxdist.ir.fingerprint import type_text
from jaxdist.machine import Link, Machine
from jaxdist.mesh import Axis
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.values import REPLICATED, Deferred, Form, Partial, Placement, Split

UNKNOWN = (  # the reason to compute an operation whole if it has no description
    "jaxdist does not know this operation. If it is your own, jaxdist.placements.register describes it; "
    "if it is JAX's, please report it: https://github.com/jaxdist/jaxdist/issues"
)
IN_PLACE = "instead of a weight, which is larger"  # the reason that batch values are sent although a weight could be
RETURNED = "it is returned whole"  # the reason that an output is sent


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a mesh: the one that a block is placed over."""

    name: str
    size: int
    outer: tuple[Axis, ...]  # placed before it
    inner: tuple[Axis, ...]  # placed after it
    machine: Machine  # its devices

    @property
    def placed(self) -> tuple[Axis, ...]:
        """The axes placed so far, with this one."""
        return *self.outer, Axis(self.name, self.size)

    @property
    def mesh(self) -> tuple[Axis, ...]:
        """All axes, the outermost first."""
        return *self.placed, *self.inner


class Inference(Protocol):
    """The axis that a block is placed over, as rules and searches see it (`search.infer.Infer`)."""

    axis: MeshAxis
    devices: int  # along it
    link: Link  # between them
    split: str | None  # how to run whole-matrix work, see `jaxdist.zero`
    shard_dim: Callable[[tuple[int, ...]], int | None]  # the dimension along which to shard an array of the state

    def block(self, closed: ClosedJaxpr, backward: bool = False) -> Block: ...
    def place(
        self,
        block: Block,
        ins: Sequence[Placement],
        wants: Sequence[Form | None] | None = None,
        may_stay_partial: frozenset[int] = frozenset(),
    ) -> "Propagation": ...
    def slices_wanted(self, block: Block) -> dict[int, int]: ...
    def level(self, node: Node) -> int: ...
    def shard(self, dim: int, size: int) -> Split: ...
    def reshard(self, placement: Placement, target: Form, aval: Any) -> str: ...
    def sent(self, placement: Placement, target: Form, aval: Any) -> float: ...
    def message_bytes(self, kind: str, placement: Placement, target: Form, aval: Any) -> int: ...


class DeviceContext(Protocol):
    """A device as a strategy sees it while its program is emitted (`jaxdist.placements.emit.emitter.Emitter`)."""

    placed: "Propagation"
    block: Block
    n: int  # devices along the axis
    axis: str  # its name
    marks: bool  # whether the marks of `jaxdist.zero` stay in the program

    @property
    def index(self) -> Any: ...
    def bind(self, node: Node, xs: Sequence[Any], params: Mapping[str, Any] | None = None) -> Sequence[Any]: ...
    def take(self, i: int, target: Form) -> Any: ...
    def gather(self, x: Any, dim: int, size: int) -> Any: ...
    def cut(self, x: Any, split: Split) -> Any: ...
    def positions(self, split: Split) -> Any: ...
    def real(self, split: Split, rank: int) -> Any: ...
    def masked(self, x: Any, split: Split, identity: Any) -> Any: ...
    def across(self, x: Any, kind: str) -> Any: ...
    def from_root(self, x: Any) -> Any: ...
    def body(self, placed: "Propagation") -> ClosedJaxpr: ...
    def inlined(self, placed: "Propagation", xs: Sequence[Any]) -> list[Any]: ...


Run = Callable[[DeviceContext, Node, list[Any]], Sequence[Any]]
Make = Callable[[DeviceContext, Node, Form], Any]


@dataclass(eq=False)
class Strategy:
    """A way to run an operation on the devices."""

    in_forms: Sequence[Form | None]  # the form of each operand; None if it is only taken once its result is made
    out_placements: Sequence[Placement]  # the placement of each result
    run: Run | None = None  # ``run(device, node, operands) -> results``
    make: Make | None = None  # of a deferred result: ``make(device, node, form) -> result``
    slicewise: bool = False  # a result slice needs only the same slices of operands of its shape
    bodies: "Sequence[Propagation]" = ()  # of control flow; of owners the busiest one's work, for its cost
    sends: Sequence["Sends"] = ()  # what `run` sends, besides the operands that change their form
    why: str = ""  # the reason that every device computes the whole operation
    why_sent: str = ""  # the reason that its operands are sent, although an alternative exists
    out_forms: Sequence[Form] = ()  # the form to convert each result to at once, if any
    name: str = ""  # the option's name; the default option has none
    seconds: dict[bool, float] = field(default_factory=dict)  # that it computes, with and without its memory traffic
    # Operands that are sent, with their new forms, once known: a strategy is for one key of `RuleContext.strategies`.
    changed: Sequence[tuple[int, Form]] | None = None

    @property
    def is_repeated(self) -> bool:
        """Check whether every device computes the whole operation, with the operands sent for it."""
        return bool(self.why)


@dataclass(frozen=True)
class Sends:
    """A collective that an operation runs itself."""

    kind: str  # as of `Message`
    bytes: int
    times: int = 1  # how often the operation runs it
    of_state: bool = False


@dataclass(frozen=True, eq=False)
class Message:
    """A collective over the axis: a value changes its form, or an operation sends."""

    node: Node | None  # the operation that needs the new form, or sends; for a returned value, the one that makes it
    kind: str  # ``"all-gather"``, ``"all-to-all"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"permute"``
    bytes: int  # of the whole value when it is sent: its padded slices together, or the sum, in the type it is added in
    of_state: bool  # it is sharded between steps, or depends only on such values
    why: str  # the reason that slices do not suffice, `IN_PLACE`, `RETURNED`, or ""
    waited_for: bool = False  # a product needs it, and unlike shards it cannot be fetched ahead
    again: bool = False  # it was sent for a different operation before and is still present
    times: int = 1  # how often, each time that its block runs
    reshards: bool = True  # a value changes its form; else the operation sends on its own
    value: int = -1  # the value that does
    new_form: Form | None = None  # of the value

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.node.label if self.node else "return"

    @property
    def line(self) -> str:
        """The user's line, or "" where JAX does not know it."""
        return self.node.line if self.node else ""


@dataclass(eq=False)
class Propagation:
    """A block with a placement for each value, and its messages."""

    block: Block
    in_forms: tuple[Form, ...]  # the forms of its inputs
    axis: MeshAxis  # that it is placed over
    strategies: list[Strategy] = field(default_factory=list)  # one per operation
    placements: list[Any] = field(default_factory=list)  # the placement of each value
    out_forms: tuple[Form, ...] = ()  # the forms in which outputs are returned
    out_placements: tuple[Placement, ...] = ()  # the placements of the outputs
    messages: list[Message] = field(default_factory=list)  # without those in loops and branches
    reduced_inputs: frozenset[int] = frozenset()  # inputs given as summands and added up inside
    alternatives: "list[tuple[Node, Strategy]]" = field(default_factory=list)  # those not taken by default
    matrices: int = 0  # the number of components in it (`jaxdist.placements.search.owners.components`)

    def __str__(self) -> str:
        """A line for each operation: results with their placements, operands with their forms, messages."""
        avals, notes = self.block.avals, dict[int, list[str]]()
        for message in self.messages:
            if message.node is not None and not message.again:
                value = f" of {message.value}" if message.reshards else ""
                notes.setdefault(id(message.node), []).append(f"{message.kind}{value}, {message.bytes} B")
        lines = [
            f"{i}: {type_text(avals[i].dtype, avals[i].shape)} {in_short(form)}"
            for i, form in zip(self.block.inputs, self.in_forms, strict=True)
        ]
        for node, strategy in zip(self.block.nodes, self.strategies, strict=True):
            types = [type_text(avals[i].dtype, avals[i].shape) for i in node.outs]
            results = [f"{i}: {t} {in_short(self.placements[i])}" for i, t in zip(node.outs, types, strict=True)]
            forms = zip(node.ins, strategy.in_forms, strict=True)
            operands = [
                str(number) if (number := self.block.numbers.get(i)) is not None else
                str(i) if form is None else f"{i} {in_short(form)}" for i, form in forms
            ]  # fmt: skip
            why = [strategy.name, strategy.why, *notes.get(id(node), ())]
            lines.append(f"{', '.join(results)} = {node.name} {', '.join(operands)}  # {'; '.join(filter(None, why))}")
        return "\n".join(line.removesuffix("  # ") for line in lines)

    def returning(self, infer: Inference, wants: Sequence[Form | None]) -> "Propagation":
        """Return this block with outputs converted to these forms; None keeps a form.

        Messages are made as in `propagate`: change both.
        """
        block, makers = self.block, self.block.makers
        out_forms = tuple(form if want is None else want for form, want in zip(self.out_forms, wants, strict=True))
        inputs = {i: k for k, i in enumerate(block.inputs)}
        reduced_inputs = {
            inputs[i]
            for i, target in zip(block.outputs, out_forms, strict=True)
            if i in inputs and isinstance(self.placements[i], Partial) and not isinstance(target, Partial)
        }
        messages, sent = list[Message](), {(message.value, message.new_form) for message in self.messages}
        for i, p, target in zip(block.outputs, self.out_placements, out_forms, strict=True):
            kind, of_state = infer.reshard(p, target, block.avals[i]), isinstance(p, Split) and p.of_state
            from_whole = (i, REPLICATED) in sent and not (of_state and kind == "all-to-all")  # as in `propagate`
            if not kind or (i, target) in sent or from_whole:
                continue
            sent.add((i, target))
            size = infer.message_bytes(kind, p, target, block.avals[i])
            why = RETURNED if target == REPLICATED else ""
            messages.append(Message(makers.get(i), kind, size, of_state, why, value=i, new_form=target))
        return replace(
            self,
            out_forms=out_forms,
            reduced_inputs=self.reduced_inputs | reduced_inputs,
            messages=[*self.messages, *messages],
        )

    def forms_of(self, i: int, returned: bool = True) -> set[Form | None]:
        """Return the forms in which a value is used; None stands for an unresolved one."""
        block, forms = self.block, set[Form | None]()
        seen, todo = {i}, [i]
        for value in todo:  # the list grows by unresolved elementwise results
            if returned:
                forms.update(target for o, target in zip(block.outputs, self.out_forms, strict=True) if o == value)
            for k in block.users.get(value, ()):
                node, strategy = block.nodes[k], self.strategies[k]
                if strategy.make is None:
                    operands = zip(node.ins, strategy.in_forms, strict=True)
                    forms.update(target or REPLICATED for operand, target in operands if operand == value)
                # A deferred result is made in the forms that its users take. Of this operand it takes the same slices
                # only if the operation is slicewise and does not broadcast it.
                elif not strategy.slicewise or block.avals[value].shape != block.avals[node.outs[0]].shape:
                    forms.add(None)
                elif node.outs[0] not in seen:
                    seen.add(node.outs[0])
                    todo.append(node.outs[0])
        return forms

    def returned(self, k: int) -> Placement:
        """Return the placement of an output; a deferred one takes the slice that all uses take."""
        if isinstance(p := self.out_placements[k], Deferred):
            forms = self.forms_of(self.block.outputs[k], returned=False)
            if len(forms) == 1 and isinstance(target := forms.pop(), Split):
                return target
        return p

    def blocks(self, times: int = 1) -> "Iterator[tuple[Propagation, int]]":
        """Yield the block and those in its loops and branches, with how often each runs."""
        yield self, times
        for node, strategy in zip(self.block.nodes, self.strategies, strict=True):
            for body in strategy.bodies:
                yield from body.blocks(times * node.trip_count)

    def sent(self) -> Iterator[tuple[Message, int]]:
        """Yield each message, in loops and branches too, with how often it is sent in all."""
        for propagation, times in self.blocks():
            for message in propagation.messages:
                if not message.again:
                    yield message, times * message.times

    @property
    def communicates(self) -> bool:
        """Check whether a device waits for others in this block."""
        return any(propagation.messages for propagation, _ in self.blocks())


def in_short(placement: Placement) -> str:
    """Format a placement: split(0), partial, whole, or deferred."""
    if isinstance(placement, Split):
        blocks = f" in {placement.outer} blocks" if placement.outer > 1 else ""
        return f"split({placement.dim}{blocks}{', state' if placement.of_state else ''})"
    return {Partial: "partial", Deferred: "deferred"}.get(type(placement), "whole")


def sliced(
    in_placements: Sequence[Placement],
    bodies: Sequence[Propagation],
    place: Callable[[Sequence[Placement]], Sequence[Propagation]],
) -> tuple[Sequence[Placement], Sequence[Propagation]]:
    """Cut inputs before the bodies if these use only a slice; return the inputs' placements and the bodies."""
    # Else loops hold random masks of the whole batch: a 7B model at level 3 of ZeRO took 169 GiB instead of 12.
    cut, block = list(in_placements), bodies[0].block
    for k in range(len(in_placements)):
        if bodies[0].in_forms[k] == REPLICATED and block.avals[block.inputs[k]].shape:
            forms = {target for body in bodies for target in body.forms_of(body.block.inputs[k])}
            if len(forms) == 1 and isinstance(target := forms.pop(), Split):
                cut[k] = target
    # Not if that changes the outputs or adds messages.
    facts = lambda bodies: [(b.out_placements, b.reduced_inputs, len([*b.sent()])) for b in bodies]
    if cut != list(in_placements) and facts(bodies_of_cut := place(cut)) == facts(bodies):
        return cut, bodies_of_cut
    return in_placements, bodies


def nbytes(aval: Any) -> int:
    """Return the size of a whole value."""
    return math.prod(aval.shape) * itemsize(aval.dtype)


@functools.lru_cache(maxsize=64)
def itemsize(dtype: Any) -> int:
    """Return the bytes of an entry; for a PRNG key, the bytes of its data."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 4 * jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size
    return dtype.itemsize
