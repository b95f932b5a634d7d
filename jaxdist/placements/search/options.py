"""The choice among options for a block's operations that minimizes a device's time for the block.

Options pay off for several operations at once, or not at all: a weight not gathered for one product is gathered for
the next. So operations switch in groups. Tries are counted, not timed, so that all ranks agree.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from jaxdist.placements.model.block import TO_A_SUM, Block, Node, UnionFind
from jaxdist.placements.model.cost import cost, descend
from jaxdist.placements.model.strategy import Inference, Propagation
from jaxdist.placements.model.values import REPLICATED, Partial, Placement
from jaxdist.placements.propagate import propagate
from jaxdist.placements.rules.context import DEFAULTS, Choice
from jaxdist.placements.rules.shapes import CONSTRAINT, constrained_dim
from jaxdist.placements.search.sums import added_up_later, used_in_slices

_OPERATIONS, _FEWEST = 30_000, 8  # limit on walks of a block: fewer the more operations it has, down to a minimum
_UNCERTAINTY = 1 / 5  # extra weight of messages that only a switched option sends: estimates are good to about 20%

COST_OF_CONSTRAINT = 2  # times the seconds of a block without them: more is not spent on the user's constraints

On = frozenset[int]  # the groups of operations that are switched


def best(
    infer: Inference, block: Block, ins: Sequence[Placement], may_stay_partial: frozenset[int] = frozenset()
) -> Propagation:
    """Place a block at the least cost, without owners except in its bodies."""
    place = functools.partial(propagate, infer, block, ins, may_stay_partial)
    constraints, default = _constraints(infer, block, place)
    groups = _groups(infer, default)
    if not groups:
        return default
    messages, tried, costs = _messages(default), dict[On, Propagation](), dict[On, float]()
    most = max(_FEWEST, _OPERATIONS // max(len(block.nodes), 1))

    def cost_of(on: On) -> float:
        if on not in costs:
            if len(costs) > most:
                return float("inf")  # so that `descend` ends at one that was tried
            placed = tried[on] = place(_together([constraints, *(groups[k] for k in sorted(on))])) if on else default
            others = _messages(placed) - messages  # errors in shared messages cancel
            unsure = sum(times * infer.link.seconds(*message) for message, times in others.items())
            costs[on] = _cost(infer, placed) + _UNCERTAINTY * unsure
        return costs[on]

    switches = [On({k}) for k in range(len(groups))]
    # From all switched as well: options that pay off only together are not found one at a time.
    start = min(On(), On().union(*switches), key=cost_of)
    return tried[descend(start, switches, lambda on, group: [on ^ group], cost_of)]


def _constraints(infer: Inference, block: Block, place: Callable[[Choice], Propagation]) -> tuple[Choice, Propagation]:
    """Return the user's constraints that do not cost much together, and the block placed with them.

    If all of them do, those of one line are tried after those of another.
    """
    lines = dict[Hashable, dict[int, str]]()
    for node in block.nodes:
        if constrained_dim(node, infer.axis.name) is not None:
            lines.setdefault((node.line, *block.shapes(node.ins)), {})[id(node)] = CONSTRAINT
    followed, placed = DEFAULTS, place(DEFAULTS)
    most = COST_OF_CONSTRAINT * _cost(infer, placed) if lines else 0.0
    of_lines = [Choice(names) for names in lines.values()]
    together = _together(of_lines)
    for constraints in [together, *of_lines] if lines else []:
        choice = _together([followed, constraints])
        with_these = place(choice)
        if _cost(infer, with_these) <= most:
            followed, placed = choice, with_these
            if constraints is together:
                break
    return followed, placed


def _together(chosen: Sequence[Choice]) -> Choice:
    return Choice(
        {node: name for choice in chosen for node, name in choice.names.items()},
        {i: split for choice in chosen for i, split in choice.summand_slices.items()},
        frozenset[int]().union(*(choice.added_later for choice in chosen)),
    )


def _cost(infer: Inference, placed: Propagation) -> float:
    """Return the cost of a block, including reductions still pending."""
    if placed.block.outermost:
        wants = [REPLICATED if isinstance(p, Partial) else None for p in placed.out_placements]
        placed = placed.returning(infer, wants)
    return cost(placed, infer, memory=False)  # options hardly differ in memory traffic, and caches may absorb it


def _messages(placed: Propagation) -> Counter[tuple[str, int]]:
    """Count the messages by kind and bytes."""
    counts = Counter[tuple[str, int]]()
    for message, times in placed.sent():
        counts[message.kind, message.bytes] += times
    return counts


def _groups(infer: Inference, default: Propagation) -> list[Choice]:
    """Return groups to switch together: operations that share an input of the block, a sum, or line and shapes.

    Of one layer, products of queries, keys and values with their weights, and their inputs' gradients, are one group: a
    weight ties two of these, the sum of the inputs' gradients the rest. Gradients of weights are groups of their own.
    Layers share the line. At the end, without operations: summands to add up in slices, and those to add up later.
    """
    classes, block = UnionFind[Hashable](), default.block
    alternatives = [(node, strategy.name) for node, strategy in default.alternatives if strategy.name != CONSTRAINT]
    for node, name in alternatives:
        # With the name of the alternative: one that sends examples and one that sends heads are independent questions.
        for tie in (*_ties(block, node), (node.name, node.line, *block.shapes(node.ins))):
            classes.tie((id(node), name), (name, tie))
    groups: dict[Hashable, dict[int, str]] = {}
    for node, name in alternatives:
        groups.setdefault(classes.of((id(node), name)), {})[id(node)] = name
    choices = [Choice(names) for names in groups.values()]
    if slices := used_in_slices(infer, default):
        choices.append(Choice(summand_slices=slices))
    if later := added_up_later(infer, default):
        choices.append(Choice(added_later=later))
    return choices


def _ties(block: Block, node: Node) -> list[Hashable]:
    """Return the block's inputs (weights, say) that an operation takes, and the sums that its results are terms of."""
    ties = list[Hashable]()
    for i in map(block.source, node.ins):
        if i in block.input_index:
            ties.append(("input", i))
    for o in node.outs:
        while block.uses[o] == 1 and o in block.last_user and block.last_user[o].name in TO_A_SUM:
            o = block.last_user[o].outs[0]
        ties.append(("sum", o))
    return ties
