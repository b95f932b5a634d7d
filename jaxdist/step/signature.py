"""The signature of a call: its structure, and its data, state and batch."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef, default_registry

from jaxdist.text import name_of

NUMBERS = (bool, int, float, complex)
_DATA = (jax.Array, jax.ShapeDtypeStruct, *NUMBERS)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """A leaf that is not an array (an activation function in a module, a string): a constant of the program."""

    value: Any

    def __eq__(self, other: object) -> bool:
        # As for jax.jit: 1, 1.0 and True are not the same to a step.
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def is_array(leaf: Any) -> bool:
    """Check whether a leaf of the arguments is data, as opposed to a constant of the program."""
    return isinstance(leaf, _DATA) or hasattr(leaf, "__array__")


@dataclass(frozen=True)
class Signature:
    """The structure of a call. A compiled program is specific to it, and to shapes and dtypes."""

    tree: Any  # of the tuple of all arguments; other leaves than arrays are `Static` nodes
    is_batch: tuple[bool, ...]  # for each leaf, whether it belongs to the batch
    names: tuple[str, ...]  # how messages call each leaf
    parameters: tuple[str, ...]  # how they call each argument
    keywords: tuple[str, ...]  # names of the last arguments, which go by keyword
    numbers: frozenset[int]  # positions of leaves that are numbers and constants
    constants: tuple[tuple[str, str], ...]  # the name and, in words, the value of each constant among the arguments

    def data(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that are data, of all leaves of the arguments; the others are constants of the program."""
        return [x for i, x in enumerate(leaves) if is_array(x) and i not in self.numbers]

    def with_batch(self, positions: Collection[int]) -> "Signature":
        """The same with these leaves as the batch."""
        return dataclasses.replace(self, is_batch=tuple(i in positions for i in range(len(self.names))))

    @functools.cached_property
    def state(self) -> tuple[int, ...]:
        """Positions of the state's leaves."""
        return tuple(i for i, b in enumerate(self.is_batch) if not b)

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """Positions of the batch's leaves."""
        return tuple(i for i, b in enumerate(self.is_batch) if b)

    @functools.cached_property
    def arguments(self) -> list[tuple[Any, list[int], str]]:
        """Each argument's structure, the positions of its leaves, and its name."""
        out, start = [], 0
        for child, name in zip(self.tree.children(), self.parameters, strict=True):
            out.append((child, list(range(start, start + child.num_leaves)), name))
            start += child.num_leaves
        return out


def flat(args: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[list[Any], Any]:
    """Return leaves and structure of a call's arguments, the last of them by keyword."""
    leaves, tree = jax.tree.flatten(args)
    return leaves, (tree, keywords) if keywords else tree


def leaf_name(parameters: Sequence[str], path: tuple[Any, ...]) -> str:
    """Return a leaf's name in messages, from the arguments' names and its path in their tuple."""
    return f"{parameters[path[0].idx]}{jax.tree_util.keystr(path[1:])}"


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the items at these positions from a sequence, fast."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda items: [items[i] for i in positions]


def with_constants(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a structure with a node in place of each leaf that is `Static`. No node of a user is rebuilt for it."""
    each = iter(leaves)

    def changed(part: Any) -> Any:
        if not _is_leaf(part):
            return _with_children(part, map(changed, part.children()))
        return jax.tree.structure(leaf) if isinstance(leaf := next(each), Static) else part

    return changed(tree)


def unflattener(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes a tree of a structure, given its leaves; `Static` nodes become their values."""
    constants = [(i, part.node_data()[1].value) for i, part in enumerate(_ends(tree)) if is_constant(part)]
    if not constants:
        return tree.unflatten
    whole = structure_of_values(tree)

    def unflatten(leaves: Sequence[Any]) -> Any:
        merged = list(leaves)
        for position, value in constants:
            merged.insert(position, value)
        return whole.unflatten(merged)

    return unflatten


def structure_of_values(tree: Any) -> Any:
    """Return a structure with a leaf in place of each `Static` node. No node of a user is rebuilt for it."""
    if is_constant(tree):
        return _LEAF
    return tree if _is_leaf(tree) else _with_children(tree, map(structure_of_values, tree.children()))


def _ends(tree: Any) -> Iterator[Any]:
    if _is_leaf(tree) or is_constant(tree):
        yield tree
    for child in tree.children():
        yield from _ends(child)


_LEAF = jax.tree.structure(0)


def is_constant(tree: Any) -> bool:
    """Check whether a structure is that of a `Static`."""
    return (tree.node_data() or (None,))[0] is Static


def _is_leaf(tree: Any) -> bool:
    return tree == _LEAF


def _with_children(tree: Any, children: Iterable[Any]) -> Any:
    return PyTreeDef.from_node_data_and_children(default_registry, tree.node_data(), list(children))


def constant_text(value: Any) -> str:
    """Return the text of a constant, the same on all ranks that have the same constant."""
    if value is None or isinstance(value, (str, bytes, *NUMBERS)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} ({', '.join(map(constant_text, value))})"
    # The text of most other objects contains an address, which differs by rank.
    return name_of(value)


# --- parts of a result that match an argument get its layout


def same(one: Any, other: Any) -> bool:
    """Check whether two structures are equal. Metadata that cannot be compared (a NumPy array) counts as unequal."""
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
        # The larger first: a bias is a part of the weights, even if there is an argument like it. Of those with as many
        # leaves, the one with more nodes: the state of momentum holds a tree like the parameters.
        structure, at = max(left, key=lambda argument: (len(argument[1]), argument[0].num_nodes))
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
