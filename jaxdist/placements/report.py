"""What a placed step moves, and what every device computes again: for `jaxdist.explain` and the warning at compile time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from jaxdist import compat
from jaxdist.placements.block import Block, Node
from jaxdist.placements.infer import Move, Placed, Plan
from jaxdist.placements.values import Replicated, Split

_WORTH_SAYING = 0.01
_ACTIVATIONS = ("all-gather", "all-to-all")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      what: ``"all-gather"``, ``"all-reduce"``, ... or ``"repeated"`` for work that every device does.
      operation: the primitive that needs it so.
      line: file:line of the user's code.
      bytes: of the whole value, in a step.
      flops: that every device repeats, in a step.
      share: of that in all that a device computes.
      why: it is needed whole.
      instead: what would avoid it.
    """

    what: str
    operation: str
    line: str
    bytes: int = 0
    flops: int = 0
    share: float = 0.0
    why: str = ""
    instead: str = ""


def rows(placed: Placed) -> list[Row]:
    """What moves, most bytes first, then what is repeated."""
    moved: dict[tuple[str, str, str, str], int] = {}
    for move, times in _moves(placed, 1):
        key = (_kind(move), move.node.name, compat.user_line(move.node.eqn), move.why)
        moved[key] = moved.get(key, 0) + move.bytes * times
    table = [
        Row(
            what,
            name,
            line,
            size,
            why=why or (_REASONS.get(name, "") if _moves_batch(what) else ""),
            instead=_INSTEAD.get(name, "") if _moves_batch(what) else "",
        )
        for (what, name, line, why), size in sorted(moved.items(), key=lambda item: -item[1])
    ]
    total = 0
    repeated: dict[tuple[str, str], int] = {}
    sizes = {p.outer * p.size for p in map(placed.at.__getitem__, placed.block.inputs) if _is_batch(p)}
    for node, plan, cost, batch in _work(placed, 1):
        total += cost
        large = any(
            sizes & set(a.shape) for a in (*(v.aval for v in node.eqn.invars), *(v.aval for v in node.eqn.outvars))
        )
        if batch and large and all(isinstance(p, Replicated) for p in plan.takes if p is not None):
            key = node.name, compat.user_line(node.eqn)
            repeated[key] = repeated.get(key, 0) + cost
    for (name, line), cost in sorted(repeated.items(), key=lambda item: -item[1]):
        table.append(
            Row("repeated", name, line, flops=cost, share=cost / max(total, 1), why="every device has all of it")
        )
    return table


def warning(placed: Placed) -> str:
    """What a user should know of a step that is about to be compiled; nothing if all is well."""
    lines = []
    for row in rows(placed):
        if row.what == "repeated" and row.share > _WORTH_SAYING:
            lines.append(f"{row.operation} at {row.line} is computed by every device: {row.share:.0%} of its work")
        elif _moves_batch(row.what):
            lines.append(
                f"{row.operation} at {row.line} moves {_size(row.bytes)} of activations ({row.what.removesuffix(' of activations')})"
            )
        elif row.what.endswith("of shards") and row.why:
            lines.append(f"{row.operation} at {row.line} gathers {_size(row.bytes)} from shards: {row.why}")
    if not lines:
        return ""
    more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
    return (
        "each call moves or repeats what couples examples; jaxdist.explain says more:\n  "
        + "\n  ".join(lines[:5])
        + more
    )


def _is_batch(p: object) -> bool:
    return isinstance(p, Split) and not p.stored


def _moves_batch(what: str) -> bool:
    return what.endswith("of activations")


def _kind(move: Move) -> str:
    if move.kind not in _ACTIVATIONS:
        return move.kind
    return f"{move.kind} of {'shards' if move.stored else 'activations'}"


def _times(node: Node) -> int:
    return node.eqn.params["length"] if node.name == "scan" else 1


def _moves(placed: Placed, times: int) -> Iterator[tuple[Move, int]]:
    for move in placed.own:
        yield move, times
    for node, plan in zip(placed.block.nodes, placed.plans, strict=True):
        for body in plan.bodies:
            yield from _moves(body, times * _times(node))


def _work(placed: Placed, times: int, given: Sequence[bool] | None = None) -> Iterator[tuple[Node, Plan, int, bool]]:
    """Each operation with the FLOPs of a device, and whether it follows from the batch."""
    block = placed.block
    batch = [False] * len(block.avals)
    for k, i in enumerate(block.inputs):
        batch[i] = _is_batch(placed.at[i]) or bool(given and given[k])
    for node, plan in zip(block.nodes, placed.plans, strict=True):
        follows = any(batch[i] for i in node.ins)
        for o in node.outs:
            batch[o] = follows
        if plan.bodies:
            for body in plan.bodies:
                n = len(body.block.inputs)
                inner = [batch[i] for i in node.ins[-n:]] if n <= len(node.ins) else None
                yield from _work(body, times * _times(node), inner)
        else:
            yield node, plan, times * flops(block, node, plan), follows


def flops(block: Block, node: Node, plan: Plan | None = None) -> int:
    """Of an operation as a device runs it; of a contraction, and an entry of anything else as one.

    Args:
      block: of the operation.
      node: the operation.
      plan: how it is placed; None: on one device.
    """

    def size(i: int, p: object) -> int:
        shape = block.avals[i].shape
        return math.prod(p.shape(shape) if isinstance(p, Split) else shape)

    takes = plan.takes if plan else [None] * len(node.ins)
    gives = plan.gives if plan else [None] * len(node.outs)
    if node.name == "dot_general":
        (contracted, _), _ = node.eqn.params["dimension_numbers"]
        p, shape = takes[0], block.avals[node.ins[0]].shape
        shape = p.shape(shape) if isinstance(p, Split) else shape
        return 2 * size(node.outs[0], gives[0]) * math.prod(shape[d] for d in contracted)
    if node.name == "conv_general_dilated":
        p, kernel = takes[1], block.avals[node.ins[1]].shape
        kernel = p.shape(kernel) if isinstance(p, Split) else kernel
        out = node.eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * size(node.outs[0], gives[0]) * math.prod(kernel) // max(kernel[out], 1)
    numbers = [o for o in node.outs if not jax.numpy.issubdtype(block.avals[o].dtype, jax.dtypes.extended)]
    return sum(size(o, p) for o, p in zip(node.outs, gives, strict=True) if o in numbers)


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


_REASONS = {
    "dot_general": "each example meets all others",
    "gather": "entries are picked from the whole batch",
}
_INSTEAD = {
    "gather": "shuffle in the loader rather than in the step",
    "slice": "split the batch in the loader, or take every k-th example: x[i::k]",
    "reshape": "(B,) -> (B // k, k) keeps each device's examples, (k, B // k) does not",
    "sort": "a running quantile in the state, or jaxdist.per_device",
    "top_k": "jaxdist.per_device, for the hardest of each device's part",
    "rev": "pair examples in the loader",
    "dot_general": "jaxdist.per_device, to compare within each device's part only",
}
