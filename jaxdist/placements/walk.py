"""The walk over a block: placements of values, and the forms in which operations take them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxdist.errors import StepError
from jaxdist.ir.operations import SAME_RANK, SHAPE_ONLY, is_deferrable
from jaxdist.placements import rules, values
from jaxdist.placements.block import Block, Node, added
from jaxdist.placements.rules import Factors
from jaxdist.placements.run import Cut, make_in_form, make_whole, run_as_is
from jaxdist.placements.strategy import UNKNOWN, Move, Placed, Strategy, nbytes
from jaxdist.placements.summands import is_zero, linear
from jaxdist.placements.values import REPLICATED, Deferred, Form, Partial, Placement, Replicated, Split, form, tile


@dataclass(frozen=True)
class Choice:
    """Exceptions to the default options of a walk."""

    names: Mapping[int, str] = field(default_factory=dict)  # by an operation's id, its option
    slices: Mapping[int, Split] = field(default_factory=dict)  # of summands to add up


class Walk:
    """Settles the placements of one block."""

    def __init__(
        self,
        infer: Any,
        block: Block,
        ins: Sequence[Placement],
        loose: frozenset[int] = frozenset(),
        choice: Choice = Choice(),
    ):
        marked = {i: infer.shard(dim, block.avals[i].shape[dim]) for i, dim in infer.marked(block).items()}
        self.slices: dict[int, Split] = {**choice.slices, **marked}
        self.choice, self.offers = choice, list[tuple[Node, Strategy]]()
        self._moved: set[tuple[int, Form, bool]] = set()
        self.infer, self.block, self.n = infer, block, infer.devices
        self.placed = Placed(block, tuple(map(form, ins)), infer.axis.name)
        self.at: list[Any] = [None] * len(block.avals)
        self.loose = added(block, loose)
        self.again = functools.partial(Walk, infer, block, ins, loose)  # with a different choice
        self.next = {i: node for node in block.nodes for i in node.ins}
        self.inputs = {i: k for k, i in enumerate(block.inputs)}
        summed: set[int] = set()
        for i, value in block.numbers.items():
            self.at[i] = Replicated(value)
        for i, placement in zip(block.inputs, ins, strict=True):
            self.at[i] = self._settled(i, placement)
            if isinstance(placement, Partial) and not isinstance(self.at[i], Partial):
                summed.add(self.inputs[i])
        for node in block.nodes:
            with node.named_in_errors():
                strategy = self.strategy(node)
            self.placed.strategies.append(strategy)
            for i, to in zip(node.ins, strategy.takes, strict=True):
                if to is None or to is self.at[i]:
                    continue
                if isinstance(self.at[i], Partial) and not isinstance(to, Partial) and i in self.inputs:
                    summed.add(self.inputs[i])
                self.note(node, i, to, strategy.why or strategy.instead)
            for i, placement, then in zip(node.outs, strategy.gives, strategy.then or strategy.gives, strict=True):
                self.at[i] = placement
                settled = then if strategy.then else self._settled(i, placement)
                if settled is not placement and not isinstance(settled, Partial):
                    self.note(node, i, form(settled), strategy.instead if strategy.then else "")
                self.at[i] = settled
        self.placed.at, self.placed.outs = self.at, tuple(form(self.at[i]) for i in block.outputs)
        self.placed.given = tuple(self.at[i] for i in block.outputs)
        self.placed.summed = frozenset(summed)

    def note(self, node: Node, i: int, to: Form, why: str) -> None:
        """Record that a value is sent, and whether it was before."""
        p, aval = self.at[i], self.block.avals[i]
        if not (kind := self.infer.move(p, to, aval)):
            return
        stored = isinstance(p, Split) and p.stored
        ahead = stored and self.block.source(i) in self.inputs
        waited_for = i in self.block.before_products and not ahead
        fetched = node.backward and stored  # fetched anew in the backward pass
        key = i, form(to), fetched
        made = self.block.makers.get(i)
        formed = made is not None and made.name in SHAPE_ONLY and (made.ins[0], REPLICATED, fetched) in self._moved
        again = key in self._moved or (i, REPLICATED, fetched) in self._moved or (stored and formed)
        self._moved.add(key)
        self.placed.own.append(Move(node, kind, aval, stored, why, waited_for, again))

    def _settled(self, i: int, placement: Placement) -> Placement:
        """Add up a summand with several uses once, before them; a moved value at once."""
        if not isinstance(placement, Partial) or (self.block.uses[i] <= 1 and not placement.bits):
            return placement
        return self.slices.get(i, REPLICATED)

    def added_up(self, node: Node) -> frozenset[int]:
        """Return the results that a surrounding loop adds up: they may stay summands."""
        return frozenset(k for k, o in enumerate(node.outs) if o in self.loose)

    # --- one operation

    def strategy(self, node: Node) -> Strategy:
        """Choose how to run an operation, given the placements of its operands."""
        ins = [self.at[i] for i in node.ins]
        summands = [self.slices.get(i) for i, p in zip(node.ins, ins, strict=True) if isinstance(p, Partial)]
        key = (*ins, *summands, *(o in self.loose for o in node.outs))
        if (found := node.known.get(key)) is None:
            sent = len(self.placed.own)
            found = self._strategies(node, ins)
            if len(self.placed.own) == sent:  # it sends nothing itself, in every walk anew
                node.known[key] = found
        usual, offers = found
        if not offers:
            return usual
        self.offers += [(node, one) for one in offers]
        return next((one for one in offers if one.name == self.choice.names.get(id(node))), usual)

    def _strategies(self, node: Node, ins: list[Placement]) -> tuple[Strategy, Sequence[Strategy]]:
        """Return the default strategy of an operation, and its options."""
        if unknown := [type(e).__name__ for e in node.eqn.effects if type(e).__name__ not in _EFFECTS]:
            raise refuse(node, f"its effect ({unknown[0]}) is not possible on several devices")
        if any(isinstance(p, Partial) for p in ins) and (strategy := linear(self, node, ins)):
            return strategy, ()
        for k, i in enumerate(node.ins):
            if isinstance(ins[k], Partial):
                ins[k] = self.slices.get(i, ins[k])
        return self._alone(node, ins), [one for rule in OFFERS.get(node.name, ()) if (one := rule(self, node, ins))]

    def _alone(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Return the strategy that sends least for an operation alone."""
        for rule in SPECIAL.get(node.name, ()):
            if strategy := rule(self, node, ins):
                return strategy
        if all(isinstance(p, (Replicated, Deferred)) for p in ins):
            return self.alike(node, ins)
        return self.by_factors(node, ins, self.block.factors(node)) or self.whole(node, ins)

    def alike(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Return the strategy of an operation whose operands every device has."""
        aval = self.block.avals[node.outs[0]] if len(node.outs) == 1 else None
        entrywise, moves = is_deferrable(node.eqn.primitive), node.name in ("squeeze", "transpose")
        if aval is not None and aval.ndim and (entrywise or moves):
            large = [p for p, i in zip(ins, node.ins, strict=True) if self.block.avals[i].ndim]
            if large and all(isinstance(p, Deferred) for p in large):
                known = moves or (is_zero(ins[0]) and node.name in ("convert_element_type", "copy", "neg"))
                const = ins[0].const if known else None  # type: ignore[union-attr]
                return Strategy([None] * len(ins), [Deferred(const)], make=make_in_form, slicewise=entrywise)
        if node.name == "random_split" and node.outs:
            return Strategy([None], [Deferred()], make=make_whole)
        return Strategy([REPLICATED] * len(ins), [REPLICATED] * len(node.outs), run_as_is)

    def whole(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Compute whole operands on every device; later operations can cut the result for free."""
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
        """Return the dimension of a result that holds the batch, if it can be cut."""
        for p, i in zip(ins, node.ins, strict=True):
            if not isinstance(p, Split) or p.stored:
                continue
            own = self.block.avals[i].shape
            dims = [d for d in range(len(shape)) if shape[d] == own[p.dim]]
            if node.name == "reshape":
                dims += values.related(own, shape, p.dim)
            elif node.name in SAME_RANK and len(shape) > p.dim:
                dims.append(p.dim)
            dims = [d for d in dims if shape[d] >= self.n]
            # One of k parts of a batch: its examples are in the dimension after the parts.
            if not dims and node.name in SAME_RANK and p.dim + 1 < len(shape) and shape[p.dim + 1] >= self.n:
                dims = [p.dim + 1]
            if dims:
                return next((d for d in dims if shape[d] % self.n == 0), dims[0])
        return None

    def by_factors(self, node: Node, ins: Sequence[Placement], described: Factors | None) -> Strategy | None:
        """Cut along the factor that needs the least communication."""
        if described is None:
            return None
        candidates = self.candidates(node, ins, described)
        found = [(factor, self.cut(node, ins, described, factor, split)) for factor, split in candidates]
        cuts = [(self._price(node, ins, factor, one), one) for factor, one in found if one]
        (bytes_, *_), cheapest = min(cuts, key=lambda each: each[0], default=((math.inf,), None))
        return cheapest if bytes_ < math.inf else None

    def candidates(self, node: Node, ins: Sequence[Placement], described: Factors) -> Sequence[tuple[int, Split]]:
        """Return factors along which operands are split; batch operands take precedence."""
        found: dict[tuple[int, int, int, int], Split] = {}
        batch = [p for p in ins if isinstance(p, Split) and not p.stored]
        for p, dims in zip(ins, described.operands, strict=True):
            if not isinstance(p, Split) or (batch and p.stored) or (factor := dims[p.dim]) is None:
                continue
            key = (factor, p.size, p.chunk, p.outer)
            if key not in found or (found[key].stored and not p.stored):
                found[key] = p
        if not found and batch:
            # A gathered operand must not make the rest N-fold: cut values that all devices have.
            length = {
                self.block.avals[i].shape[p.dim] for p, i in zip(ins, node.ins, strict=True) if isinstance(p, Split)
            }
            shape, dims = self.block.avals[node.outs[0]].shape, described.results[0]
            taken = {factor for operand in described.operands for factor in operand}
            fits = [(n not in length, factor, n) for n, factor in zip(shape, dims, strict=True)
                    if factor is not None and factor in taken and n >= self.n]  # fmt: skip
            other, factor, size = min(fits, key=lambda fit: fit[0], default=(True, 0, 0))
            if fits and (node.name == "gather" or not other):
                return [(factor, tile(0, size, self.n))]
        return [(key[0], found[key]) for key in sorted(found)]

    def cut(
        self, node: Node, ins: Sequence[Placement], described: Factors, factor: int, split: Split
    ) -> Strategy | None:
        """Cut an operation along one factor."""
        kind, gives = described.reduced.get(factor), list[Placement]()
        takes: list[Form] = [form(split.at(dims.index(factor))) if factor in dims else REPLICATED
                             for dims in described.operands]  # fmt: skip
        if kind is None:
            if any(factor not in dims for dims in described.results):
                return None
            stored = split.stored and all(p.stored for p in ins if isinstance(p, Split))
            own = replace(split, stored=stored, requested=False, whole=False)
            gives += [own.at(dims.index(factor)) for dims in described.results]
        elif kind == "sum":
            if not all(values.is_wide(self.block.avals[o].dtype) for o in node.outs):
                return None
            gives += [Partial(gradient=node.backward)] * len(node.outs)
            if described.onto is not None and factor not in described.operands[described.onto]:
                takes[described.onto] = Partial()
        else:
            gives += [REPLICATED] * len(node.outs)
        run = Cut(described, factor, split, kind)
        return Strategy(takes, gives, run, exchanges=kind not in (None, "sum"))

    def _price(self, node: Node, ins: Sequence[Placement], factor: int, strategy: Strategy) -> tuple[float, int, int]:
        """Return the bytes that a device sends for a cut, and what decides among equals."""
        avals, link, run = self.block.avals, self.infer.link, strategy.run
        assert isinstance(run, Cut)
        moved = sum(self.infer.sent(p, to or REPLICATED, avals[i])
                    for p, to, i in zip(ins, strategy.takes, node.ins, strict=True))  # fmt: skip
        if run.kind is None:
            return moved, 0, factor
        sent = link.sent("all-reduce", sum(nbytes(avals[o]) for o in node.outs))
        whole = sum(nbytes(avals[i]) for p, i in zip(ins, node.ins, strict=True) if isinstance(p, Split))
        if run.split.stored and sent > moved + 2 * link.sent("all-gather", whole):
            return math.inf, 1, factor  # gathering the stored operand is cheaper than reducing the result
        return moved + sent, 1, factor


_EFFECTS = {"NamedAxisEffect", "DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect", "CallbackEffect",
            "UnorderedCallbackEffect", "_UnorderedIOEffect", "_OrderedIOEffect"}  # fmt: skip


Special = Callable[[Walk, Node, Sequence[Placement]], Strategy | None]
SPECIAL: dict[str, list[Special]] = {}  # rules of operations that need more than factors, which apply if all give None
OFFERS: dict[str, list[Special]] = {}  # rules for options next to the default, with names; `options` decides


def _enter(table: dict[str, list[Special]], *names: str) -> Callable[[Special], Special]:
    """Return a decorator that adds a rule to a table."""

    def enter(rule: Special) -> Special:
        for name in names:
            table.setdefault(name, []).append(rule)
        return rule

    return enter


special, offer = functools.partial(_enter, SPECIAL), functools.partial(_enter, OFFERS)


def refuse(node: Node, why: str) -> StepError:
    """Return an error that names the operation and the user's line."""
    return StepError(f"{node.name} at {node.line or 'an unknown line'}: {why}")


def settled(placement: Placement) -> Placement:
    """Return the placement of a value passed into control flow: a deferred one is made whole."""
    return Replicated(placement.const) if isinstance(placement, Deferred) else placement
