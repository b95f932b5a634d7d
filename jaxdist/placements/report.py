"""The communication and repeated work of a placed step, for `jaxdist.explain` and the warning."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdist.mesh import AXIS, GROUP, MODEL
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.cost import flops
from jaxdist.placements.model.strategy import IN_PLACE, RETURNED, Propagation
from jaxdist.placements.model.values import REPLICATED, Split
from jaxdist.placements.rules.shapes import constrained_dim
from jaxdist.placements.search.options import COST_OF_CONSTRAINT

_WORTH_SAYING = 0.01
_WORTH_SPLITTING = 1 << 17, 8  # FLOPs, and those for each entry of arguments and results
_MOST_LINES = 5
_MOST_ROWS = 3
_NOT_FOLLOWED = "not followed"
_OF_BATCH = {"all-gather of activations", "all-to-all of activations"}


@dataclass(frozen=True)
class Row:
    """A value that is communicated, or work that every device repeats."""

    axis: str  # over which it is sent; for repeated work, along which devices repeat it
    what: str  # a collective's kind; ``"repeated"``: work that every device does; ``"not followed"``: a constraint
    operation: str  # the primitive that needs it
    line: str  # file:line of the user's code, or "" if JAX does not know it
    bytes: int = 0  # size of the whole value, per step
    flops: int = 0  # FLOPs that every device repeats, per step
    share: float = 0.0  # fraction of all FLOPs of a device
    why: str = ""  # the reason that it is needed whole
    instead: str = ""  # how to avoid it

    def __str__(self) -> str:
        size = f"{self.share:.0%} of the FLOPs" if self.what == "repeated" else in_words(self.bytes)
        place = f" at {_short(self.line)}" if self.line else ""
        fact = f"{size} over {self.axis}: {self.what} ({self.operation}){place}"
        if self.what == _NOT_FOLLOWED:
            fact = f"{self.operation} over {self.axis}: {self.what}{place}"
        return "; ".join(filter(None, (fact, self.why, self.instead and f"instead: {self.instead}")))


def rows(over: Sequence[Propagation]) -> list[Row]:
    """Return communication, most bytes first, then repeated work; between them, constraints that are not followed."""
    listed = [*_moved(over), *dict.fromkeys(row for placed in over for row in _not_followed(placed))]
    if over and (again := unsplit(placed := _over_data(over))):
        why, instead = "no argument is taken for the batch", "batch_argnums= says which one is"
        share = again / work(placed)
        return [*listed, Row(placed.axis.name, "repeated", "all of it", "", 0, again, share, why, instead)]
    for placed in over:
        total, repeated = 0, Counter[tuple[str, str]]()
        for node, cost, again in _work(placed, 1):
            total += cost
            if again:
                repeated[node.label, node.line] += cost
        why = "every device has all of its operands"
        listed += [
            Row(placed.axis.name, "repeated", name, line, 0, cost, cost / total, why)
            for (name, line), cost in repeated.most_common() if cost
        ]  # fmt: skip
    return listed


def _over_data(over: Sequence[Propagation]) -> Propagation:
    return next((placed for placed in over if placed.axis.name in (GROUP, AXIS)), over[0])


def _moved(over: Sequence[Propagation]) -> list[Row]:
    """Return communication, without values that have no entries."""
    sizes = Counter[tuple[Row, str]]()
    for placed, (message, times) in ((p, sent) for p in over for sent in p.sent()):
        name, what, why = message.operation, message.kind, message.why
        if name == "jaxdist_all_reduce":  # over several axes: counted over the first
            continue
        if message.of_state and what in ("all-gather", "all-to-all"):
            what += " of shards"
        elif message.reshards and what in ("all-gather", "all-to-all"):  # else it is sent by the operation, as a result
            what += " of activations"
        elif why != IN_PLACE:  # data parallelism consists of reductions
            why = ""
        instead = _INSTEAD.get(name, "") if what in _OF_BATCH and why != IN_PLACE else ""
        row = Row(placed.axis.name, what, name, message.line, why=why, instead=instead)
        sizes[row, message.why] += message.bytes * times
    return [replace(row, bytes=size) for (row, _), size in sizes.most_common() if size]


def _not_followed(over: Propagation) -> Iterator[Row]:
    """Yield the constraints of `jax.lax.with_sharding_constraint` that values do not follow."""
    for placed, _ in over.blocks():
        name, devices = placed.axis.name, placed.axis.size
        for node, strategy in zip(placed.block.nodes, placed.strategies, strict=True):
            if (dim := constrained_dim(node, name)) is None:
                continue
            (result,), (shape,) = strategy.out_placements, placed.block.shapes(node.outs)
            if not (isinstance(result, Split) and result.dim == dim):
                length = shape[dim]
                why = f"with it, this part of the step would take more than {COST_OF_CONSTRAINT} times as long"
                why = f"dimension {dim} has {length} entries for {devices} devices" if length < devices else why
                yield Row(name, _NOT_FOLLOWED, node.name, node.line, why=why)


def text(listed: Sequence[Row], verbose: bool) -> str:
    """Describe the bytes over each axis, and the largest rows, or all if `verbose`."""
    moved = [row for row in listed if row.what not in ("repeated", _NOT_FOLLOWED)]
    constraints = [row for row in listed if row.what == _NOT_FOLLOWED]
    repeated = [row for row in listed if row.what == "repeated" and (verbose or row.share > _WORTH_SAYING)]
    sent = Counter[str]()
    for row in moved:
        sent[row.axis] += row.bytes
    lines = [f"over {axis}: {in_words(size)}, {size / sent.total():.0%} of all bytes" for axis, size in sent.items()]
    most = len(listed) if verbose else _MOST_ROWS
    for row in (*moved[:most], *constraints[:most], *repeated[:most]):
        lines += textwrap.wrap(f"  {row}", 100, subsequent_indent=" " * 6, break_long_words=False)
    return "\n".join(lines) or "no communication, and no work is repeated across devices"


def warning(over: Sequence[Propagation]) -> str:
    """Return a warning for a step about to be compiled, or "" if there is nothing to report."""
    lines = [] if unsplit(_over_data(over)) else [str(row) for row in rows(over) if _is_slow(row)]
    if not lines:
        return ""
    omitted = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    first = "operations across examples cost communication or repeated work; see jaxdist.explain:"
    return "\n  ".join([first, *lines[:_MOST_LINES], *omitted])


def _is_slow(row: Row) -> bool:
    """Check whether a row is worth a warning: work that the user can avoid, and did not ask for."""
    if row.what == "repeated":
        return row.axis != MODEL and row.share > _WORTH_SAYING  # the model axis has no examples to divide
    if row.why == IN_PLACE or row.operation in ("shard_map", "jaxdist_own_code", "sharding_constraint"):
        return False
    return row.what in _OF_BATCH or (row.what.endswith("of shards") and row.why not in ("", RETURNED))


def _short(line: str) -> str:
    """Shorten a user's path: relative to here, or without most of its folders."""
    path = Path(line)
    if path.is_relative_to(here := Path.cwd()):
        return str(path.relative_to(here))
    return str(Path(*path.parts[-3:]))


def unsplit(placed: Propagation) -> int:
    """Return the FLOPs that every device repeats for lack of a batch, or 0 if there is a batch."""
    inputs = (placed.placements[i] for i in placed.block.inputs)
    if placed.axis.name not in (GROUP, AXIS) or any(isinstance(p, Split) and not p.of_state for p in inputs):
        return 0
    return sum(cost for _, cost, again in _work(placed, 1, every=True) if again)


def worth_splitting(placed: Propagation) -> bool:
    """Check whether a step without a batch does more work than an `init`, which makes results."""
    block = placed.block
    entries = sum(math.prod(block.avals[i].shape) for i in (*block.inputs, *block.outputs))
    least, per_entry = _WORTH_SPLITTING
    return unsplit(placed) > max(least, per_entry * entries)


def work(placed: Propagation) -> int:
    """Return a device's total FLOPs."""
    return sum(cost for _, cost, _ in _work(placed, 1))


def _work(placed: Propagation, times: int, every: bool = False) -> Iterator[tuple[Node, int, bool]]:
    """Yield each operation with a device's FLOPs, and whether all repeat it on values that were split (or `every`)."""
    for node, strategy in zip(placed.block.nodes, placed.strategies, strict=True):
        whole = all(in_form == REPLICATED for in_form in strategy.in_forms)
        again = whole and (
            every or any(isinstance(p := placed.placements[i], Split) and not p.of_state for i in node.ins)
        )
        for body in strategy.bodies:
            yield from _work(body, times * node.trip_count, again)
        if not strategy.bodies and strategy.make is None:
            yield node, times * flops(placed.block, node, strategy), again


def in_words(count: int) -> str:
    """Format bytes for a person."""
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
