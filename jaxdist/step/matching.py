"""Which parts of a step's result have the structure, shapes and dtypes of an argument: those are kept as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any


def same(one: Any, other: Any) -> bool:
    """Whether two structures are equal; metadata that can't be compared (an array of NumPy) are not."""
    try:
        return bool(one == other)
    except Exception:
        return False


def places(tree: Any, types: Sequence[Any], wanted: Any, wanted_types: Sequence[Any]) -> Iterator[int]:
    """The first leaf of each part of a result that is like an argument, the outermost parts only."""
    todo = [(tree, 0)]
    while todo:
        part, first = todo.pop()
        n = part.num_leaves
        if n < wanted.num_leaves:
            continue
        if n == len(wanted_types) and same(part, wanted) and all(map(_alike, types[first : first + n], wanted_types)):
            yield first
            continue
        children = part.children()
        starts = itertools.accumulate((child.num_leaves for child in children), initial=first)
        todo += reversed(list(zip(children, starts, strict=False)))


def match(
    tree: Any, types: Sequence[Any], arguments: Sequence[tuple[Any, list[int], str]], avals: Sequence[Any]
) -> tuple[list[int | None], frozenset[int], list[list[int]]]:
    """Match a step's result with its arguments of state."""
    sources: list[int | None] = [None] * tree.num_leaves
    returned, alike = set[int](), list[list[int]]()
    left = [(structure, at) for structure, at, _ in arguments if at]
    while left:
        # The larger first: a bias is a part of the weights, even if there is an argument like it.
        structure, at = max(left, key=lambda argument: len(argument[1]))
        types_of = [avals[i] for i in at]
        group = [a for a in left if same(a[0], structure) and all(map(_alike, (avals[i] for i in a[1]), types_of))]
        group = group or [(structure, at)]
        left = [a for a in left if all(a[1] is not own for _, own in group)]
        found = [k for k in places(tree, types, structure, types_of) if sources[k] is None]
        for k, (_, own) in zip(found, itertools.chain(group, itertools.repeat(group[-1])), strict=False):
            sources[k : k + len(own)] = own
        if len(found) == len(group) and (len(at) > 1 or types_of[0].shape):
            returned.update(i for _, own in group for i in own)
        alike += map(list, zip(*(own for _, own in group), strict=True)) if len(group) > 1 else []
    return sources, frozenset(returned), alike


def _alike(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
