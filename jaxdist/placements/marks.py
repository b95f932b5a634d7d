"""What the marks of `jaxdist.zero` say of the inputs of a step: which leaves of the state are to be kept in shards.

`jaxdist.zero` marks what its update is given. A mark on a value that is an input of the step, as it came, says how that
input is to be kept between steps: the optimizer's state in shards from level 1, parameters at level 3. Where the update
is not given the parameters, they are the inputs that its results are added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdist.ir.control_flow import CHECKPOINT, Scan, While, branches, checkpointed
from jaxdist.ir.operations import SAME, is_elementwise
from jaxdist.placements.block import Block, Node
from jaxdist.placements.infer import Infer
from jaxdist.placements.layouts import Cut, choose

_KEPT = {"state": 1, "parameter": 3, "requested": 0}


@dataclass(frozen=True)
class _From:
    """A value that is input `index`, exactly or but for its dtype."""

    index: int
    exact: bool = True


@dataclass(frozen=True)
class _Update:
    """A value made, elementwise, of an update at `level` whose parameters are not known."""

    level: int


@dataclass
class Marks:
    """What was found."""

    # by input: what it is to `jaxdist.zero`: ``"state"`` or ``"parameter"``
    roles: dict[int, str] = field(default_factory=dict)
    levels: set[int] = field(default_factory=set)  # of its uses in the step
    sharded: set[int] = field(default_factory=set)  # inputs to keep in shards
    offloaded: set[int] = field(default_factory=set)  # inputs to keep in the host's memory
    # inputs of which a loop takes slices along the first dimension, or of which rows are looked up
    sliced: set[int] = field(default_factory=set)
    updates: bool = False  # whether there is an update without parameters

    def cuts(self, shapes: Sequence[tuple[int, ...]], devices: int) -> list[Cut | None]:
        """How so many devices are to share each input; None: it is whole on each. Leaves of one shape agree."""
        sliced = {shapes[i] for i in self.sliced}
        return [
            choose(shape, devices, (0,) if shape in sliced else ()) if i in self.sharded else None
            for i, shape in enumerate(shapes)
        ]


def marks(infer: Infer, block: Block, level: int | None) -> Marks:
    """The marks of a step."""
    found = Marks()
    _follow(infer, block, [_From(i) for i in range(len(block.inputs))], found, level)
    if found.updates and "parameter" not in found.roles.values():
        raise ValueError(
            "zero(level=3) keeps the parameters in shards, and finds no argument of the step that the updates are "
            "added to: tell it which they are, tx.update(grads, state, params)"
        )
    return found


def _follow(
    infer: Infer, block: Block, inputs: Sequence[_From | _Update | None], found: Marks, level: int | None
) -> list[_From | _Update | None]:
    at: list[Any] = [None] * len(block.avals)
    for i, source in zip(block.inputs, inputs, strict=True):
        at[i] = source
    for node in block.traced:
        for o, source in zip(node.outs, _node(infer, node, [at[i] for i in node.ins], found, level), strict=True):
            at[o] = source
    return [at[i] for i in block.outputs]


def _node(
    infer: Infer, node: Node, args: list[_From | _Update | None], found: Marks, level: int | None
) -> Sequence[_From | _Update | None]:
    name, params, nothing = node.name, node.eqn.params, [None] * len(node.outs)
    if name == "jaxdist_shard":
        role, own = params["role"], params["level"]
        if role != "requested":
            found.levels.add(own)
            own = own if level is None else level
        if role == "update":
            found.updates |= own == 3
            return [_Update(own)]
        if isinstance(args[0], _From):
            if role in ("state", "parameter"):
                found.roles.setdefault(args[0].index, role)
            if args[0].exact and role in _KEPT and own >= _KEPT[role] and (own or role == "requested"):
                found.sharded.add(args[0].index)
                if params["offload"] and role == "state":
                    found.offloaded.add(args[0].index)
    if name == "gather" and isinstance(args[0], _From) and 0 in params["dimension_numbers"].collapsed_slice_dims:
        found.sliced.add(args[0].index)
    if name in SAME:
        return args[: len(node.outs)]
    update = next((a for a in args if isinstance(a, _Update)), None)
    if update is not None and is_elementwise(node.eqn.primitive):
        for source in args:
            if name == "add" and isinstance(source, _From):
                found.roles.setdefault(source.index, "parameter")
                if source.exact and update.level == 3:
                    found.sharded.add(source.index)
                return nothing
        return [update] * len(node.outs)
    if name == "convert_element_type":
        return [_From(args[0].index, exact=False) if isinstance(args[0], _From) else args[0]]
    if name == "optimization_barrier":
        return args
    if name == "scan":
        scan = Scan.of(params)
        consts, carry, xs = scan.split(args)
        found.sliced |= {a.index for a in xs if isinstance(a, _From)}
        body = infer.block(scan.body, node.backward)
        outs = _follow(infer, body, [*consts, *carry, *[None] * len(xs)], found, level)
        return [o if o == a else None for o, a in zip(outs, carry, strict=False)] + nothing[scan.carries :]
    if name == "while":
        loop = While.of(params)
        _, consts, carry = loop.split(args)
        outs = _follow(infer, infer.block(loop.body, node.backward), [*consts, *carry], found, level)
        return [o if o == a else None for o, a in zip(outs, carry, strict=True)]
    if name == "cond":
        bodies = [infer.block(b, node.backward) for b in branches(params)]
        every = [_follow(infer, b, args[1:], found, level) for b in bodies]
        return [outs[0] if len(set(outs)) == 1 else None for outs in zip(*every, strict=True)]
    if name in CHECKPOINT:
        return _follow(infer, infer.block(checkpointed(params), node.backward), args, found, level)
    return nothing
