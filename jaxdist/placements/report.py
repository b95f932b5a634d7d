"""What a placed step moves, and what every device computes again: for `jaxdist.explain` and the warning."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdist.ir.control_flow import bodies
from jaxdist.mesh import AXIS, GROUP, MODEL
from jaxdist.placements import rules
from jaxdist.placements.block import Block, Node
from jaxdist.placements.cost import flops
from jaxdist.placements.strategy import IN_PLACE, UNKNOWN, Move, Placed
from jaxdist.placements.values import Replicated, Split, reshaped
from jaxdist.text import text_of

_WORTH_SAYING = 0.01
_WORTH_SPLITTING = 1 << 17, 8  # FLOPs, and those for each entry of arguments and results
_MOST_LINES = 5
_MOST_NAMES = 2
_MOST_ROWS = 3
_MOST_CHOICES = 10
_ACTIVATIONS = ("all-gather", "all-to-all")


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    axis: str  # over which it moves; of repeated work: along which the devices repeat it
    what: str  # ``"all-gather"``, ``"all-reduce"``, ... or ``"repeated"`` for work that every device does
    operation: str  # the primitive that needs it so
    line: str  # file:line of the user's code; "": JAX does not know it
    bytes: int = 0  # of the whole value, in a step
    flops: int = 0  # that every device repeats, in a step
    share: float = 0.0  # of that in all that a device computes
    leaves: tuple[str, ...] = ()  # names of the arguments that are gathered, or changed by a gradient that is summed
    why: str = ""  # it is needed whole
    instead: str = ""  # what would avoid it


def rows(over: Sequence[Placed]) -> list[Row]:
    """What moves, most bytes first, then what is repeated."""
    if not over:
        return []
    found = _moved(over)
    placed = next((one for one in over if one.axis in (GROUP, AXIS)), over[0])
    if placed.whole:
        why = "the step is small: to compute all of it takes less time than messages would"
        return [*found, Row(placed.axis, "repeated", "all of it", "", flops=work(placed), share=1.0, why=why)]
    if again := unsplit(placed):
        share, why, instead = (
            again / work(placed),
            "no argument is taken for the batch",
            "batch_argnums= says which one is",
        )
        row = Row(placed.axis, "repeated", "all of it", "", flops=again, share=share, why=why, instead=instead)
        return [*found, row]
    for one in over:
        total, repeated = 0, Counter[tuple[str, str]]()
        for node, cost, again in _work(one, 1):
            total += cost
            if again:
                repeated[node.name, node.line] += cost
        why = "every device has all of its operands"
        for (name, line), cost in repeated.most_common():
            found.append(Row(one.axis, "repeated", name, line, flops=cost, share=cost / max(total, 1), why=why))
    return found


def _moved(over: Sequence[Placed]) -> list[Row]:
    """What moves, but for values without entries."""
    bytes_of = Counter[tuple[Row, str]]()
    leaves: dict[tuple[Row, str], dict[str, None]] = {}
    for placed, (move, times) in ((one, moved) for one in over for moved in one.moves):
        name = move.node.name
        if move.again or name == "jaxdist_all_reduce":  # over several axes: that over the first is here
            continue
        what = (
            f"{move.kind} of {'shards' if move.stored else 'activations'}" if move.kind in _ACTIVATIONS else move.kind
        )
        of_batch = _of_batch(what) and move.why != IN_PLACE
        moves = what not in ("all-reduce", "reduce-scatter")  # which is what data parallelism is
        why = (move.why if moves or move.why == IN_PLACE else "") or (_REASONS.get(name, "") if of_batch else "")
        instead = _INSTEAD.get(name, "") if of_batch else ""
        key = Row(placed.axis, what, name, move.node.line, why=why, instead=instead), move.why
        bytes_of[key] += move.bytes * times
        leaves.setdefault(key, {}).update(dict.fromkeys(_leaf(placed, move)))
    return [replace(key[0], bytes=size, leaves=tuple(leaves[key])) for key, size in bytes_of.most_common() if size]


def choices(over: Sequence[Placed]) -> list[str]:
    """The options that a step takes or not, with what the other way would take more: those of most seconds."""
    found = sorted((one for placed in over for one in _weighed(placed) if one[0] > 0), key=lambda one: -one[0])
    return [text for _, text in found[:_MOST_CHOICES]]


def _weighed(placed: Placed) -> Iterator[tuple[float, str]]:
    for one, times in ((one, times) for block, times in placed.blocks() for one in block.weighed):
        what = _some([*dict.fromkeys(map(_told, one.of))]) or "all of it"
        sign, seconds = "-" if one.bytes < 0 else "+", times * one.seconds
        more = f"+{1e3 * seconds:.3g} ms, {sign}{in_words(round(abs(times * one.bytes)))}"
        way = f"{one.name}; otherwise: {more}" if one.taken else f"as usual; if {one.name}: {more}"
        yield seconds, f"{what}: {way}"


def _told(one: Node | str) -> str:
    """An operation, or a leaf, for a line of text."""
    if isinstance(one, str):
        return one
    return f"{one.name} at {_short(one.line)}" if one.line else one.name


def summary(found: Sequence[Row]) -> str:
    """What is sent over each axis, and the largest rows."""
    moved = [row for row in found if row.what != "repeated"]
    repeated = [row for row in found if row.what == "repeated" and row.share > _WORTH_SAYING]
    sent = Counter[str]()
    for row in moved:
        sent[row.axis] += row.bytes
    shares = [(axis, size, size / sent.total()) for axis, size in sent.most_common()]
    lines = [f"over {axis}: {in_words(size)}, {share:.0%} of what is sent" for axis, size, share in shares]
    for row in (*moved[:_MOST_ROWS], *repeated[:_MOST_ROWS]):
        size = f"{row.share:.0%} of the FLOPs" if row.what == "repeated" else in_words(row.bytes)
        of = f" of {_some(row.leaves)}" if row.leaves else ""
        at = f" at {_short(row.line)}" if row.line else ""
        words = [f"  {size} over {row.axis}: {row.what} ({row.operation}){of}{at}", row.why]
        words += [f"instead: {row.instead}"] * bool(row.instead)
        lines += textwrap.wrap("; ".join(filter(None, words)), 100, subsequent_indent=" " * 6, break_long_words=False)
    return "\n".join(lines) or table([])


def table(found: Sequence[Row]) -> str:
    """The rows as text."""
    if not found:
        return "nothing moves, and no device computes what another one does"
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    lines = []
    for row in found:
        size = f"{row.share:.1%} of the FLOPs" if row.what == "repeated" else in_words(row.bytes)
        of = _some(row.leaves)
        lines.append((row.axis, row.what, row.operation, of, _short(row.line), size, row.why, row.instead))
    names = ("axis", "what", "operation", "of", "where", "bytes", "why", "instead")
    several = len({row.axis for row in found}) > 1
    kept = [k for k in range(len(names)) if any(line[k] for line in lines) and (k or several)]
    for k in kept:
        grid.add_column(names[k], justify="right" if names[k] == "bytes" else "left", overflow="fold")
    for line in lines:
        grid.add_row(*(line[k] for k in kept))
    return text_of(grid, width=200)


def warning(over: Sequence[Placed]) -> str:
    """What a user should know of a step that is about to be compiled; nothing if all is well."""
    if over[0].whole:
        return ""
    lines = []
    for row in () if any(map(unsplit, over)) else rows(over):
        what = f"{row.operation} at {_short(row.line)}" if row.line else row.operation
        if row.what == "repeated" and row.axis == MODEL:  # which has no examples to divide
            continue
        if row.what == "repeated" and row.share > _WORTH_SAYING:
            lines.append(f"{what} is computed by every device: {row.share:.0%} of its work")
        elif row.why == IN_PLACE:
            continue
        elif _of_batch(row.what) and row.operation not in ("shard_map", "jaxdist_own_code"):  # which the user asked for
            kind = row.what.removesuffix(" of activations")
            unknown = f": {row.why}" if row.why == UNKNOWN else ""
            lines.append(f"{what} moves {in_words(row.bytes)} of activations ({kind}){unknown}")
        elif row.what.endswith("of shards") and row.why:
            lines.append(f"{what} gathers {in_words(row.bytes)} from shards: {row.why}")
    if not lines:
        return ""
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n  ".join(
        ["each call moves or repeats what couples examples; jaxdist.explain says more:", *lines[:_MOST_LINES], *more]
    )


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    first, more = ", ".join(names[:_MOST_NAMES]), len(names) - _MOST_NAMES
    return f"{first} and {more} more" if more > 0 else first


def _short(line: str) -> str:
    """A user's line as its folder is called: from here, or from where libraries are."""
    path = Path(line)
    if path.is_relative_to(here := Path.cwd()):
        return str(path.relative_to(here))
    for k, part in enumerate(path.parts):
        if part in ("site-packages", "dist-packages"):
            return str(Path(*path.parts[k + 1 :]))
    return str(Path(*path.parts[-2:])) if len(path.parts) > 2 else line


def _of_batch(what: str) -> bool:
    return what.endswith("of activations")


def _leaf(placed: Placed, move: Move) -> list[str]:
    """The name of the leaf of the arguments that is gathered, or of the first whose next value the moved value makes.

    Followed are values of as many entries: what is of another size mixes leaves, as the norm of all gradients does.
    """
    block, found, seen = placed.block, set[int](), set[int]()
    size = math.prod(move.aval.shape)
    same: Callable[[Iterable[int]], list[int]] = lambda values: [
        i for i in values if math.prod(block.avals[i].shape) == size
    ]
    gathered = move.kind in _ACTIVATIONS
    if size == 1 or not placed.names or not any(move is one for one in placed.own) or (gathered and not move.stored):
        return []
    ahead = same(move.node.ins if gathered else move.node.outs)
    while ahead:
        if (i := ahead.pop()) in seen:
            continue
        seen.add(i)
        if not gathered:
            found.update(k for o, k in zip(block.outputs, placed.sources, strict=False) if o == i and k is not None)
            ahead += same(o for k in block.users.get(i, ()) for o in block.nodes[k].outs)
        elif i in block.inputs:
            found.add(block.inputs.index(i))
        elif i in block.makers and len(made_of := same(block.makers[i].ins)) == 1:
            ahead += made_of
    return [placed.names[min(found)].removesuffix(".value")] if found else []


def unsplit(placed: Placed) -> int:
    """FLOPs that every device repeats because there is no batch; 0: there is one."""
    inputs = (placed.at[i] for i in placed.block.inputs)
    if placed.axis not in (GROUP, AXIS) or placed.whole or any(isinstance(p, Split) and not p.stored for p in inputs):
        return 0
    return sum(cost for _, cost, again in _work(placed, 1, every=True) if again)


def worth_splitting(placed: Placed) -> bool:
    """Whether a step without a batch is more work than to make its arguments or its results, as an `init` is."""
    block = placed.block
    entries = sum(math.prod(block.avals[i].shape) for i in (*block.inputs, *block.outputs))
    least, each = _WORTH_SPLITTING
    return unsplit(placed) > max(least, each * entries)


def work(placed: Placed) -> int:
    """FLOPs of a device in all of it."""
    return sum(cost for _, cost, _ in _work(placed, 1))


Rows = frozenset[int]
"""Dimensions of a value that run over the examples of the batch."""


def _work(
    placed: Placed, times: int, given: Sequence[Rows] | None = None, every: bool = False
) -> Iterator[tuple[Node, int, bool]]:
    """Each operation with the FLOPs of a device, and whether every device does all of what is one device's work: the
    operation runs over the examples (`every`: or not), and nothing of it is cut."""
    block = placed.block
    at: list[Rows] = [frozenset()] * len(block.avals)
    for k, i in enumerate(block.inputs):
        p = placed.at[i]
        split = isinstance(p, Split) and not p.stored
        at[i] = frozenset([p.dim]) if split else given[k] if given else frozenset()
    for node, strategy in zip(block.nodes, placed.strategies, strict=True):
        for o, dims in zip(node.outs, _follow(block, node, at), strict=True):
            at[o] = dims
        inside = [] if node.name == "while" else _inside(node, at)
        for body, own in itertools.zip_longest(strategy.bodies, inside[: len(strategy.bodies)]):
            yield from _work(body, times * node.turns, own, every)
        if strategy.bodies or strategy.make is not None:
            continue
        over = every or any(at[i] for i in (*node.ins, *node.outs))
        whole = all(isinstance(p, Replicated) for p in strategy.takes)
        yield node, times * flops(block, node, strategy), over and whole


def _follow(block: Block, node: Node, at: Sequence[Rows]) -> Sequence[Rows]:
    """Which dimensions of the results run over the examples."""
    if not any(at[i] for i in node.ins):
        return [frozenset()] * len(node.outs)
    ins, outs = ([block.avals[i].shape for i in values] for values in (node.ins, node.outs))
    described = rules.factors(node.eqn.primitive, node.eqn.params, ins, outs)
    if described is not None:
        factors = {
            dims[d] for i, dims in zip(node.ins, described.operands, strict=True) for d in at[i] if d < len(dims)
        } - {None}
        found = [frozenset(d for d, f in enumerate(dims) if f in factors) for dims in described.results]
        if any(found) or all(f in described.reduced for f in factors):
            return found
    if node.name == "broadcast_in_dim":
        return [frozenset(int(node.eqn.params["broadcast_dimensions"][d]) for d in at[node.ins[0]])]
    if node.name == "reshape":
        places = (reshaped(Split(d, ins[0][d], ins[0][d]), ins[0], outs[0]) for d in at[node.ins[0]])
        return [frozenset(p.dim for p in places if p)]
    sizes = {(d, shape[d]) for i, shape in zip(node.ins, ins, strict=True) for d in at[i]}
    return [frozenset(d for d, size in sizes if d < len(shape) and shape[d] == size) for shape in outs]


def _inside(node: Node, at: Sequence[Rows]) -> list[list[Rows]]:
    """Of the inputs of each body of control flow."""
    return [
        [
            frozenset(d - 1 for d in at[node.ins[i]] if d) if k in body.xs else at[node.ins[i]]
            for k, i in enumerate(body.ins)
        ]
        for body in bodies(node.eqn)
    ]


def in_words(count: int) -> str:
    """Bytes, for a person."""
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
