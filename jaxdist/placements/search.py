"""Search for the state leaves that an axis cuts, and their dimensions, if the user gives none.

Dimensions that factors tie together form a class, cut together or not at all, as a head in the kernels of queries,
keys and values. Tries are counted, not timed, so that every rank finds the same.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxdist.errors import StepError
from jaxdist.ir.interpreter import CONTROL_FLOW, bodies
from jaxdist.placements.block import Block, Classes, Node
from jaxdist.placements.cost import cost, descend
from jaxdist.placements.infer import Infer
from jaxdist.placements.strategy import nbytes
from jaxdist.placements.values import REPLICATED, Placement, form, reshaped, tile

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
    examples: int = 1,
    given: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Return the best dimension to cut for each input; omitted inputs stay whole."""
    classes = _Classes(infer, block, state, sources)
    if given:
        return {**_cuts([one for one in reversed(classes.found) if not one.isdisjoint(given.items())]), **given}
    most = min(_PLACINGS, max(_FEWEST, _OPERATIONS // max(classes.operations, 1)))
    known: dict[frozenset[Member], float] = {}

    def layout(on: frozenset[Class]) -> dict[int, int]:
        return _cuts([one for one in reversed(classes.found) if one in on])

    def value(on: frozenset[Class]) -> float:
        cuts = layout(on)
        if (key := frozenset(cuts.items())) not in known:
            if len(known) >= most:
                return math.inf
            known[key] = _price(infer, block, state, sources, examples, cuts)
        return known[key]

    groups = _alike(classes.found, block, names)
    groups = [*sorted(groups[: most // 2], key=value), *groups[most // 2 :]]  # the best alone first
    return layout(descend(frozenset(), groups, _near, value))


class _Classes:
    """The classes of an axis's dimensions: a union-find over all values, also in bodies."""

    def __init__(self, infer: Infer, block: Block, state: Sequence[int], sources: Sequence[int | None]):
        self._infer, self._devices = infer, infer.devices
        self._ties = Classes[Dimension]()
        self._numbers: dict[Block, int] = {}
        self.operations = 0
        self._walk(block)
        for o, k in zip(block.outputs, sources, strict=True):
            if k is not None:
                self._same(block, o, block, block.inputs[k])
        members: dict[Dimension, list[Member]] = {}
        for k in state:
            aval = block.avals[block.inputs[k]]
            if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                continue
            for dim, n in enumerate(aval.shape):
                if n >= self._devices and -n % self._devices <= _PADDED * n:
                    members.setdefault(self._ties.of(self._at(block, block.inputs[k], dim)), []).append((k, dim))
        size = lambda one: sum(nbytes(block.avals[block.inputs[k]]) for k in {k for k, _ in one})
        self.found: list[Class] = sorted(map(frozenset, members.values()), key=lambda one: (-size(one), min(one)))

    def _at(self, block: Block, value: int, dim: int) -> Dimension:
        return self._numbers.setdefault(block, len(self._numbers)), value, dim

    def _walk(self, block: Block) -> None:
        self._numbers[block] = len(self._numbers)
        self.operations += len(block.nodes)
        for node in block.nodes:
            if node.name in CONTROL_FLOW:
                self._bodies(block, node)
            for one, other in self._tied(block, node):
                self._ties.tie(one, other)

    def _tied(self, block: Block, node: Node) -> Iterator[tuple[Dimension, Dimension]]:
        """Yield pairs of dimensions that an operation ties."""
        if node.name == "reshape":
            ins, outs = block.shapes((node.ins[0], node.outs[0]))
            for d, size in enumerate(ins):
                to = reshaped(tile(d, size, self._devices), ins, outs) if math.prod(ins) else None
                if to is not None and to.outer == 1:
                    yield self._at(block, node.ins[0], d), self._at(block, node.outs[0], to.dim)
        elif (described := block.factors(node)) is not None:
            seen: dict[int | None, Dimension] = {}
            for value, dims in zip((*node.ins, *node.outs), (*described.operands, *described.results), strict=True):
                owns = [(factor, self._at(block, value, d)) for d, factor in enumerate(dims) if factor is not None]
                yield from ((own, seen.setdefault(factor, own)) for factor, own in owns)

    def _bodies(self, block: Block, node: Node) -> None:
        """Operands and results of control flow are inputs and outputs of its bodies; a loop's carry is both."""
        for body in bodies(node.eqn):
            inner = self._infer.block(body.closed, node.backward)
            if inner not in self._numbers:  # several loops may share it
                self._walk(inner)
            ends = [(node.ins[k], inner.inputs[n], n in body.xs) for n, k in enumerate(body.ins)]
            ends += [(node.outs[k], inner.outputs[n], n in body.ys) for n, k in enumerate(body.outs)]
            for outer, own, is_slice in ends:
                self._same(block, outer, inner, own, int(is_slice))
            loops = [self._at(block, outer, 0) for outer, _, is_slice in ends if is_slice]
            for one in loops[1:]:
                self._ties.tie(one, loops[0])
            for k, o in zip(body.carry, inner.outputs[: len(body.outs)], strict=False):
                self._same(inner, o, inner, inner.inputs[k])

    def _same(self, block: Block, value: int, other: Block, same: int, first: int = 0) -> None:
        """Tie the dimensions of values in two blocks; the second lacks the `first` leading ones."""
        for d in range(len(other.avals[same].shape)):
            self._ties.tie(self._at(block, value, d + first), self._at(other, same, d))


def _price(
    infer: Infer,
    block: Block,
    state: Sequence[int],
    sources: Sequence[int | None],
    examples: int,
    cuts: Mapping[int, int],
) -> float:
    """Return the seconds of a layout: those of the step, plus the time to send a device's part of the state."""
    n, avals, kept = infer.devices, [block.avals[i] for i in block.inputs], set(state)
    ins: list[Placement] = [
        tile(cuts[k], aval.shape[cuts[k]], n, of_state=True) if k in cuts else REPLICATED
        for k, aval in enumerate(avals)
    ]
    wants = [form(ins[k]) if k is not None and k in kept else REPLICATED for k in sources]
    try:
        placed = infer.place(block, ins, wants)
    except StepError:
        return math.inf
    finally:
        infer.forget(block)
    held = sum(nbytes(avals[k]) / (n if k in cuts else 1) for k in state)
    return cost(placed, infer, examples) + held / infer.link.bandwidth


def _near(on: frozenset[Class], group: frozenset[Class]) -> list[frozenset[Class]]:
    if group <= on:
        return [on - group]
    leaves = {k for one in group for k, _ in one}
    return [on | group, frozenset(one for one in on if leaves.isdisjoint(k for k, _ in one)) | group]


def _cuts(classes: Iterable[Class]) -> dict[int, int]:
    """Return the inputs that these classes cut; the first class of an input decides."""
    found: dict[int, int] = {}
    for one in classes:
        for k, dim in sorted(one):
            found.setdefault(k, dim)
    return found


def _alike(classes: Sequence[Class], block: Block, names: Sequence[str]) -> list[frozenset[Class]]:
    """Group corresponding classes of several layers; a group has at most one class per leaf."""
    groups: list[tuple[frozenset[tuple[str, tuple[int, ...], int]], list[Class], set[int]]] = []
    leaf = [(re.sub(r"\d+", "#", name), block.avals[i].shape) for name, i in zip(names, block.inputs, strict=True)]
    for one in classes:
        what = frozenset((*leaf[k], dim) for k, dim in one)
        leaves = {k for k, _ in one}
        group = next((g for g in groups if g[0] == what and g[2].isdisjoint(leaves)), None)
        if group is None:
            groups.append((what, [one], leaves))
        else:
            group[1].append(one)
            group[2].update(leaves)
    return [frozenset(group) for _, group, _ in groups]
