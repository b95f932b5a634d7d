"""Propagation over one axis: placements of values, strategies of operations, and messages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxdist.ir.operations import SHAPE_ONLY
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.strategy import Inference, Message, Propagation, Strategy
from jaxdist.placements.model.values import REPLICATED, Form, Partial, Placement, Replicated, Split, form
from jaxdist.placements.rules.context import DEFAULTS, Choice, RuleContext


def propagate(
    infer: Inference,
    block: Block,
    in_placements: Sequence[Placement],
    may_stay_partial: frozenset[int] = frozenset(),
    choice: Choice = DEFAULTS,
) -> Propagation:
    """Place a block over one axis: a strategy for each operation, a placement for each value, and the messages.

    Operations are visited once, in order, as in `jax.core.eval_jaxpr`; the environment holds placements. For four
    devices, with ``x`` of the batch and ``w`` on every device::

        value            placement     operation                  operands, and messages
        x: f32[8,3]      Split(0)
        w: f32[3,2]      Replicated
        y: f32[8,2]      Split(0)      y = dot_general x w        x unchanged, w unchanged
        s: f32[2]        Partial       s = reduce_sum[axes=0] y   y unchanged: each device has a summand
        r: f32[2]        Replicated    r = exp s                  s whole: Message(all-reduce, 8 bytes)

    A padded row starts as a copy of the last real one, and strategies put nothing else into padding than what real rows
    hold, too (or zeros, where a sum is scattered): so it makes no NaN of its own. Sums and extremes leave it out.

    Args:
      infer: the axis, and what inference over it asks.
      block: the operations.
      in_placements: the placement of each input.
      may_stay_partial: outputs that a surrounding loop adds up.
      choice: alternatives to take instead of the defaults.
    """
    ctx = RuleContext(infer, block, may_stay_partial, choice)
    messages = _Messages(ctx)
    reduced_inputs = _place_inputs(ctx, in_placements)
    strategies, alternatives = list[Strategy](), list[tuple[Node, Strategy]]()
    summands = dict[int, Partial]()  # that are added up into a whole value once they are made
    for node in block.nodes:
        strategy, others = ctx.strategies(node)
        if others:
            # The placements that a choice was made for may be others now, and the alternative gone: then the default.
            strategy = next((other for other in others if other.name == choice.names.get(id(node))), strategy)
            alternatives += [(node, other) for other in others]
        strategies.append(strategy)
        for i, target in _changed(ctx, node, strategy):
            if isinstance(ctx.placements[i], Partial) and not isinstance(target, Partial) and i in block.input_index:
                reduced_inputs.add(block.input_index[i])
            messages.reshard(node, i, target, strategy.why or strategy.why_sent)
        if strategy.sends:
            messages.sent_by(node, strategy)
        summands |= _place_results(ctx, messages, node, strategy)
    propagation = Propagation(
        block,
        in_forms=tuple(map(form, in_placements)),
        axis=infer.axis,
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


def _changed(ctx: RuleContext, node: Node, strategy: Strategy) -> Sequence[tuple[int, Form]]:
    """Return the operands that are sent to change their form."""
    if strategy.changed is None:
        pairs = zip(node.ins, strategy.in_forms, strict=True)
        needed = [(i, target) for i, target in pairs if target is not None]
        strategy.changed = [
            (i, target) for i, target in needed if ctx.infer.reshard(ctx.placements[i], target, ctx.block.avals[i])
        ]
    return strategy.changed


def _place_results(ctx: RuleContext, messages: "_Messages", node: Node, strategy: Strategy) -> dict[int, Partial]:
    """Place the results of an operation, converted where they are at once; return those added up into a whole."""
    summands = dict[int, Partial]()
    for k, (i, placement) in enumerate(zip(node.outs, strategy.out_placements, strict=True)):
        ctx.placements[i] = placement
        if strategy.out_forms:  # as when slices of a sum are sent instead of a weight
            resolved, why = strategy.out_forms[k], strategy.why_sent
        else:
            resolved, why = ctx.once_made(i, placement), ""
            if isinstance(placement, Partial) and resolved == REPLICATED:
                summands[i] = placement
        if resolved is not placement and not isinstance(resolved, Partial):
            messages.reshard(node, i, form(resolved), why)
        ctx.placements[i] = resolved
    return summands


def _place_inputs(ctx: RuleContext, in_placements: Sequence[Placement]) -> set[int]:
    """Place constants and inputs; return the inputs that are summands and are added up at once."""
    block = ctx.block
    for i, value in block.numbers.items():
        ctx.placements[i] = Replicated(value)
    for i, placement in zip(block.inputs, in_placements, strict=True):
        ctx.placements[i] = ctx.once_made(i, placement)
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
        target = forms.pop() if len(forms) == 1 else None
        if isinstance(target, Split) and infer.reshard(summand, target, aval) == "reduce-scatter":
            propagation.placements[i] = target
            k = next(k for k, message in enumerate(messages) if message.value == i)  # its reduction is its first
            size = infer.message_bytes("reduce-scatter", summand, target, aval)
            messages[k] = replace(messages[k], kind="reduce-scatter", bytes=size, new_form=target)


class _Present(NamedTuple):
    """A value in a form that devices have from an earlier message."""

    value: int
    form: Form
    in_backward: bool  # it is a whole value of state that the backward pass has fetched, anew


class _Messages:
    """The messages of a block, as its operations are placed.

    `_present` foretells which forms of a value `Emitter` keeps (`_forms`, `_fetched`): change both, or neither.
    """

    def __init__(self, ctx: RuleContext):
        self.all: list[Message] = []
        self._ctx = ctx
        self._present = set[_Present]()

    def sent_by(self, node: Node, strategy: Strategy) -> None:
        """Record the messages that an operation sends itself."""
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
        in_backward = node.backward and of_state
        whole = _Present(i, REPLICATED, in_backward)
        new_form = whole if target == REPLICATED else _Present(i, form(target), False)
        maker = block.makers.get(i)
        reshaped_from = maker.ins[:1] if maker is not None and maker.name in SHAPE_ONLY else ()
        reshaped = any(_Present(operand, REPLICATED, in_backward) in self._present for operand in reshaped_from)
        # A stored value's whole is in `Emitter._fetched`: slices that one collective makes are not cut from that.
        from_whole = not (of_state and kind == "all-to-all")
        again = new_form in self._present or (from_whole and (whole in self._present or (of_state and reshaped)))
        # Other slices are cut out of the whole value, unless one collective makes them.
        self._present.update({new_form, whole} if kind in ("all-gather", "all-reduce") else {new_form})
        size = infer.message_bytes(kind, p, target, aval)
        self.all.append(Message(node, kind, size, of_state, why, waited_for, again, value=i, new_form=form(target)))
