"""Find summands to add up not at once into a whole value, but in slices, or after the operations that take them."""

from jaxdist.placements.model.strategy import Inference, Propagation, nbytes
from jaxdist.placements.model.values import REPLICATED, Form, Partial, Split
from jaxdist.placements.rules.run import run_as_is
from jaxdist.placements.rules.summands import passes

# `least` calls itself for each of them, and Python limits how deep calls go.
_DEEPEST = 100  # operations in a row that are followed from a sum


def used_in_slices(infer: Inference, placed: Propagation) -> dict[int, Split]:
    """Find summands that each device uses one slice of, like the gradient of a gathered value, and the slices."""
    block, placements = placed.block, placed.placements
    used = dict[int, Form](dict.fromkeys(block.outputs, REPLICATED))  # the form of all uses, or whole if they differ
    slices: dict[int, Split] = {}
    for node, strategy in zip(reversed(block.nodes), reversed(placed.strategies), strict=True):
        in_forms = strategy.in_forms
        for i, placement in zip(node.outs, strategy.out_placements, strict=True):
            split = used.get(i) if isinstance(placement, Partial) else None
            if isinstance(split, Split) and split.is_tile(infer.devices):
                # A reduce-scatter then sends half of what an all-reduce does.
                slices[i] = split
        # Work that is repeated on the way can be cut too.
        split = used.get(node.outs[0]) if strategy.run is run_as_is and len(node.outs) == 1 else None
        if isinstance(split, Split) and not node.eqn.effects:
            described = block.factors(node) if not any(isinstance(placements[i], Split) for i in node.ins) else None
            factor = described.results[0][split.dim] if described else None
            if described and factor is not None and described.is_even(factor):
                operands = described.operands
                in_forms = [split.along(dims.index(factor)) if factor in dims else REPLICATED for dims in operands]
        for i, target in zip(node.ins, in_forms, strict=True):
            if target != used.setdefault(i, target or REPLICATED):
                used[i] = REPLICATED
    return slices


def added_up_later(infer: Inference, default: Propagation) -> frozenset[int]:
    """Return summands that lead to smaller sums: the gradient of a weight that is built from smaller parameters.

    For ``W + A @ B`` of shapes (n, n), (n, r) and (r, n), the gradient of the whole has n² entries, and the products
    with it 2nr. So both products take it as summands, and their results are added up.
    """
    block, kept = default.block, {*default.block.outputs, *infer.slices_wanted(default.block)}
    known = dict[int, tuple[int, frozenset[int]]]()

    def least(i: int, depth: int = _DEEPEST) -> tuple[int, frozenset[int]]:
        """Return the fewest bytes to add up for a value, and what stays summands for that."""
        if i not in known:
            known[i] = nbytes(block.avals[i]), frozenset()
            users = [block.nodes[k] for k in block.users.get(i, ()) if depth and i not in kept]
            if users and all(passes(block, user, i, [default.placements[o] for o in user.ins]) for user in users):
                results = [least(user.outs[0], depth - 1) for user in users]
                size = sum(size for size, _ in results)
                if size <= known[i][0]:
                    known[i] = size, frozenset({i}).union(*(later for _, later in results))
        return known[i]

    reduced = {message.value for message in default.messages if message.kind in ("all-reduce", "reduce-scatter")}
    smaller = (least(i)[1] for i in sorted(reduced) if i >= 0 and least(i)[0] < nbytes(block.avals[i]))
    return frozenset[int]().union(*smaller)
