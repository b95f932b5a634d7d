"""Search for the state leaves that an axis cuts, and their dimensions, if the user gives none.

Dimensions that factors tie together form a class, cut together or not at all, as a head in the kernels of queries,
keys and values. Tries are counted, not timed, so that every rank finds the same.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.errors import StepError
from jaxdist.ir.interpreter import CONTROL_FLOW, bodies
from jaxdist.placements.model.block import Block, Node, UnionFind
from jaxdist.placements.model.cost import cost, descend
from jaxdist.placements.model.strategy import nbytes
from jaxdist.placements.model.values import REPLICATED, Placement, form, reshaped, tile
from jaxdist.placements.propagate import propagate
from jaxdist.placements.search.infer import Infer

_PADDED = 1 / 16  # largest relative growth of a dimension by padding
# Limit on placements of the step: fewer the more operations it has, down to a minimum.
_PLACINGS, _FEWEST, _OPERATIONS = 200, 32, 200_000

Dimension = tuple[int, int, int]  # numbers of a block, a value in it, and one of its dimensions
Member = tuple[int, int]  # numbers of an input and one of its dimensions
Class = frozenset[Member]


def search(
    infer: Infer,
    block: Block,
    state: Sequence[int],
    sources: Sequence[int | None],
    names: Sequence[str],
    batch_devices: int = 1,
    fixed: Mapping[int, int | None] | None = None,
) -> Mapping[int, int | None]:
    """Return the best dimension to cut for each input; omitted inputs stay whole, as do those with None.

    If dimensions are `fixed`, by annotations or since leaves come cut, nothing is searched: they are cut, and with each
    the dimensions that are tied to it.
    """
    classes = _Classes(infer, block, state, sources)
    if fixed:
        return {**_cuts([tied for tied in reversed(classes.all) if not tied.isdisjoint(fixed.items())]), **fixed}
    most = min(_PLACINGS, max(_FEWEST, _OPERATIONS // max(classes.operations, 1)))
    prices: dict[frozenset[Member], float] = {}

    # `all` has the largest classes first: of an input that two classes cut, the smaller one, of a head, say, decides.
    def layout(on: frozenset[Class]) -> dict[int, int]:
        return _cuts([tied for tied in reversed(classes.all) if tied in on])

    def value(on: frozenset[Class]) -> float:
        cuts = layout(on)
        if (key := frozenset(cuts.items())) not in prices:
            if len(prices) >= most:
                return math.inf
            prices[key] = _price(infer, block, state, sources, batch_devices, cuts)
        return prices[key]

    groups = _by_layer(classes.all, block, names)
    # Tries are limited, so the groups that pay off by themselves come first; the others keep their order of size.
    groups = [*sorted(groups[: most // 2], key=value), *groups[most // 2 :]]
    return layout(descend(frozenset(), groups, _neighbors, value))


class _Classes:
    """The classes of an axis's dimensions: a union-find over all values, also in bodies."""

    def __init__(self, infer: Infer, block: Block, state: Sequence[int], sources: Sequence[int | None]):
        self._infer, self._devices = infer, infer.devices
        self._ties = UnionFind[Dimension]()
        self._numbers: dict[Block, int] = {}
        self.operations = 0
        self._walk(block)
        for o, k in zip(block.outputs, sources, strict=True):
            if k is not None:
                self._same(block, o, block, block.inputs[k])
        # Of ``tanh(x @ a) @ b``, the columns of `a` and the rows of `b` are one class, the hidden features: cut
        # together, they need one all-reduce, of the result. The rows of `a`, cut alone, need one before `tanh`.
        members: dict[Dimension, list[Member]] = {}
        for k in state:
            aval = block.avals[block.inputs[k]]
            if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                continue
            for dim, n in enumerate(aval.shape):
                if n >= self._devices and -n % self._devices <= _PADDED * n:
                    members.setdefault(self._ties.of(self._dimension(block, block.inputs[k], dim)), []).append((k, dim))
        size = lambda tied: sum(nbytes(block.avals[block.inputs[k]]) for k in {k for k, _ in tied})
        self.all: list[Class] = sorted(map(frozenset, members.values()), key=lambda tied: (-size(tied), min(tied)))

    def _dimension(self, block: Block, value: int, dim: int) -> Dimension:
        return self._numbers.setdefault(block, len(self._numbers)), value, dim

    def _walk(self, block: Block) -> None:
        self._numbers[block] = len(self._numbers)
        self.operations += len(block.nodes)
        for node in block.nodes:
            if node.name in CONTROL_FLOW:
                self._bodies(block, node)
            for dimension, other in self._tied(block, node):
                self._ties.tie(dimension, other)

    def _tied(self, block: Block, node: Node) -> Iterator[tuple[Dimension, Dimension]]:
        """Yield pairs of dimensions that an operation ties."""
        if node.name == "reshape":
            ins, outs = block.shapes((node.ins[0], node.outs[0]))
            for d, size in enumerate(ins):
                split = reshaped(tile(d, size, self._devices), ins, outs) if math.prod(ins) else None
                if split is not None and split.outer == 1:
                    yield self._dimension(block, node.ins[0], d), self._dimension(block, node.outs[0], split.dim)
        elif (described := block.factors(node)) is not None:
            seen: dict[int | None, Dimension] = {}
            for value, dims in zip((*node.ins, *node.outs), (*described.operands, *described.results), strict=True):
                for d, factor in enumerate(dims):
                    if factor is not None:
                        dimension = self._dimension(block, value, d)
                        yield dimension, seen.setdefault(factor, dimension)

    def _bodies(self, block: Block, node: Node) -> None:
        """Operands and results of control flow are inputs and outputs of its bodies; a loop's carry is both."""
        for body in bodies(node.eqn):
            inner = self._infer.block(body.closed, node.backward)
            if inner not in self._numbers:  # several loops may share it
                self._walk(inner)
            ends = [(node.ins[k], inner.inputs[n], n in body.xs) for n, k in enumerate(body.ins)]
            ends += [(node.outs[k], inner.outputs[n], n in body.ys) for n, k in enumerate(body.outs)]
            for outer, value, is_slice in ends:
                self._same(block, outer, inner, value, int(is_slice))
            loops = [self._dimension(block, outer, 0) for outer, _, is_slice in ends if is_slice]
            for loop in loops[1:]:
                self._ties.tie(loop, loops[0])
            if body.outs:  # unlike a loop's condition
                for k, o in zip(body.carry, inner.outputs[: len(body.carry)], strict=True):
                    self._same(inner, o, inner, inner.inputs[k])

    def _same(self, block: Block, value: int, other: Block, same: int, first: int = 0) -> None:
        """Tie the dimensions of values in two blocks; the second lacks the `first` leading ones."""
        for d in range(len(other.avals[same].shape)):
            self._ties.tie(self._dimension(block, value, d + first), self._dimension(other, same, d))


def _price(
    infer: Infer,
    block: Block,
    state: Sequence[int],
    sources: Sequence[int | None],
    batch_devices: int,
    cuts: Mapping[int, int],
) -> float:
    """Return the seconds of a layout: the time of the step, plus the time to send a device's part of the state.

    Options hardly tell layouts apart, and would double the time of the search.
    """
    n, avals, in_state = infer.devices, [block.avals[i] for i in block.inputs], set(state)
    ins: list[Placement] = [
        tile(cuts[k], aval.shape[cuts[k]], n, of_state=True) if k in cuts else REPLICATED
        for k, aval in enumerate(avals)
    ]
    wants = [form(ins[k]) if k is not None and k in in_state else REPLICATED for k in sources]
    try:
        placed = propagate(infer, block, ins).returning(infer, wants)
    # An operation that refuses these slices makes the layout impossible, and not the step.
    except StepError:
        return math.inf
    held = sum(nbytes(avals[k]) / (n if k in cuts else 1) for k in state)
    return cost(placed, infer, batch_devices) + held / infer.link.bandwidth


def _neighbors(on: frozenset[Class], group: frozenset[Class]) -> list[frozenset[Class]]:
    """Return the layouts one step away: without the group; or with it, added to or instead of others of its leaves."""
    if group <= on:
        return [on - group]
    # Instead of others in one step, as from a kernel's columns to its rows: on the way it would be whole, which costs
    # more, and the descent would end there.
    leaves = {k for tied in group for k, _ in tied}
    return [on | group, frozenset(tied for tied in on if leaves.isdisjoint(k for k, _ in tied)) | group]


def _cuts(classes: Iterable[Class]) -> dict[int, int]:
    """Return the inputs that these classes cut; the first class of an input decides."""
    cuts: dict[int, int] = {}
    for tied in classes:
        for k, dim in sorted(tied):
            cuts.setdefault(k, dim)
    return cuts


class _Group(NamedTuple):
    """Classes that correspond in several layers."""

    description: frozenset[tuple[str, tuple[int, ...], int]]  # by member: leaf, without numbers; shape; dimension
    classes: list[Class]
    leaves: set[int]  # that these cut


def _by_layer(classes: Sequence[Class], block: Block, names: Sequence[str]) -> list[frozenset[Class]]:
    """Group corresponding classes of several layers; a group has at most one class per leaf."""
    groups = list[_Group]()
    # ``layers[0]['w']`` and ``layers[1]['w']`` are both ``layers[#]['w']``: cut alike, without a try for each layer.
    leaf = [(re.sub(r"\d+", "#", name), block.avals[i].shape) for name, i in zip(names, block.inputs, strict=True)]
    for tied in classes:
        description, leaves = frozenset((*leaf[k], dim) for k, dim in tied), {k for k, _ in tied}
        group = next((g for g in groups if g.description == description and g.leaves.isdisjoint(leaves)), None)
        if group is None:
            groups.append(group := _Group(description, [], set()))
        group.classes.append(tied)
        group.leaves.update(leaves)
    return [frozenset(group.classes) for group in groups]
