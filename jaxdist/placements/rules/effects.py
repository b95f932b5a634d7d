"""Rules for operations that act on the host, or draw on a state of the device's: the first device does."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, Sends, Strategy, nbytes
from jaxdist.placements.model.values import REPLICATED, Placement, is_narrow
from jaxdist.placements.rules.context import RuleContext, refuse, special
from jaxdist.placements.rules.kernels import by_batches


@special("debug_callback", "debug_print")
def _debug(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Run a debug callback once, on the root, with whole values."""
    if any("Ordered" in type(effect).__name__ for effect in node.eqn.effects):
        raise refuse(node, "ordered=True is not possible on several devices: JAX orders effects on one device only")
    _check_types(ctx, node)

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        lax.cond(device.index == 0, lambda xs: [device.bind(node, xs), ()][1], lambda xs: (), tuple(args))
        return []

    return Strategy([REPLICATED] * len(ins), [], run, why=f"{node.name} shows whole values")


@special("pure_callback", "io_callback")
def _callback(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Run a callback on the root and send its results to all, unless it treats its operands as a batch."""
    if strategy := by_batches(ctx, node, ins):
        return strategy
    outs = [ctx.block.avals[o] for o in node.outs]
    _check_types(ctx, node)

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        def call(xs: Any) -> tuple[Any, ...]:
            return tuple(device.bind(node, xs))

        nothing = lambda xs: tuple(jnp.zeros(a.shape, a.dtype) for a in outs)
        results = lax.cond(device.index == 0, call, nothing, tuple(args))
        return [device.from_root(x) for x in results]

    why = "a callback runs on the root"
    return Strategy([REPLICATED] * len(ins), [REPLICATED] * len(outs), run, sends=_sent_from_root(outs), why=why)


def _sent_from_root(avals: Sequence[Any]) -> list[Sends]:
    """Return what `Emitter.from_root` sends: a sum of one device's bits and zeros."""
    return [Sends("all-reduce", nbytes(aval)) for aval in avals if aval.size]


def _check_types(ctx: RuleContext, node: Node) -> None:
    # JAX unpacks what takes less than a byte on threads that wait for the other devices.
    for i in (*node.ins, *node.outs):
        if is_narrow(dtype := ctx.block.avals[i].dtype):
            raise refuse(node, f"on several devices a callback can't take or return {dtype}: convert it to int8")


@special("rng_uniform")
def _rng_uniform(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    """Let the root draw; otherwise each device would draw different numbers."""
    run = lambda device, node, xs: [device.from_root(x) for x in device.bind(node, xs)]
    sends = _sent_from_root([ctx.block.avals[o] for o in node.outs])
    return Strategy([REPLICATED] * len(ins), [REPLICATED] * len(node.outs), run, sends=sends)
