"""The context that a rule queries, the tables that rules are entered in, and the default strategies."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxdist.errors import StepError
from jaxdist.ir.operations import SAME_RANK, is_deferrable
from jaxdist.placements.model import factors, values
from jaxdist.placements.model.block import Block, Node, added
from jaxdist.placements.model.factors import Factors
from jaxdist.placements.model.strategy import UNKNOWN, Inference, Sends, Strategy, nbytes
from jaxdist.placements.model.values import REPLICATED, Deferred, Form, Partial, Placement, Replicated, Split, form
from jaxdist.placements.rules.run import Cut, make_in_form, make_whole, run_as_is
from jaxdist.placements.rules.summands import is_zero, linear


@dataclass(frozen=True)
class Choice:
    """Exceptions to the default strategies of a block."""

    names: Mapping[int, str] = field(default_factory=dict)  # by an operation's id, the alternative that it takes
    summand_slices: Mapping[int, Split] = field(default_factory=dict)  # in which to add up these summands
    added_later: frozenset[int] = frozenset()  # summands that are added up after the operations that take them


DEFAULTS = Choice()


Strategies = tuple[Strategy, Sequence[Strategy]]  # the default, and its alternatives


class _Price(NamedTuple):
    """What decides among cuts, in order: bytes, not seconds as in `cost`, as all do the same work with one message."""

    bytes: float  # that a device sends; infinite if it is better to gather the operand
    is_reduced: bool  # among equals, those without a reduction come first
    factor: int  # then the first factor


class RuleContext:
    """The context that a rule queries: the block, the placements so far, and ways to cut an operation.

    Args:
      infer: the axis.
      block: the block that is placed.
      may_stay_partial: outputs that a surrounding loop adds up.
      choice: see `propagate`.
    """

    def __init__(self, infer: Inference, block: Block, may_stay_partial: frozenset[int], choice: Choice):
        wanted = {i: infer.shard(dim, block.avals[i].shape[dim]) for i, dim in infer.slices_wanted(block).items()}
        self.summand_slices: dict[int, Split] = {**choice.summand_slices, **wanted}  # in which summands are added up
        self.infer, self.block, self.n = infer, block, infer.devices
        self.placements: list[Any] = [None] * len(block.avals)  # of each value
        self.may_stay_partial = added(block, may_stay_partial)
        self.added_later = choice.added_later

    def once_made(self, i: int, placement: Placement) -> Placement:
        """Return the placement of a value once it is made. A summand stays one

        - if nothing uses it, or one operation does (unless it is bits, which were moved): that one adds it up, into
          slices for a mark of `zero` or if the search says so (`summand_slices`), or takes it as a summand (`linear`);
        - if several do and the search says so (`added_later`): each takes it as a summand, and their results are added
          up.

        Else it is added up here, once: into `summand_slices`, or whole. If all uses cut the whole the same way,
        `propagate` makes slices. (Marks are the same from level 1 of `zero` on: that sends what level 2 does.)
        """
        uses = self.block.uses[i]
        if not isinstance(placement, Partial) or not uses or (uses == 1 and not placement.bits):
            return placement
        if i in self.added_later and not placement.bits:
            return placement
        return self.summand_slices.get(i, REPLICATED)

    def added_up(self, node: Node) -> frozenset[int]:
        """Return the results that a surrounding loop adds up: they may stay summands."""
        return frozenset(k for k, o in enumerate(node.outs) if o in self.may_stay_partial)

    # --- one operation

    def strategies(self, node: Node) -> Strategies:
        """Return the strategies of an operation, given the placements of its operands: a function of the key.

        So a rule may look at the operation and its block (the types and uses of values), at the axis, and at the
        key: the placements of its operands, and whether its summands are to be added up in slices, or later. (A block
        belongs to one `Infer`, so it stands for the axis.) A rule that looks at anything else, such as the placement of
        a value that is no operand, returns a stale strategy without an error.
        """
        ins = [self.placements[i] for i in node.ins]
        key: tuple[object, ...] = self.block, *ins
        if Partial in map(type, ins):
            summands = [i for i in node.ins if isinstance(self.placements[i], Partial)]
            key = (*key, *map(self.summand_slices.get, summands), *(i in self.added_later for i in summands))
        if self.may_stay_partial:
            key = (*key, *(o in self.may_stay_partial for o in node.outs))
        if key == node.latest_key:  # mostly the same objects, which compare faster than they hash
            return node.latest_strategies
        if (known := node.strategies.get(key)) is None:
            with node.named_in_errors():
                known = node.strategies[key] = self._strategies(node, ins)
        node.latest_key, node.latest_strategies = key, known
        return known

    def _strategies(self, node: Node, ins: list[Placement]) -> Strategies:
        """Return the default strategy of an operation, and its options."""
        if unknown := [type(e).__name__ for e in node.eqn.effects if type(e).__name__ not in _EFFECTS]:
            raise refuse(node, f"its effect ({unknown[0]}) is not possible on several devices")
        default = None
        if any(isinstance(p, Partial) for p in ins):
            default = linear(self.block, self.may_stay_partial, self.added_later, node, ins)
        if default is None:
            pairs = zip(node.ins, ins, strict=True)
            ins = [self.summand_slices.get(i, p) if isinstance(p, Partial) else p for i, p in pairs]
            default = self._alone(node, ins)
        alternatives = (rule(self, node, ins) for rule in ALTERNATIVES.get(node.name, ()))
        return default, list(filter(None, alternatives))

    def _alone(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Return the strategy of an operation alone: of the first rule that applies, or of its factors."""
        for rule in (*(SPECIAL.get(node.label, ()) if node.kernel else ()), *SPECIAL.get(node.name, ())):
            if strategy := rule(self, node, ins):
                return strategy
        if all(isinstance(p, (Replicated, Deferred)) for p in ins):
            return self.on_every_device(node, ins)
        return self.by_factors(node, ins, self.block.factors(node)) or self.whole(node, ins)

    def on_every_device(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Return the strategy of an operation whose operands every device has."""
        aval = self.block.avals[node.outs[0]] if len(node.outs) == 1 else None
        entrywise, moves = is_deferrable(node.eqn.primitive), node.name in ("squeeze", "transpose")
        if aval is not None and aval.ndim and (entrywise or moves):
            large = [p for p, i in zip(ins, node.ins, strict=True) if self.block.avals[i].ndim]
            if large and all(isinstance(p, Deferred) for p in large):
                # Another number may change in value (`neg`) or be rounded (a conversion); zero stays zero.
                known = moves or (is_zero(ins[0]) and node.name in ("convert_element_type", "copy", "neg"))
                const = ins[0].const if known else None  # type: ignore[union-attr]
                return Strategy([None] * len(ins), [Deferred(const)], make=make_in_form, slicewise=entrywise)
        if node.name == "random_split" and node.outs:
            return Strategy([None], [Deferred()], make=make_whole)
        return Strategy([REPLICATED] * len(ins), [REPLICATED] * len(node.outs), run_as_is)

    def whole(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Compute whole operands on every device; later operations can cut the result for free."""
        out_placements: list[Placement] = []
        for o in node.outs:
            shape = self.block.avals[o].shape
            dim = self.batch_dim(node, ins, shape)
            cut = None if dim is None else replace(values.tile(dim, shape[dim], self.n), whole=True)
            out_placements.append(cut or REPLICATED)
        why = "" if all(isinstance(p, (Replicated, Deferred)) for p in ins) else f"{node.name} needs all of it"
        described = self.block.factors(node) if why else None
        if described is not None and (node.name == "pallas_call" or described.why):
            why = self._of_kernel(node, ins, described)
        if why and not (node.name in SPECIAL or factors.is_known(node.eqn.primitive)):
            why = UNKNOWN
        if node.eqn.effects:
            why = f"{node.name} has an effect"
        return Strategy([REPLICATED] * len(ins), out_placements, run_as_is, why=why)

    def _of_kernel(self, node: Node, ins: Sequence[Placement], described: Factors) -> str:
        """Return the reason that a kernel needs all of an operand."""
        k, dim = next(((k, p.dim) for k, p in enumerate(ins) if isinstance(p, Split)), (0, None))
        if dim is None:
            return f"{node.name} needs all of it"
        if (reason := described.why.get((k, dim))) is not None:
            return reason
        if described.operands[k][dim] is not None:
            return f"its blocks along dimension {dim} do not divide among {self.n} devices"
        return f"each of its steps takes all of dimension {dim}, or the part that a table gives"

    def batch_dim(self, node: Node, ins: Sequence[Placement], shape: tuple[int, ...]) -> int | None:
        """Return the dimension of a result that holds the batch, if it can be cut."""
        for p, i in zip(ins, node.ins, strict=True):
            if not isinstance(p, Split) or p.of_state:
                continue
            operand_shape = self.block.avals[i].shape
            dims = [d for d in range(len(shape)) if shape[d] == operand_shape[p.dim]]
            if node.name == "reshape":
                dims += values.related(operand_shape, shape, p.dim)
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
        cuts = [self.cut(node, ins, described, factor, turns) for factor, turns in candidates]
        priced = [(self._price(node, ins, cut), cut) for cut in cuts if cut]
        price, cheapest = min(priced, key=lambda pair: pair[0], default=(None, None))
        return cheapest if price and price.bytes < math.inf else None

    def candidates(self, node: Node, ins: Sequence[Placement], described: Factors) -> Sequence[tuple[int, Split]]:
        """Return factors along which operands are split; batch operands take precedence."""
        splits: dict[tuple[int, int, int, int], Split] = {}
        # Where shards meet the batch, the shards move: they can be fetched ahead, whereas activations are waited for.
        batch = [p for p in ins if isinstance(p, Split) and not p.of_state]
        for k, (p, dims) in enumerate(zip(ins, described.operands, strict=True)):
            if not isinstance(p, Split) or (batch and p.of_state) or (factor := dims[p.dim]) is None:
                continue
            if (p := described.turns(k, p, self.n)) is None:
                continue
            key = (factor, p.size, p.chunk, p.outer)
            if key not in splits or (splits[key].of_state and not p.of_state):
                splits[key] = p
        if not splits and batch:
            return self._along_the_result(node, ins, described)
        return [(key[0], splits[key]) for key in sorted(splits)]

    def _along_the_result(
        self, node: Node, ins: Sequence[Placement], described: Factors
    ) -> Sequence[tuple[int, Split]]:
        """Return a factor of the result that some operand has, where no split of the batch has a factor.

        Operands with it are cut along it, others are whole: in ``x[perm]`` each device takes all of ``x``, and looks up
        its part of ``perm``; sorting columns exchanges rows for columns. First comes a dimension as long as some
        operand's split one; any other will do for a lookup only, which costs as much as its result.
        """
        splits = [(p, self.block.avals[i].shape) for p, i in zip(ins, node.ins, strict=True) if isinstance(p, Split)]
        lengths = {shape[p.dim] for p, shape in splits}
        shape, dims = self.block.avals[node.outs[0]].shape, described.results[0]
        operands = {factor for operand in described.operands for factor in operand} - {None}
        able = [d for d, factor in enumerate(dims) if factor in operands and shape[d] >= self.n]
        candidates = [d for d in able if shape[d] in lengths] or (able if node.name == "gather" else [])
        if not candidates:
            return []
        d = candidates[0]
        factor, turns = dims[d], described.turns(len(ins), values.tile(d, shape[d], self.n), self.n)
        return [(factor, turns)] if factor is not None and turns is not None else []

    def cut(
        self, node: Node, ins: Sequence[Placement], described: Factors, factor: int, turns: Split
    ) -> Strategy | None:
        """Cut an operation along one factor, if that is right.

        A result that has the factor is split along it. One that lacks it, as ``ij,jk->ik`` lacks ``j``, combines all
        devices' results: a sum is left as a Partial, other reductions are completed by the operation's `run`.
        None if a result that is used lacks a factor that is not reduced, if padding would count, or if a sum is of a
        type that can't be added in any order.

        Args:
          node: the operation.
          ins: the placements of its operands.
          described: its factors.
          factor: the one to cut.
          turns: how that is cut, counted in its turns (`Factors.turns`).
        """
        kind, devices = described.reduced.get(factor), self.n
        operands = [described.slices(k, factor, turns, shape) for k, shape in enumerate(self.block.shapes(node.ins))]
        in_forms: list[Form] = [form(p) if p else REPLICATED for p in operands]
        of_state = turns.of_state and all(p.of_state for p in ins if isinstance(p, Split))
        alone = turns.alone()
        alone = alone if alone.of_state == of_state else replace(alone, of_state=of_state)
        shapes = enumerate(self.block.shapes(node.outs), len(node.ins))  # results are counted on from the operands
        results = [described.slices(k, factor, alone, shape) for k, shape in shapes]
        out_placements, shared = list[Placement](), list[int]()
        for o, p in zip(node.outs, results, strict=True):
            if p is None and kind is None and self.block.uses[o]:
                return None
            if p is None and kind is not None:
                shared.append(o)
            summand = p is None and kind == "sum"
            out_placements.append(p or (Partial(gradient=node.backward) if summand else REPLICATED))
        keeps_padding = described.counts_padding or len(shared) < len(results)
        if shared and keeps_padding and any(p and p.is_padded(devices) for p in operands):
            return None  # padding must not count in the shared results, and be as the last entry in others
        if kind == "sum" and shared:
            # A product of booleans is an `or`, not a sum.
            if not all(values.is_wide(self.block.avals[o].dtype) for o in shared):
                return None
            if described.onto is not None and factor not in described.operands[described.onto]:
                in_forms[described.onto] = Partial()
        run = Cut(described, factor, turns, kind if shared else None)
        sends = () if kind in (None, "sum") else [self._combined(kind, o) for o in shared]
        return Strategy(in_forms, out_placements, run, sends=sends)

    def _combined(self, kind: str, o: int) -> Sends:
        """Return the collective that reduces a result with max, min, and, or or (`Emitter.across`)."""
        aval = self.block.avals[o]
        if aval.dtype == bool:
            # `Emitter.across` reduces booleans as int32, with max or min.
            return Sends("all-reduce", 4 * aval.size)
        if kind in ("max", "min") and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
            return Sends("all-reduce", nbytes(aval))
        return Sends("all-gather", self.n * nbytes(aval))

    def bytes_for_operands(self, node: Node, ins: Sequence[Placement], strategy: Strategy) -> float:
        """Return the bytes that a device sends to bring operands into the forms that a strategy takes."""
        forms = zip(ins, strategy.in_forms, node.ins, strict=True)
        return sum(self.infer.sent(p, target or REPLICATED, self.block.avals[i]) for p, target, i in forms)

    def _price(self, node: Node, ins: Sequence[Placement], strategy: Strategy) -> _Price:
        """Return the price of a cut."""
        avals, link, cut = self.block.avals, self.infer.link, strategy.run
        assert isinstance(cut, Cut)
        moved = self.bytes_for_operands(node, ins, strategy)
        if cut.kind is None:
            return _Price(moved, False, cut.factor)
        results = zip(node.outs, cut.described.results, strict=True)
        reduced = link.sent("all-reduce", sum(nbytes(avals[o]) for o, dims in results if cut.factor not in dims))
        split = sum(nbytes(avals[i]) for p, i in zip(ins, node.ins, strict=True) if isinstance(p, Split))
        may_gather = cut.split.of_state or (cut.kind != "sum" and cut.described.onto is not None)  # a scatter's updates
        if may_gather and reduced > moved + 2 * link.sent("all-gather", split):
            return _Price(math.inf, True, cut.factor)  # gathering the operand is cheaper than reducing the result
        return _Price(moved + reduced, True, cut.factor)


_EFFECTS = {"NamedAxisEffect", "DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect", "CallbackEffect",
            "UnorderedCallbackEffect", "_UnorderedIOEffect", "_OrderedIOEffect"}  # fmt: skip


Special = Callable[[RuleContext, Node, Sequence[Placement]], Strategy | None]
SPECIAL: dict[str, list[Special]] = {}  # rules of operations that need more than factors, which apply if all give None
ALTERNATIVES: dict[str, list[Special]] = {}  # rules for options next to the default, with names; `options` decides


def _enter(table: dict[str, list[Special]], *names: str) -> Callable[[Special], Special]:
    """Return a decorator that adds a rule to a table."""

    def enter(rule: Special) -> Special:
        for name in names:
            table.setdefault(name, []).append(rule)
        return rule

    return enter


special, alternative = functools.partial(_enter, SPECIAL), functools.partial(_enter, ALTERNATIVES)


def refuse(node: Node, why: str) -> StepError:
    """Return an error that names the operation and the user's line."""
    return StepError(f"{node.name} at {node.line or 'an unknown line'}: {why}")
