"""Infer: how each value of a step is placed, and in which form each operation takes its operands.

A pure walk over blocks; nothing is traced. The bodies of control flow are inferred by `jaxdist.placements.control_flow`
to a fixpoint over what loops carry, and remembered by (body, placements of the inputs). Every rank infers the same:
nothing depends on the order of a set or on an address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxdist.errors import StepError
from jaxdist.ir.operations import SAME_RANK, is_deferrable
from jaxdist.machine import VIRTUAL, Machine
from jaxdist.mesh import AXIS, GROUP, MODEL, Axis
from jaxdist.placements import rules
from jaxdist.placements.block import Block, Node, added, flatten, number
from jaxdist.placements.describe import Factors
from jaxdist.placements.marked import marked, used_in_slices
from jaxdist.placements.owners import with_owners
from jaxdist.placements.run import Cut, make_elementwise, make_whole, run_as_is
from jaxdist.placements.strategy import UNKNOWN, Move, Placed, Strategy, nbytes
from jaxdist.placements.summands import is_zero, linear
from jaxdist.placements.values import (
    DEFERRED,
    PARTIAL,
    REPLICATED,
    Deferred,
    Form,
    Partial,
    Placement,
    Replicated,
    Split,
    form,
    is_wide,
    related,
    tile,
)


class Infer:
    """Settles placements over one axis of a mesh.

    Args:
      axis: the devices that share the values of a program.
      choose: ``choose(shape) -> dimension or None``: along which marked values of a shape are split.
      level: of ZeRO, in place of that which the marks say.
      machine: what they are, and their links.
      split: ``"slices"`` or ``"owners"`` for what works on whole matrices; None: the cheaper one.
      before: the axes over which the program is placed already: it is what one device along them runs.
      after: the axes over which it will be placed next.
    """

    def __init__(
        self,
        axis: Axis,
        choose: Callable[[tuple[int, ...]], int | None],
        level: int | None = None,
        machine: Machine = VIRTUAL,
        split: str | None = None,
        before: Sequence[Axis] = (),
        after: Sequence[Axis] = (),
    ):
        self.axis, self.devices, self.split = axis, axis.size, split
        # Activations are made of what the model axis has cut: their products are no work on whole matrices.
        self._may_own = axis.name != MODEL or split == "owners"
        self.axes, self.mesh = (*before, axis), (*before, axis, *after)
        self.choose = choose if not after else lambda shape: None
        self._choose, self._level, self.machine, self.link = choose, level, machine, machine.link(axis)
        self._blocks: dict[tuple[int, bool], tuple[Any, Block]] = {}
        self._kept: list[Block] = []  # so that their ids stay their own
        self._placed: dict[Any, Placed] = {}
        self._wanted: dict[Any, dict[int, int]] = {}

    def over(self, mesh: Sequence[Axis], k: int) -> Infer:
        """The same over the `k`-th axis of a mesh; what `jaxdist.zero` marks is in slices along the last one."""
        return Infer(mesh[k], self._choose, self._level, self.machine, self.split, mesh[:k], mesh[k + 1 :])

    def block(self, closed: ClosedJaxpr, backward: bool = False) -> Block:
        """The block of a jaxpr; one for each."""
        key = (id(closed.jaxpr), backward)
        if key not in self._blocks:
            self._blocks[key] = closed, flatten(closed, backward)  # keeps the jaxpr, so that its id stays its own
        return self._blocks[key][1]

    def place(
        self,
        block: Block,
        ins: Sequence[Placement],
        wants: Sequence[Form | None] | None = None,
        loose: frozenset[int] = frozenset(),
    ) -> Placed:
        """Settle the placements of a block.

        Args:
          block: to place.
          ins: how its inputs come.
          wants: the form of each output; None: as it comes.
          loose: outputs that a loop adds up: what is added to them may stay a summand.
        """
        ins = tuple(ins)
        wants = tuple(wants) if wants is not None else (None,) * len(block.outputs)
        key = (id(block), ins, wants, loose)
        if key not in self._placed:
            natural = (id(block), ins, (None,) * len(wants), loose)
            if natural not in self._placed:
                placed = self.in_slices(block, ins, loose)
                if self._may_own and (owned := with_owners(self, placed)) is not None:
                    placed = replace(self._settled(owned, ins, loose), matrices=placed.matrices)
                self._placed[natural] = placed
            if key != natural:
                self._placed[key] = self._placed[natural].returning(self, wants)
        return self._placed[key]

    def forget(self, block: Block) -> None:
        """Let go of the placings of a block, other than those of its bodies."""
        self._placed = {key: placed for key, placed in self._placed.items() if key[0] != id(block)}

    def in_slices(self, block: Block, ins: Sequence[Placement], loose: frozenset[int] = frozenset()) -> Placed:
        """Settle the placements of a block without owners in it, other than in its bodies."""
        self._kept.append(block)
        return self._settled(block, tuple(ins), loose)

    def _settled(self, block: Block, ins: Sequence[Placement], loose: frozenset[int]) -> Placed:
        """Once, and again if some of what was added up is used in slices alone: these are less to send.

        Not along the axis of data, where a parameter in slices would make more messages of a few more bytes.
        """
        walk = Walk(self, block, ins, loose)
        if self.axis.name not in (GROUP, AXIS) and (slices := used_in_slices(walk)):
            again = Walk(self, block, ins, loose, slices).placed
            if self._sent(again) < self._sent(walk.placed):
                return again
        return walk.placed

    def _sent(self, placed: Placed) -> float:
        """The bytes that a device sends for a block's moves."""
        return sum(self.link.sent(move.kind, move.bytes) for move in placed.moves)

    def marked(self, block: Block) -> dict[int, int]:
        """Values that lead to a mark of `jaxdist.zero`, and the dimension along which the mark will have them split."""
        if id(block) not in self._wanted:
            self._wanted[id(block)] = marked(self, block)
        return self._wanted[id(block)]

    @functools.cached_property
    def last(self) -> Infer:
        """The same over the last axis of the mesh, along which marked values are in slices."""
        return self if len(self.axes) == len(self.mesh) else self.over(self.mesh, len(self.mesh) - 1)

    def level(self, node: Node) -> int:
        """Of a mark; 0: it says nothing."""
        own, role = node.eqn.params["level"], node.eqn.params["role"]
        return own if self._level is None or role == "requested" else self._level

    def shard(self, dim: int, size: int) -> Split:
        """How a marked value is split along a dimension."""
        return tile(dim, size, self.devices, stored=True)

    # --- what it costs to change a form

    def move(self, placement: Placement, to: Form, aval: Any) -> str:
        """The collective that brings a value into a form; "": none does."""
        if isinstance(placement, Partial):
            if isinstance(to, Partial):
                return "" if to.owed == placement.owed else "all-reduce"
            scattered = isinstance(to, Split) and self.slices(placement, to, aval)
            return "reduce-scatter" if scattered else "all-reduce"
        if isinstance(placement, Split) and not placement.whole and form(placement) != to:
            if isinstance(to, Split) and self.slices(placement, to, aval):
                return "all-to-all"
            return "all-gather"
        return ""

    def sent(self, placement: Placement, to: Form, aval: Any) -> float:
        """The bytes that a device sends to bring a value into a form."""
        kind = self.move(placement, to, aval)
        return self.link.sent(kind, nbytes(aval)) if kind else 0

    def slices(self, own: Split | Partial, to: Split, aval: Any) -> bool:
        """Whether a value can be brought into slices without being gathered: by a reduce-scatter of summands, or an
        all-to-all of slices along another dimension."""
        n = self.devices
        if isinstance(own, Partial):
            return to.is_tile(n)
        return (
            own.dim != to.dim
            and own.outer == to.outer == 1
            and not own.is_padded(n)
            and not to.is_padded(n)
            and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        )


class Walk:
    """Settles one block; `slices` says of summands in which ones they are added up."""

    def __init__(
        self,
        infer: Infer,
        block: Block,
        ins: Sequence[Placement],
        loose: frozenset[int],
        slices: Mapping[int, Split] | None = None,
    ):
        marked = {i: infer.shard(dim, block.avals[i].shape[dim]) for i, dim in infer.marked(block).items()}
        self.slices: dict[int, Split] = {**(slices or {}), **marked}
        self.infer, self.block, self.n = infer, block, infer.devices
        self.placed = Placed(block, tuple(map(form, ins)), infer.axis.name)
        self.at: list[Any] = [None] * len(block.avals)
        self.loose = added(block, loose)
        self.next = {i: node for node in block.nodes for i in node.ins}
        self.inputs = {i: k for k, i in enumerate(block.inputs)}
        summed: set[int] = set()
        for i, value in block.known.items():
            self.at[i] = Replicated(number(value))
        for i, placement in zip(block.inputs, ins, strict=True):
            self.at[i] = self._settled(i, placement)
            if isinstance(placement, Partial) and not isinstance(self.at[i], Partial):
                summed.add(self.inputs[i])
        for node in block.nodes:
            strategy = self.strategy(node)
            self.placed.strategies.append(strategy)
            for i, to in zip(node.ins, strategy.takes, strict=True):
                if to is None:
                    continue
                if isinstance(self.at[i], Partial) and not isinstance(to, Partial) and i in self.inputs:
                    summed.add(self.inputs[i])
                self.note(node, i, to, strategy.why or strategy.instead)
            for i, placement in zip(node.outs, strategy.gives, strict=True):
                self.at[i] = placement
                settled = self._settled(i, placement)
                if not isinstance(settled, Partial):
                    self.note(node, i, form(settled), "")
                self.at[i] = settled
        self.placed.at, self.placed.outs = self.at, tuple(form(self.at[i]) for i in block.outputs)
        self.placed.given = tuple(self.at[i] for i in block.outputs)
        self.placed.summed = frozenset(summed)

    def note(self, node: Node, i: int, to: Form, why: str) -> None:
        """Write down that a value has to move, once for each form."""
        kind = self.infer.move(self.at[i], to, self.block.avals[i])
        if kind:
            stored = isinstance(self.at[i], Split) and self.at[i].stored
            self.placed.own.append(Move(node, kind, self.block.avals[i], stored, why))

    def _settled(self, i: int, placement: Placement) -> Placement:
        """A summand with several uses is added up once, before them."""
        if not isinstance(placement, Partial) or self.block.uses[i] <= 1:
            return placement
        return self.slices.get(i, REPLICATED)

    def added_up(self, node: Node) -> frozenset[int]:
        """The results that a loop around this block adds up: they may stay summands until after it."""
        return frozenset(k for k, o in enumerate(node.outs) if o in self.loose)

    # --- one operation

    def strategy(self, node: Node) -> Strategy:
        """How an operation runs, given how its operands come."""
        ins = [self.at[i] for i in node.ins]
        if unknown := [type(e).__name__ for e in node.eqn.effects if type(e).__name__ not in _EFFECTS]:
            raise refuse(node, f"its effect ({unknown[0]}) is not possible on several devices")
        if any(isinstance(p, Partial) for p in ins) and (strategy := linear(self, node, ins)):
            return strategy
        for k, i in enumerate(node.ins):
            if isinstance(ins[k], Partial):
                ins[k] = self.slices.get(i, ins[k])
        for rule in SPECIAL.get(node.name, ()):
            if strategy := rule(self, node, ins):
                return strategy
        if all(isinstance(p, (Replicated, Deferred)) for p in ins):
            return self.alike(node, ins)
        return self.by_factors(node, ins, self.factors(node)) or self.whole(node, ins)

    def factors(self, node: Node) -> Factors | None:
        """The loops of an operation."""
        return rules.factors(node.eqn.primitive, node.eqn.params, self.shapes(node.ins), self.shapes(node.outs))

    def shapes(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.block.avals[i].shape for i in values]

    def alike(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Of operands that every device has."""
        aval = self.block.avals[node.outs[0]] if len(node.outs) == 1 else None
        if aval is not None and aval.ndim and is_deferrable(node.eqn.primitive):
            large = [p for p, i in zip(ins, node.ins, strict=True) if self.block.avals[i].ndim]
            if large and all(isinstance(p, Deferred) for p in large):
                const = 0 if node.name in ("convert_element_type", "copy", "neg") and is_zero(ins[0]) else None
                return Strategy([None] * len(ins), [Deferred(const)], make=make_elementwise, slicewise=True)
        if node.name == "random_split" and node.outs:
            return Strategy([None], [DEFERRED], make=make_whole)
        return Strategy([REPLICATED] * len(ins), [REPLICATED] * len(node.outs), run_as_is)

    def whole(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Computed by every device, on whole operands; what follows may be cut again for nothing."""
        gives: list[Placement] = []
        for o in node.outs:
            dim = self.batch_dim(node, ins, self.block.avals[o].shape)
            size = 0 if dim is None else self.block.avals[o].shape[dim]
            gives.append(REPLICATED if dim is None else replace(tile(dim, size, self.n), whole=True))
        why = "" if all(isinstance(p, (Replicated, Deferred)) for p in ins) else f"{node.name} needs all of it"
        if why and not (node.name in SPECIAL or rules.is_known(node.eqn.primitive)):
            why = UNKNOWN
        if node.eqn.effects:
            why = f"{node.name} has an effect"
        return Strategy([REPLICATED] * len(ins), gives, run_as_is, why=why)

    def batch_dim(self, node: Node, ins: Sequence[Placement], shape: tuple[int, ...]) -> int | None:
        """Which dimension of a result holds the batch, if it can be cut."""
        for p, i in zip(ins, node.ins, strict=True):
            if not isinstance(p, Split) or p.stored:
                continue
            own = self.block.avals[i].shape
            dims = [d for d in range(len(shape)) if shape[d] == own[p.dim]]
            if node.name == "reshape":
                dims += related(own, shape, p.dim)
            elif node.name in SAME_RANK and len(shape) > p.dim:
                dims.append(p.dim)
            dims = [d for d in dims if shape[d] >= self.n]
            # One of k parts of a batch: its examples are in the dimension after that of the parts.
            if not dims and node.name in SAME_RANK and p.dim + 1 < len(shape) and shape[p.dim + 1] >= self.n:
                dims = [p.dim + 1]
            if dims:
                return next((d for d in dims if shape[d] % self.n == 0), dims[0])
        return None

    def by_factors(self, node: Node, ins: Sequence[Placement], described: Factors | None) -> Strategy | None:
        """Cut along the factor for which least has to move."""
        if described is None:
            return None
        best: tuple[Any, Strategy] | None = None
        for factor, split in self.candidates(node, ins, described):
            strategy, cost = self.cut(node, ins, described, factor, split)
            if strategy and (best is None or cost < best[0]):
                best = cost, strategy
        return best and best[1]

    def candidates(self, node: Node, ins: Sequence[Placement], described: Factors) -> Sequence[tuple[int, Split]]:
        """Factors along which an operand is split; those of the batch if there are any: what is stored moves."""
        found: dict[tuple[int, int, int, int], Split] = {}
        batch = [p for p in ins if isinstance(p, Split) and not p.stored]
        for p, dims in zip(ins, described.operands, strict=True):
            if isinstance(p, Split) and not (batch and p.stored) and dims[p.dim] is not None:
                factor = dims[p.dim]
                assert factor is not None
                key = (factor, p.size, p.chunk, p.outer)
                if key not in found or (found[key].stored and not p.stored):
                    found[key] = p
        if not found and batch:
            # What has to be gathered must not make the rest N-fold: cut what is on every device anyway.
            length = {
                self.block.avals[i].shape[p.dim] for p, i in zip(ins, node.ins, strict=True) if isinstance(p, Split)
            }
            shape, dims = self.block.avals[node.outs[0]].shape, described.results[0]
            taken = {factor for operand in described.operands for factor in operand}
            for same in (True, False) if node.name == "gather" else (True,):
                for d, factor in enumerate(dims):
                    if factor in taken - {None} and shape[d] >= self.n and (shape[d] in length) == same:
                        assert factor is not None
                        return [(factor, tile(0, shape[d], self.n))]
        return [(key[0], found[key]) for key in sorted(found)]

    def cut(
        self, node: Node, ins: Sequence[Placement], described: Factors, factor: int, split: Split
    ) -> tuple[Strategy | None, Any]:
        """The operation with one factor cut, and what moves for it."""
        takes: list[Form] = []
        cost = 0.0
        stored = split.stored
        kind = described.reduced.get(factor)
        for k, (p, dims, i) in enumerate(zip(ins, described.operands, node.ins, strict=True)):
            aval = self.block.avals[i]
            to: Form = REPLICATED
            if factor in dims:
                to = form(split.at(dims.index(factor)))
                if not isinstance(p, (Replicated, Deferred)) and isinstance(p, Split) and not p.stored:
                    stored = False
            elif kind == "sum" and described.onto == k:
                to = PARTIAL
            moved = self.infer.sent(p, to, aval)
            if isinstance(p, Split) and not p.stored and moved:
                stored = False
            cost += moved
            takes.append(to)
        gives: list[Placement] = []
        outs = [self.block.avals[o] for o in node.outs]
        if kind is None:
            for dims in described.results:
                if factor in dims:
                    d = dims.index(factor)
                    gives.append(replace(form(split.at(d)), stored=stored))  # type: ignore[arg-type]
                else:
                    return None, None
            return Strategy(takes, gives, Cut(described, factor, split, None)), (cost, 0, factor)
        if kind == "sum":
            if not all(is_wide(o.dtype) for o in outs):
                return None, None
            gives = [Partial(gradient=node.backward)] * len(outs)
        else:
            gives = [REPLICATED] * len(outs)
        run = Cut(described, factor, split, kind)
        sent = self.infer.link.sent("all-reduce", sum(map(nbytes, outs)))
        whole = sum(nbytes(self.block.avals[i]) for p, i in zip(ins, node.ins, strict=True) if isinstance(p, Split))
        if split.stored and sent > cost + 2 * self.infer.link.sent("all-gather", whole):
            return None, None  # to gather what is stored is less than to reduce what is made of it
        return Strategy(takes, gives, run, exchanges=kind != "sum"), (cost + sent, 1, factor)


_EFFECTS = {"NamedAxisEffect", "DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect", "CallbackEffect",
            "UnorderedCallbackEffect", "_UnorderedIOEffect", "_OrderedIOEffect"}  # fmt: skip


Special = Callable[[Walk, Node, Sequence[Placement]], Strategy | None]
SPECIAL: dict[str, list[Special]] = {}
"""Operations that need more than their factors, and what knows of them; None from all of these: as any other."""


def special(*names: str) -> Callable[[Special], Special]:
    """Enter a rule into the table."""

    def enter(rule: Special) -> Special:
        for name in names:
            SPECIAL.setdefault(name, []).append(rule)
        return rule

    return enter


def refuse(node: Node, why: str) -> StepError:
    """An error that names the operation and the user's line."""
    return StepError(f"{node.name} at {node.line or 'an unknown line'}: {why}")


def settled(placement: Placement) -> Placement:
    """As what crosses into control flow: a deferred value is made whole."""
    if isinstance(placement, Deferred):
        return Replicated(placement.const)
    return placement
