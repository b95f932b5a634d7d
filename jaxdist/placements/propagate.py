"""Propagation over one axis: placements of values, strategies of operations, and what is sent."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from jaxdist.errors import StepError
from jaxdist.ir.operations import SAME_RANK, SHAPE_ONLY, is_deferrable
from jaxdist.placements import rules, values
from jaxdist.placements.block import Block, Node, added
from jaxdist.placements.rules import Factors
from jaxdist.placements.run import Cut, make_in_form, make_whole, run_as_is
from jaxdist.placements.strategy import UNKNOWN, Inference, Message, Propagation, Sends, Strategy, nbytes
from jaxdist.placements.summands import is_zero, linear
from jaxdist.placements.values import REPLICATED, Deferred, Form, Partial, Placement, Replicated, Split, form, tile


@dataclass(frozen=True)
class Choice:
    """Exceptions to the default strategies of a block."""

    names: Mapping[int, str] = field(default_factory=dict)  # by an operation's id, the alternative that it takes
    slices: Mapping[int, Split] = field(default_factory=dict)  # of summands to add up


def propagate(
    infer: Inference,
    block: Block,
    in_placements: Sequence[Placement],
    may_stay_partial: frozenset[int] = frozenset(),
    choice: Choice = Choice(),
) -> Propagation:
    """Place a block over one axis: a strategy for each operation, a placement for each value, and the messages.

    Operations are visited once, in order, as in `jax.core.eval_jaxpr`; the environment holds placements. For four
    devices, with ``x`` of the batch and ``w`` on every device::

        value            placement     operation                  what it takes, and what is sent
        x: f32[8,3]      Split(0)
        w: f32[3,2]      Replicated
        y: f32[8,2]      Split(0)      y = dot_general x w        x as it is, w as it is
        s: f32[2]        Partial       s = reduce_sum[axes=0] y   y as it is: each device has a summand
        r: f32[2]        Replicated    r = exp s                  s whole: Message(all-reduce, 8 bytes)

    A padded row is a copy of the last real one, and every strategy keeps that.

    Args:
      infer: the axis, and what inference over it asks.
      block: the operations.
      in_placements: the placement of each input.
      may_stay_partial: outputs that a surrounding loop adds up.
      choice: alternatives to take in place of the defaults.
    """
    ctx = RuleContext(infer, block, may_stay_partial, choice)
    messages = _Messages(ctx)
    reduced_inputs = _place_inputs(ctx, in_placements)
    strategies, alternatives, summands = list[Strategy](), list[tuple[Node, Strategy]](), dict[int, Partial]()
    for node in block.nodes:
        with node.named_in_errors():
            default, others = ctx.strategies(node)
        strategy = next((other for other in others if other.name == choice.names.get(id(node))), default)
        strategies.append(strategy)
        alternatives += [(node, other) for other in others]
        for i, target in zip(node.ins, strategy.in_forms, strict=True):
            if target is None or target is ctx.placements[i]:
                continue
            if isinstance(ctx.placements[i], Partial) and not isinstance(target, Partial) and i in block.input_index:
                reduced_inputs.add(block.input_index[i])
            messages.reshard(node, i, target, strategy.why or strategy.instead)
        messages.sent_by(node, strategy)
        for k, (i, placement) in enumerate(zip(node.outs, strategy.out_placements, strict=True)):
            ctx.placements[i] = placement
            resolved = strategy.out_forms[k] if strategy.out_forms else ctx.resolved(i, placement)
            if isinstance(placement, Partial) and resolved == REPLICATED and not strategy.out_forms:
                summands[i] = placement
            if resolved is not placement and not isinstance(resolved, Partial):
                messages.reshard(node, i, form(resolved), strategy.instead if strategy.out_forms else "")
            ctx.placements[i] = resolved
    propagation = Propagation(
        block,
        in_forms=tuple(map(form, in_placements)),
        axis=infer.axis.name,
        strategies=strategies,
        placements=ctx.placements,
        out_forms=tuple(form(ctx.placements[i]) for i in block.outputs),
        out_placements=tuple(ctx.placements[i] for i in block.outputs),
        messages=messages.all,
        reduced_inputs=frozenset(reduced_inputs),
        alternatives=alternatives,
    )
    _scatter_summands(infer, propagation, summands)
    return propagation


def _place_inputs(ctx: "RuleContext", in_placements: Sequence[Placement]) -> set[int]:
    """Place constants and inputs; return the inputs that are summands and are added up at once."""
    block = ctx.block
    for i, value in block.numbers.items():
        ctx.placements[i] = Replicated(value)
    for i, placement in zip(block.inputs, in_placements, strict=True):
        ctx.placements[i] = ctx.resolved(i, placement)
    pairs = zip(block.inputs, in_placements, strict=True)
    return {
        block.input_index[i] for i, p in pairs if isinstance(p, Partial) and not isinstance(ctx.placements[i], Partial)
    }


def _scatter_summands(infer: Inference, propagation: Propagation, summands: Mapping[int, Partial]) -> None:
    """Reduce a summand that is whole for its uses into slices, if all of these take the same slices."""
    block, messages, outputs = propagation.block, propagation.messages, set(propagation.block.outputs)
    for i, summand in summands.items():
        if propagation.placements[i] != REPLICATED or i in outputs:
            continue
        forms, aval = propagation.forms_of(i), block.avals[i]
        if len(forms) == 1 and isinstance(target := forms.pop(), Split) and infer.slices(summand, target, aval):
            propagation.placements[i] = target
            k = next(k for k, message in enumerate(messages) if message.value == i)
            size = infer.bytes_sent("reduce-scatter", summand, target, aval)
            messages[k] = replace(messages[k], kind="reduce-scatter", bytes=size, new_form=target)


class _Messages:
    """The messages of a block, as its operations are placed."""

    def __init__(self, ctx: "RuleContext"):
        self.all: list[Message] = []
        self._ctx = ctx
        self._present: set[tuple[int, Form, bool]] = set()  # values in forms that devices have from earlier messages

    def sent_by(self, node: Node, strategy: Strategy) -> None:
        """Record what an operation sends itself."""
        self.all += [
            Message(node, s.kind, s.bytes, s.of_state, strategy.why, True, times=s.times, reshards=False)
            for s in strategy.sends
        ]

    def reshard(self, node: Node, i: int, target: Form, why: str) -> None:
        """Record that a value is sent, and whether it was before."""
        infer, block = self._ctx.infer, self._ctx.block
        p, aval = self._ctx.placements[i], block.avals[i]
        if not (kind := infer.reshard(p, target, aval)):
            return
        of_state = isinstance(p, Split) and p.of_state
        ahead = of_state and block.source(i) in block.input_index
        waited_for = i in block.before_products and not ahead
        fetched = node.backward and of_state  # fetched anew in the backward pass
        whole = i, REPLICATED, fetched
        new_form = whole if target == REPLICATED else (i, form(target), False)
        maker = block.makers.get(i)
        reshaped = (
            maker is not None and maker.name in SHAPE_ONLY and (maker.ins[0], REPLICATED, fetched) in self._present
        )
        again = not self._present.isdisjoint({whole, new_form}) or (of_state and reshaped)
        # Other slices are cut out of the whole value, unless one collective makes them.
        self._present.update({new_form, whole} if kind in ("all-gather", "all-reduce") else {new_form})
        size = infer.bytes_sent(kind, p, target, aval)
        self.all.append(Message(node, kind, size, of_state, why, waited_for, again, value=i, new_form=form(target)))


Strategies = tuple[Strategy, Sequence[Strategy]]  # the default, and its alternatives


class RuleContext:
    """What a rule may ask: the block, the placements so far, and ways to cut an operation.

    Args:
      infer: the axis.
      block: the block that is placed.
      may_stay_partial: outputs that a surrounding loop adds up.
      choice: see `propagate`.
    """

    def __init__(self, infer: Inference, block: Block, may_stay_partial: frozenset[int], choice: Choice):
        marked = {i: infer.shard(dim, block.avals[i].shape[dim]) for i, dim in infer.marked(block).items()}
        self.slices: dict[int, Split] = {**choice.slices, **marked}  # of summands, once they are added up
        self.infer, self.block, self.n = infer, block, infer.devices
        self.placements: list[Any] = [None] * len(block.avals)  # of each value
        self.may_stay_partial = added(block, may_stay_partial)

    def resolved(self, i: int, placement: Placement) -> Placement:
        """Add up a summand with several uses once, before them; a moved value at once."""
        if not isinstance(placement, Partial) or (self.block.uses[i] <= 1 and not placement.bits):
            return placement
        return self.slices.get(i, REPLICATED)

    def added_up(self, node: Node) -> frozenset[int]:
        """Return the results that a surrounding loop adds up: they may stay summands."""
        return frozenset(k for k, o in enumerate(node.outs) if o in self.may_stay_partial)

    # --- one operation

    def strategies(self, node: Node) -> Strategies:
        """Return the strategies of an operation, given the placements of its operands: a function of the key."""
        ins = [self.placements[i] for i in node.ins]
        slices = [self.slices.get(i) for i, p in zip(node.ins, ins, strict=True) if isinstance(p, Partial)]
        key = (*ins, *slices, *(o in self.may_stay_partial for o in node.outs))
        if key not in node.strategies:
            node.strategies[key] = self._strategies(node, ins)
        return node.strategies[key]

    def _strategies(self, node: Node, ins: list[Placement]) -> Strategies:
        """Return the default strategy of an operation, and its options."""
        if unknown := [type(e).__name__ for e in node.eqn.effects if type(e).__name__ not in _EFFECTS]:
            raise refuse(node, f"its effect ({unknown[0]}) is not possible on several devices")
        if any(isinstance(p, Partial) for p in ins) and (
            strategy := linear(self.block, self.may_stay_partial, node, ins)
        ):
            return strategy, ()
        for k, i in enumerate(node.ins):
            if isinstance(ins[k], Partial):
                ins[k] = self.slices.get(i, ins[k])
        return self._alone(node, ins), [
            one for rule in ALTERNATIVES.get(node.name, ()) if (one := rule(self, node, ins))
        ]

    def _alone(self, node: Node, ins: Sequence[Placement]) -> Strategy:
        """Return the strategy that sends least for an operation alone."""
        for rule in SPECIAL.get(node.name, ()):
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
            dim = self.batch_dim(node, ins, self.block.avals[o].shape)
            size = 0 if dim is None else self.block.avals[o].shape[dim]
            out_placements.append(REPLICATED if dim is None else replace(tile(dim, size, self.n), whole=True))
        why = "" if all(isinstance(p, (Replicated, Deferred)) for p in ins) else f"{node.name} needs all of it"
        if why and not (node.name in SPECIAL or rules.is_known(node.eqn.primitive)):
            why = UNKNOWN
        if node.eqn.effects:
            why = f"{node.name} has an effect"
        return Strategy([REPLICATED] * len(ins), out_placements, run_as_is, why=why)

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
        strategies = [(factor, self.cut(node, ins, described, factor, split)) for factor, split in candidates]
        cuts = [(self._price(node, ins, factor, strategy), strategy) for factor, strategy in strategies if strategy]
        (bytes_, *_), cheapest = min(cuts, key=lambda priced: priced[0], default=((math.inf,), None))
        return cheapest if bytes_ < math.inf else None

    def candidates(self, node: Node, ins: Sequence[Placement], described: Factors) -> Sequence[tuple[int, Split]]:
        """Return factors along which operands are split; batch operands take precedence."""
        splits: dict[tuple[int, int, int, int], Split] = {}
        batch = [p for p in ins if isinstance(p, Split) and not p.of_state]
        for p, dims in zip(ins, described.operands, strict=True):
            if not isinstance(p, Split) or (batch and p.of_state) or (factor := dims[p.dim]) is None:
                continue
            key = (factor, p.size, p.chunk, p.outer)
            if key not in splits or (splits[key].of_state and not p.of_state):
                splits[key] = p
        if not splits and batch:
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
        return [(key[0], splits[key]) for key in sorted(splits)]

    def cut(
        self, node: Node, ins: Sequence[Placement], described: Factors, factor: int, split: Split
    ) -> Strategy | None:
        """Cut an operation along one factor."""
        kind, out_placements = described.reduced.get(factor), list[Placement]()
        in_forms: list[Form] = [form(split.along(dims.index(factor))) if factor in dims else REPLICATED
                             for dims in described.operands]  # fmt: skip
        if kind is None:
            if any(factor not in dims for dims in described.results):
                return None
            of_state = split.of_state and all(p.of_state for p in ins if isinstance(p, Split))
            result_split = replace(split, of_state=of_state, requested=False, whole=False)
            out_placements += [result_split.along(dims.index(factor)) for dims in described.results]
        elif kind == "sum":
            if not all(values.is_wide(self.block.avals[o].dtype) for o in node.outs):
                return None
            out_placements += [Partial(gradient=node.backward)] * len(node.outs)
            if described.onto is not None and factor not in described.operands[described.onto]:
                in_forms[described.onto] = Partial()
        else:
            out_placements += [REPLICATED] * len(node.outs)
        run = Cut(described, factor, split, kind)
        sends = () if kind in (None, "sum") else [self._combined(kind, o) for o in node.outs]
        return Strategy(in_forms, out_placements, run, sends=sends)

    def _combined(self, kind: str, o: int) -> Sends:
        """Return the collective that reduces a result with max, min, and, or or (`Emitter.across`)."""
        aval = self.block.avals[o]
        if aval.dtype == bool:
            return Sends("all-reduce", 4 * aval.size)
        if kind in ("max", "min") and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
            return Sends("all-reduce", nbytes(aval))
        return Sends("all-gather", self.n * nbytes(aval))

    def _price(self, node: Node, ins: Sequence[Placement], factor: int, strategy: Strategy) -> tuple[float, int, int]:
        """Return the bytes that a device sends for a cut, and what decides among equals."""
        avals, link, run = self.block.avals, self.infer.link, strategy.run
        assert isinstance(run, Cut)
        moved = sum(self.infer.sent(p, to or REPLICATED, avals[i])
                    for p, to, i in zip(ins, strategy.in_forms, node.ins, strict=True))  # fmt: skip
        if run.kind is None:
            return moved, 0, factor
        sent = link.sent("all-reduce", sum(nbytes(avals[o]) for o in node.outs))
        whole = sum(nbytes(avals[i]) for p, i in zip(ins, node.ins, strict=True) if isinstance(p, Split))
        if run.split.of_state and sent > moved + 2 * link.sent("all-gather", whole):
            return math.inf, 1, factor  # gathering the stored operand is cheaper than reducing the result
        return moved + sent, 1, factor


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


def resolved(placement: Placement) -> Placement:
    """Return the placement of a value passed into control flow: a deferred one is made whole."""
    return Replicated(placement.const) if isinstance(placement, Deferred) else placement
