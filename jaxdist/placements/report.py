"""What a placed step moves, and what every device computes again: for `jaxdist.explain` and the warning."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdist.mesh import AXIS, GROUP, MODEL
from jaxdist.placements.block import Node
from jaxdist.placements.cost import flops
from jaxdist.placements.strategy import IN_PLACE, UNKNOWN, Placed
from jaxdist.placements.values import REPLICATED, Split

_WORTH_SAYING = 0.01
_WORTH_SPLITTING = 1 << 17, 8  # FLOPs, and those for each entry of arguments and results
_MOST_LINES = 5
_MOST_ROWS = 3


@dataclass(frozen=True)
class Row:
    """Something that moves, or that every device computes."""

    axis: str  # over which it moves; of repeated work: along which the devices repeat it
    what: str  # ``"all-gather"``, ``"all-reduce"``, ... or ``"repeated"`` for work that every device does
    operation: str  # the primitive that needs it so
    line: str  # file:line of the user's code; "": JAX does not know it
    bytes: int = 0  # of the whole value, in a step
    flops: int = 0  # that every device repeats, in a step
    share: float = 0.0  # of that in all that a device computes
    why: str = ""  # it is needed whole
    instead: str = ""  # what would avoid it

    def __str__(self) -> str:
        size = f"{self.share:.0%} of the FLOPs" if self.what == "repeated" else in_words(self.bytes)
        at = f" at {_short(self.line)}" if self.line else ""
        said = f"{size} over {self.axis}: {self.what} ({self.operation}){at}", self.why
        return "; ".join(filter(None, (*said, self.instead and f"instead: {self.instead}")))


def rows(over: Sequence[Placed]) -> list[Row]:
    """What moves, most bytes first, then what is repeated."""
    found = _moved(over)
    if over and (again := unsplit(placed := _over_data(over))):
        why, instead = "no argument is taken for the batch", "batch_argnums= says which one is"
        share = again / work(placed)
        return [*found, Row(placed.axis, "repeated", "all of it", "", 0, again, share, why, instead)]
    for one in over:
        total, repeated = work(one), Counter[tuple[str, str]]()
        for node, cost, again in _work(one, 1):
            repeated[node.name, node.line] += cost * again
        why = "every device has all of its operands"
        found += [
            Row(one.axis, "repeated", name, line, 0, cost, cost / total, why)
            for (name, line), cost in repeated.most_common() if cost
        ]  # fmt: skip
    return found


def _over_data(over: Sequence[Placed]) -> Placed:
    return next((one for one in over if one.axis in (GROUP, AXIS)), over[0])


def _moved(over: Sequence[Placed]) -> list[Row]:
    """What moves, but for values without entries."""
    sizes = Counter[tuple[Row, str]]()
    for placed, (move, times) in ((one, moved) for one in over for moved in one.moves):
        name, what, why = move.node.name, move.kind, move.why
        if move.again or name == "jaxdist_all_reduce":  # over several axes: that over the first is here
            continue
        if what in ("all-gather", "all-to-all"):
            what += " of shards" if move.stored else " of activations"
        elif why != IN_PLACE:  # reductions are what data parallelism is
            why = ""
        instead = _INSTEAD.get(name, "") if _of_batch(what) and why != IN_PLACE else ""
        sizes[Row(placed.axis, what, name, move.node.line, why=why, instead=instead), move.why] += move.bytes * times
    return [replace(row, bytes=size) for (row, _), size in sizes.most_common() if size]


def text(found: Sequence[Row], verbose: bool) -> str:
    """What is sent over each axis, and the largest rows, or all of them."""
    moved = [row for row in found if row.what != "repeated"]
    repeated = [row for row in found if row.what == "repeated" and (verbose or row.share > _WORTH_SAYING)]
    sent = Counter[str]()
    for row in moved:
        sent[row.axis] += row.bytes
    lines = [f"over {axis}: {in_words(size)}, {size / sent.total():.0%} of what is sent" for axis, size in sent.items()]
    most = len(found) if verbose else _MOST_ROWS
    for row in (*moved[:most], *repeated[:most]):
        lines += textwrap.wrap(f"  {row}", 100, subsequent_indent=" " * 6, break_long_words=False)
    return "\n".join(lines) or "nothing moves, and no device computes what another one does"


def warning(over: Sequence[Placed]) -> str:
    """What a user should know of a step that is about to be compiled; nothing if all is well."""
    lines = []
    for row in () if unsplit(_over_data(over)) else rows(over):
        what = f"{row.operation} at {_short(row.line)}" if row.line else row.operation
        if row.what == "repeated" and row.axis != MODEL and row.share > _WORTH_SAYING:  # it has no examples to divide
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
    first = "each call moves or repeats what couples examples; jaxdist.explain says more:"
    return "\n  ".join([first, *lines[:_MOST_LINES], *more])


def _short(line: str) -> str:
    """A user's line from here; elsewhere without most of its folders."""
    path = Path(line)
    if path.is_relative_to(here := Path.cwd()):
        return str(path.relative_to(here))
    return str(Path(*path.parts[-3:]))


def _of_batch(what: str) -> bool:
    return what.endswith("of activations")


def unsplit(placed: Placed) -> int:
    """FLOPs that every device repeats because there is no batch; 0: there is one."""
    inputs = (placed.at[i] for i in placed.block.inputs)
    if placed.axis not in (GROUP, AXIS) or any(isinstance(p, Split) and not p.stored for p in inputs):
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


def _work(placed: Placed, times: int, every: bool = False) -> Iterator[tuple[Node, int, bool]]:
    """Each operation with the FLOPs of a device, and whether every device does all of what is one device's work: it
    takes whole values, one of which was split over the examples (`every`: or not)."""
    for node, strategy in zip(placed.block.nodes, placed.strategies, strict=True):
        whole = all(to == REPLICATED for to in strategy.takes)
        again = whole and (every or any(isinstance(p := placed.at[i], Split) and not p.stored for i in node.ins))
        for body in strategy.bodies:
            yield from _work(body, times * node.turns, again)
        if not strategy.bodies and strategy.make is None:
            yield node, times * flops(placed.block, node, strategy), again


def in_words(count: int) -> str:
    """Bytes, for a person."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


_INSTEAD = {
    "gather": "shuffle in the loader rather than in the step",
    "slice": "split the batch in the loader, or take every k-th example: x[i::k]",
    "reshape": "(B,) -> (B // k, k) keeps each device's examples, (k, B // k) does not",
    "sort": "a running quantile in the state, or jaxdist.per_device",
    "top_k": "jaxdist.per_device, for the hardest of each device's part",
    "rev": "pair examples in the loader",
    "dot_general": "jaxdist.per_device, to compare within each device's part only",
}
