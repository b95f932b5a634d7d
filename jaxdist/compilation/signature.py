"""The signature of a call: its structure, and its data, state and batch.

Leaves are counted in two ways. Of a call ``step({"act": jnp.tanh, "w": w}, opt_state, x)``:

    leaves           act   w     opt_state   x       positions among all: of a `Constant`
    data                   0     1           2       positions in a `Signature`: constants do not count
    state                  0     1
    batch                                    2
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef, default_registry

from jaxdist.text import name_of

NUMBERS = (bool, int, float, complex)
_DATA = (jax.Array, jax.ShapeDtypeStruct, *NUMBERS)

Leaf = Any  # of a user's arguments or result: an array of JAX or NumPy, a `Padded`, a number, a constant of any type
PyTree = Any  # a user's
Args = tuple[PyTree, ...]  # of a call
Kwargs = Mapping[str, PyTree]
Avals = Sequence[jax.ShapeDtypeStruct]


class TreeDef(Protocol):
    """The structure of a tree: JAX's `PyTreeDef`, which has no types."""

    @property
    def num_leaves(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    def children(self) -> Sequence["TreeDef"]: ...
    def node_data(self) -> tuple[type, Any] | None: ...
    def unflatten(self, leaves: Iterable[Leaf], /) -> PyTree: ...


Structure = TreeDef | tuple[TreeDef, tuple[str, ...]]  # of all arguments; with the names that go by keyword


class Constant(NamedTuple):
    """A leaf of the arguments that is not data: each of its values needs its own program."""

    position: int  # among all leaves
    kind: type  # 1, 1.0 and True are equal, and not the same to a step
    value: Leaf


class ArgumentLeaves(NamedTuple):
    """An argument of a call."""

    structure: TreeDef
    positions: list[int]  # of its leaves, among all that are data
    name: str


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """A leaf that is not an array (an activation function in a module, a string): a constant of the program."""

    value: Leaf

    def __eq__(self, other: object) -> bool:
        # As for jax.jit: 1, 1.0 and True are not the same to a step.
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def is_array(leaf: Leaf) -> bool:
    """Check whether a leaf of the arguments is data, as opposed to a constant of the program."""
    return isinstance(leaf, _DATA) or hasattr(leaf, "__array__")


def is_keys(x: Leaf) -> bool:
    """Check whether a leaf is a typed PRNG key, or an array of them."""
    return jnp.issubdtype(getattr(x, "dtype", None) or type(x), jax.dtypes.prng_key)


@dataclass(frozen=True)
class Signature:
    """The structure of a call. A compiled program is specific to it, and to shapes and dtypes."""

    tree: TreeDef  # of the tuple of all arguments; other leaves than arrays are `Static` nodes
    is_batch: tuple[bool, ...]  # for each leaf, whether it belongs to the batch
    names: tuple[str, ...]  # how messages call each leaf
    parameters: tuple[str, ...]  # how they call each argument
    keywords: tuple[str, ...]  # names of the last arguments, which go by keyword
    numbers: frozenset[int]  # positions of leaves that are numbers and constants
    constants: tuple[tuple[str, str], ...]  # the name and, in words, the value of each constant among the arguments
    # The dimension of each leaf that its model wants the model axis to cut; a leaf of which it wants it whole, None.
    annotated: tuple[tuple[int, int | None], ...] = ()

    def data(self, leaves: Sequence[Leaf]) -> list[Leaf]:
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
    def arguments(self) -> list[ArgumentLeaves]:
        """The arguments, in order."""
        arguments, start = list[ArgumentLeaves](), 0
        for structure, name in zip(self.tree.children(), self.parameters, strict=True):
            end = start + structure.num_leaves
            arguments.append(ArgumentLeaves(structure, list(range(start, end)), name))
            start = end
        return arguments


def flat(args: Args, keywords: tuple[str, ...]) -> tuple[list[Leaf], Structure]:
    """Return leaves and structure of a call's arguments, the last of them by keyword."""
    leaves, tree = jax.tree.flatten(args)
    return leaves, (tree, keywords) if keywords else tree


def leaf_name(parameters: Sequence[str], path: jax.tree_util.KeyPath) -> str:
    """Return a leaf's name in messages, from the arguments' names and its path in their tuple."""
    return f"{parameters[path[0].idx]}{jax.tree_util.keystr(path[1:])}"


def picker(positions: Sequence[int]) -> Callable[[Sequence[Leaf]], Sequence[Leaf]]:
    """A function that takes the items at these positions from a sequence, fast."""
    # `itemgetter` of one position returns the item itself, and of none it is an error.
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda items: [items[i] for i in positions]


def with_constants(tree: TreeDef, leaves: Sequence[Leaf]) -> TreeDef:
    """Replace each leaf of a structure that is `Static` with a node, without rebuilding a user's nodes."""
    remaining = iter(leaves)  # in the order in which a structure is walked

    # A user's class may check its children when it is constructed: it must not see a `Static`.
    def changed(part: TreeDef) -> TreeDef:
        if not _is_leaf(part):
            return _with_children(part, map(changed, part.children()))
        return jax.tree.structure(leaf) if isinstance(leaf := next(remaining), Static) else part

    return changed(tree)


def unflattener(tree: TreeDef) -> Callable[[Sequence[Leaf]], PyTree]:
    """Return a function that makes a tree of a structure, given its leaves; `Static` nodes become their values."""
    ends = enumerate(map(_constant, _ends(tree)))
    constants = [(i, constant.value) for i, constant in ends if constant is not None]
    if not constants:
        return tree.unflatten
    whole = structure_of_values(tree)

    def unflatten(leaves: Sequence[Leaf]) -> PyTree:
        merged = list(leaves)
        # In ascending order, so that each lands where it stays.
        for position, value in constants:
            merged.insert(position, value)
        return whole.unflatten(merged)

    return unflatten


def structure_of_values(tree: TreeDef) -> TreeDef:
    """Replace each `Static` node of a structure with a leaf, without rebuilding a user's nodes."""
    if is_constant(tree):
        return _LEAF
    return tree if _is_leaf(tree) else _with_children(tree, map(structure_of_values, tree.children()))


def _ends(tree: TreeDef) -> Iterator[TreeDef]:
    if _is_leaf(tree) or is_constant(tree):
        yield tree
    for child in tree.children():
        yield from _ends(child)


_LEAF = jax.tree.structure(0)


def is_constant(tree: TreeDef) -> bool:
    """Check whether a structure is a `Static` node."""
    return _constant(tree) is not None


def _constant(tree: TreeDef) -> Static | None:
    kind, data = tree.node_data() or (None, None)
    return data if kind is Static else None


def _is_leaf(tree: TreeDef) -> bool:
    return tree == _LEAF


def _with_children(tree: TreeDef, children: Iterable[TreeDef]) -> TreeDef:
    return PyTreeDef.from_node_data_and_children(default_registry, tree.node_data(), list(children))


def constant_text(value: Leaf) -> str:
    """Return the text of a constant, the same on all ranks that have the same constant."""
    if value is None or isinstance(value, (str, bytes, *NUMBERS)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} ({', '.join(map(constant_text, value))})"
    # The text of most other objects contains an address, which differs by rank.
    return name_of(value)


# --- parts of a result that match an argument get its layout


class Type(Protocol):
    """The type of an array: of a leaf of the arguments, or of the result of a trace."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


class Match(NamedTuple):
    """The leaves of a step's result that correspond to leaves of its arguments."""

    sources: list[int | None]  # for each leaf of the result, the leaf of the arguments whose next value it is
    returned: frozenset[int]  # leaves of arguments that match as many parts of the result as there are such arguments
    tied: list[list[int]]  # leaves at the same place in arguments of the same structure: they are kept the same way


def match(tree: TreeDef, types: Sequence[Type], arguments: Sequence[ArgumentLeaves], avals: Sequence[Type]) -> Match:
    """Match a step's result, of these types, with its arguments of state, whose leaves have the types `avals`."""
    sources: list[int | None] = [None] * tree.num_leaves
    returned, tied = set[int](), list[list[int]]()
    remaining = [argument for argument in arguments if argument.positions]
    while remaining:
        # The larger first: a bias is a part of the weights, even if there is an argument like it. Of those with as many
        # leaves, the one with more nodes: the state of momentum holds a tree like the parameters.
        largest = max(remaining, key=lambda argument: (len(argument.positions), argument.structure.num_nodes))
        leaf_types = [avals[i] for i in largest.positions]
        group = [
            argument for argument in remaining
            if _same(argument.structure, largest.structure)
            and all(map(_equal, (avals[i] for i in argument.positions), leaf_types))
        ] or [largest]  # fmt: skip
        remaining = [argument for argument in remaining if all(argument is not member for member in group)]
        # For ``step(online, target, x) -> online, target`` the group is both arguments, and the places are leaves 0 and
        # 1 of the result: one for each, in order. With a third part like them, that would be kept as `target` is.
        places = [k for k in _places(tree, types, largest.structure, leaf_types) if sources[k] is None]
        for n, k in enumerate(places):  # where there are more than arguments, these are like the last
            positions = group[min(n, len(group) - 1)].positions
            sources[k : k + len(positions)] = positions
        # A single number is too common to be identified by its type: it would be donated for a different counter.
        if len(places) == len(group) and (len(leaf_types) > 1 or leaf_types[0].shape):
            returned.update(i for member in group for i in member.positions)
        if len(group) > 1:
            tied += map(list, zip(*(member.positions for member in group), strict=True))
    return Match(sources, frozenset(returned), tied)


def _places(tree: TreeDef, types: Sequence[Type], structure: TreeDef, leaf_types: Sequence[Type]) -> Iterator[int]:
    """The first leaf of each part of a result that is like an argument, the outermost parts only."""
    unvisited = [(tree, 0)]
    while unvisited:
        part, first = unvisited.pop()
        n = part.num_leaves
        if n < structure.num_leaves:
            continue
        if n == len(leaf_types) and _same(part, structure) and all(map(_equal, types[first : first + n], leaf_types)):
            yield first
            continue
        children = part.children()
        ends = itertools.accumulate(child.num_leaves for child in children)
        starts = [first + end - child.num_leaves for child, end in zip(children, ends, strict=True)]
        # A stack: reversed, parts are found in the order of the result, in which arguments of one structure take them.
        unvisited += reversed(list(zip(children, starts, strict=True)))


def _same(structure: TreeDef, other: TreeDef) -> bool:
    """Check whether two structures are equal. Metadata that cannot be compared (a NumPy array) counts as unequal."""
    try:
        return bool(structure == other)
    except Exception:
        return False


def _equal(a: Type, b: Type) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
