"""The marks of `jaxdist.zero` and `jaxdist.shard`: equations of `shard_p` in a traced step.

A mark on an unmodified input of the step says how to keep it between steps (`marks`). A mark on an optimizer's
operand says in which slices to add it up (`slices_wanted`): at level 1 as at level 2, as nothing needs whole gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxdist.ir.interpreter import CONTROL_FLOW, bodies, equations
from jaxdist.ir.operations import SAME, is_elementwise
from jaxdist.ir.primitives import shard_p
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.layouts import Cut, choose
from jaxdist.placements.model.strategy import Inference
from jaxdist.placements.model.values import reshaped

_KEPT = {"state": 1, "parameter": 3, "requested": 0}  # the level from which an input is in shards


@dataclass(frozen=True)
class Source:
    """A value that equals input `index`, except for its dtype if not `exact`."""

    index: int
    exact: bool = True


@dataclass
class Marks:
    """The marks found in a step."""

    roles: dict[int, str] = field(default_factory=dict)  # by input, ``"state"`` or ``"parameter"`` of `jaxdist.zero`
    levels: set[int] = field(default_factory=set)  # the levels used in the step
    sharded: set[int] = field(default_factory=set)  # inputs to keep in shards
    offloaded: set[int] = field(default_factory=set)  # inputs to keep in the host's memory
    sliced: set[int] = field(default_factory=set)  # inputs that a loop slices, or whose rows are looked up
    parameters: bool = False  # whether parameters are to be in shards as well

    def cuts(self, shapes: Sequence[tuple[int, ...]], devices: int) -> list[Cut | None]:
        """Return each input's cut (by its shape), or None if it stays whole."""
        # By shape: a parameter, its gradient and its moments meet entry by entry, so they are cut alike.
        sliced = {shapes[i] for i in self.sliced}
        return [
            choose(shape, devices, (0,) if shape in sliced else ()) if i in self.sharded else None
            for i, shape in enumerate(shapes)
        ]


def marks(infer: Inference, block: Block) -> Marks:
    """Collect the marks of a step."""
    collected = Marks()
    _follow(infer, block, [Source(i) for i in range(len(block.inputs))], collected)
    if collected.parameters and "parameter" not in collected.roles.values():
        raise ValueError(
            "zero(level=3) keeps the parameters in shards, and finds no argument of the step that they are: tell it, "
            "tx.update(grads, state, params)"
        )
    return collected


def _follow(infer: Inference, block: Block, inputs: Sequence[Source | None], collected: Marks) -> list[Source | None]:
    """Follow inputs through a block, collect the marks on the way, and return where the outputs are from."""
    env = dict(zip(block.inputs, inputs, strict=True))
    for node in block.traced:  # not `nodes`: what marks a parameter is dead code if the optimizer ignores it
        args = [env.get(i) for i in node.ins]
        if node.name in CONTROL_FLOW:
            outs = _in_bodies(infer, node, args, collected)
        else:
            outs = _in_operation(infer, node, args, collected)
        env.update(zip(node.outs, outs, strict=True))
    return [env.get(i) for i in block.outputs]


def _in_bodies(
    infer: Inference, node: Node, args: Sequence[Source | None], collected: Marks
) -> Sequence[Source | None]:
    """Follow inputs through bodies; keep sources that all branches agree on and no turn changes."""
    by_body = []
    for body in bodies(node.eqn):
        # A loop's condition marks nothing, and none of its outputs is a result.
        if not body.outs:
            continue
        # A loop over stacked layers takes one layer in each turn: cut along dimension 0, a single device would have it.
        collected.sliced |= {a.index for k in body.xs if (a := args[body.ins[k]])}
        sources = [None if k in body.xs else args[i] for k, i in enumerate(body.ins)]
        outs = _follow(infer, infer.block(body.closed, node.backward), sources, collected)
        for o, k in enumerate(body.carry):
            outs[o] = outs[o] if outs[o] == sources[k] else None
        by_body.append([None if o in body.ys else source for o, source in enumerate(outs)])
    return [outs[0] if len(set(outs)) == 1 else None for outs in zip(*by_body, strict=True)]


def _in_operation(
    infer: Inference, node: Node, args: Sequence[Source | None], collected: Marks
) -> Sequence[Source | None]:
    """Collect the mark that an operation is, and return where its results are from."""
    name, params = node.name, node.eqn.params
    if name == "jaxdist_shard":
        _mark(params, args[0], infer.level(node), collected)
    if name == "gather" and args[0] and 0 in params["dimension_numbers"].collapsed_slice_dims:
        collected.sliced.add(args[0].index)
    if name in SAME:
        return args[: len(node.outs)]
    if name == "convert_element_type" and args[0]:
        return [replace(args[0], exact=False)]
    return args if name == "optimization_barrier" else [None] * len(node.outs)


def _mark(params: Mapping[str, Any], source: Source | None, level: int, collected: Marks) -> None:
    """Record a mark at this level on the input that it belongs to; the values it keeps in shards between steps:

    =========  =============  =======================================================================
    role       in shards      what
    =========  =============  =======================================================================
    state      from level 1   the optimizer's state
    gradient   never          it does not live that long; from level 1 on it is added up in slices
    parameter  from level 3   the parameters
    requested  at any level   arrays that the user shards (`jaxdist.shard`)
    =========  =============  =======================================================================
    """
    role = params["role"]
    if role != "requested":
        collected.levels.add(params["level"])
    collected.parameters |= role == "gradient" and level == 3
    if source:
        if role in ("state", "parameter"):
            collected.roles.setdefault(source.index, role)
        if source.exact and role in _KEPT and level >= _KEPT[role]:
            collected.sharded.add(source.index)
            if params["offload"] and role == "state":
                collected.offloaded.add(source.index)


def slices_wanted(infer: Inference, block: Block) -> dict[int, int]:
    """Map each value that leads to a mark, by operations that keep slices apart, to the dimension to split."""
    dims: dict[int, int] = {}
    for node in reversed(block.nodes):
        if node.name == "jaxdist_shard":
            dim = infer.shard_dim(block.avals[node.ins[0]].shape)
            if dim is not None and node.eqn.params["role"] != "requested" and infer.level(node) > 0:
                dims.setdefault(node.ins[0], dim)
            continue
        if node.name == "optimization_barrier":  # each result is its operand, and they differ in shape
            for i, o in zip(node.ins, node.outs, strict=True):
                dims.update({i: dims[o]} if o in dims else {})
            continue
        dim = next((dims[o] for o in node.outs if o in dims), None)
        if dim is None:
            continue
        if node.name == "transpose":
            dims.setdefault(node.ins[0], node.eqn.params["permutation"][dim])
        elif node.name in ("reshape", "squeeze"):
            old, new = (block.avals[i].shape for i in (node.ins[0], node.outs[0]))
            operand = reshaped(infer.shard(dim, new[dim]), new, old)
            # Other slices than these no reduce-scatter makes: the sum would be made whole.
            if operand is not None and operand.is_tile(infer.devices):
                dims.setdefault(node.ins[0], operand.dim)
        # Of operands of another shape, such as a rate or a norm, each device needs all.
        elif is_elementwise(node.eqn.primitive) or node.name == "jaxdist_all_reduce":
            shape = block.avals[node.outs[0]].shape
            for i in (i for i in node.ins if block.avals[i].shape == shape):
                dims.setdefault(i, dim)
    return dims


def in_marks(closed: ClosedJaxpr, parameter: str) -> set[Any]:
    """Return the values of a parameter in the marks of a step."""
    marks = (eqn.params for eqn in equations(closed.jaxpr) if eqn.primitive is shard_p)
    return {params[parameter] for params in marks if params["level"]}
