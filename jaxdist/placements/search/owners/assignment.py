"""Choose which components get owners, and which devices these are.

An owner's cost depends on the owners of all other matrices, so all are assigned at once, apart from other options.
"""

import functools
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from typing import Any, Literal, NamedTuple

from jax.extend.core import ClosedJaxpr, Primitive

from jaxdist.ir.operations import CONTRACTION
from jaxdist.machine import Link
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.cost import seconds, seconds_of
from jaxdist.placements.model.strategy import Inference, Propagation, nbytes
from jaxdist.placements.model.values import REPLICATED, Partial, Placement, Split, tile
from jaxdist.placements.search.marks import in_marks
from jaxdist.placements.search.options import best
from jaxdist.placements.search.owners.components import (
    Component,
    bytes_moved,
    bytes_sent,
    components,
    is_whole_work,
    most_inside,
)

_SLACK = 1.25  # all devices together may take this many times as long for a stack as one owner for all of it

Way = Literal["slices", "owners"] | None  # the way to run whole-matrix work; None picks the cheaper one

owners_p = Primitive("jaxdist_owners")  # components, each on one device, or a stack on all. Never bound: only a name


@dataclass(eq=False)
class Work:
    """A placed component."""

    component: Component
    placed: Propagation  # it, placed on whole matrices, or on a device's part of a stack
    seconds: float  # compute time of a device
    sent: int  # bytes sent to an owner and back
    owner: int | None = None  # among the devices that share a matrix; None if each does its part of the stack


@dataclass(eq=False)
class Owned(Node):
    """Components of one stage that have owners, or one of them as a stack, as one operation."""

    works: Sequence[Work] = field(default_factory=list)  # of owners, or one on a stack

    @functools.cached_property
    def name(self) -> str:
        return owners_p.name


def check_split(split: Any) -> None:
    """Refuse an invalid `Way`."""
    if split not in (None, "slices", "owners"):
        raise ValueError(
            f"split={split!r}: expected None (the cheaper way), 'owners' (send each matrix to one device) or 'slices' "
            "(gather matrices where they are needed whole)"
        )


def requested_way(closed: ClosedJaxpr) -> Way:
    """Return the way that the marks of a step ask for."""
    ways = in_marks(closed, "split") - {None}
    if len(ways) > 1:
        raise ValueError(
            "the step has an update with split='slices' and one with split='owners': give each jaxdist.zero in it the "
            "same `split`, or none"
        )
    return ways.pop() if ways else None


def with_owners(infer: Inference, placed: Propagation) -> Block | None:
    """Return a block with owners for whole-matrix work, or None if that does not pay.

    Sets `placed.matrices`, which a surrounding loop asks for.
    """
    moved = bytes_moved(placed)
    parts = components(infer, placed, moved)
    placed.matrices = max(len(parts), most_inside(placed))
    if not parts or infer.split == "slices":
        return None
    on_slices = _on_slices(infer, placed, moved)
    works: list[list[Work]] = []
    for stage in sorted({c.stage for c in parts}):
        works += _chosen(infer, placed, on_slices, [c for c in parts if c.stage == stage])
    return _rewritten(placed.block, works) if works else None


def _chosen(
    infer: Inference, placed: Propagation, on_slices: "_OnSlices", parts: Sequence[Component]
) -> list[list[Work]]:
    """Choose which components of one stage get owners, in groups that become one operation each."""
    n, link = infer.devices, infer.link
    works = [_on_one(infer, placed, component) for component in parts]
    total = sum(work.seconds for work in works)
    stacks: list[list[Work]] = []
    required: list[Work] = []  # they get owners in any case
    others: dict[Work, float] = {}  # with their seconds on slices
    for work in works:
        must = infer.split == "owners" or any(id(node) in on_slices.impossible for node in work.component.nodes)
        seconds_on_slices = sum(on_slices.seconds[id(node)] for node in work.component.nodes)
        # Not worthwhile even with perfect balance: 1/n of the work, plus the way there and back.
        if not must and (work.seconds + work.sent / link.bandwidth) / n + 2 * link.latency >= seconds_on_slices:
            continue
        # Of a stack of 12 matrices 4 devices take 3 each, if that is hardly more work than all 12 at once (`_SLACK`),
        # or if its one owner would have more to do than its share of everything.
        stack = _stack(infer, placed, work.component)
        if stack is not None and (stack.seconds * n <= _SLACK * work.seconds or work.seconds * n > total):
            stacks.append([stack])
        elif must:
            required.append(work)
        else:
            others[work] = seconds_on_slices
    owned = _cheapest(required, others, n, link)
    _, owners = _assigned(owned, n, link)
    for work, owner in zip(owned, owners, strict=True):
        work.owner = owner
    return [*stacks, [work for work in works if work in owned]] if owned else stacks


def _cheapest(required: Sequence[Work], others: dict[Work, float], n: int, link: Link) -> list[Work]:
    """Return what gets an owner so that all takes least; `others` may stay on slices, with these seconds."""
    # A giant's owner finishes long after the others: what sends most stays on slices first.
    by_size = sorted(others, key=lambda work: work.sent)

    def seconds_with(owned: int) -> float:
        on_owners, _ = _assigned([*required, *by_size[:owned]], n, link)
        return on_owners + sum(others[work] for work in by_size[owned:])

    return [*required, *by_size[: min(range(len(by_size) + 1), key=seconds_with)]]


def _assigned(works: Sequence[Work], n: int, link: Link) -> tuple[float, list[int]]:
    """Return the seconds of all, and the owner of each: the largest first, to the least loaded (Graham, 1969)."""
    devices, owners = [(0.0, i) for i in range(n)], [0] * len(works)
    # The sort is stable and the heap compares positions last: equal matrices have the same owners on every rank.
    for k in sorted(range(len(works)), key=lambda k: -works[k].seconds):
        load, owners[k] = heapq.heappop(devices)
        heapq.heappush(devices, (load + works[k].seconds + works[k].sent / link.bandwidth, owners[k]))
    return max(devices)[0] + 2 * link.latency * bool(works), owners


class _OnSlices(NamedTuple):
    """Operations, by id, as they run on slices."""

    seconds: dict[int, float]
    impossible: set[int]  # those that can't run so


def _on_slices(infer: Inference, placed: Propagation, moved: Counter[int]) -> _OnSlices:
    """Return what the operations of a block take on slices, with their bodies."""
    machine, link = infer.axis.machine, infer.link
    costs, impossible = dict[int, float](), set[int]()
    for node, strategy in zip(placed.block.nodes, placed.strategies, strict=True):
        inner = [_on_slices(infer, body, bytes_moved(body)) for body in strategy.bodies]
        is_elsewhere = strategy.bodies or strategy.make  # in its bodies, or in its users
        cost_here = 0 if is_elsewhere else seconds_of(placed.block, node, strategy, machine)
        reduced = sum(nbytes(placed.block.avals[o]) for o, p in zip(node.outs, strategy.out_placements, strict=True)
                      if isinstance(p, Partial) and node.name in CONTRACTION)  # fmt: skip
        travel = max(moved[id(node)], reduced)
        cost_here += travel / link.bandwidth + (link.latency if travel else 0)
        costs[id(node)] = cost_here + node.trip_count * sum(sum(body.seconds.values()) for body in inner)
        is_whole = is_whole_work(node, strategy, placed.placements, moved)
        if (is_whole and not strategy.bodies and node.name not in CONTRACTION) or any(b.impossible for b in inner):
            impossible.add(id(node))
    return _OnSlices(costs, impossible)


def _on_one(infer: Inference, placed: Propagation, component: Component) -> Work:
    """Place a component on one device."""
    block = component.block(placed.block)
    on_one = infer.place(block, [REPLICATED] * len(block.inputs))
    return Work(component, on_one, seconds(on_one, infer.axis.machine), bytes_sent(placed, component))


def _stack(infer: Inference, placed: Propagation, component: Component) -> Work | None:
    """Place a component so that each device computes some matrices of a stack independently."""
    avals = placed.block.avals
    stacked = [i for i in component.ins if isinstance(placed.placements[i], Split)]
    lengths = {avals[i].shape[0] for i in stacked}
    if len(lengths) != 1 or min(lengths) < 2 or any(avals[i].ndim < 3 for i in stacked):
        return None
    (length,) = lengths
    split = tile(0, length, infer.devices, of_state=True)
    block = component.block(placed.block)
    ins: list[Placement] = [split if i in stacked else REPLICATED for i in component.ins]
    on_stack = best(infer, block, ins)  # without owners: they would look for a stack in it again
    apart = all(isinstance(p, Split) and p.dim == 0 and p.is_tile(infer.devices) for p in on_stack.out_placements)
    if not apart or on_stack.communicates:
        return None
    return Work(component, on_stack, seconds(on_stack, infer.axis.machine), bytes_sent(placed, component))


def _rewritten(block: Block, works: Sequence[Sequence[Work]]) -> Block:
    """Replace each group of components by one operation, in an order in which all can run."""
    owned = {id(node) for group in works for work in group for node in work.component.nodes}
    groups: dict[int, Node] = {}  # by id of its first operation, whose position it takes
    for group in works:
        first = group[0].component.nodes[0]
        eqn = first.eqn.replace(primitive=owners_p, params={}, effects=set())
        ins = tuple(dict.fromkeys(i for work in group for i in work.component.ins))
        outs = tuple(o for work in group for o in work.component.outs)
        groups[id(first)] = Owned(eqn, ins, outs, first.backward, first.calls, group)
    nodes = [groups.get(id(n), n) for n in block.nodes if id(n) in groups or id(n) not in owned]
    maker = {o: k for k, node in enumerate(nodes) for o in node.outs}
    # Of the operations that are ready, the earliest in the program is next: the order changes only where it must.
    order = TopologicalSorter({k: {maker[i] for i in n.ins if i in maker} for k, n in enumerate(nodes)})
    order.prepare()
    ready: list[int] = []
    ordered: list[Node] = []
    while order.is_active():
        for k in order.get_ready():
            heapq.heappush(ready, k)
        k = heapq.heappop(ready)
        ordered.append(nodes[k])
        order.done(k)
    new = replace(block, nodes=ordered)
    new.count_uses()
    return new
