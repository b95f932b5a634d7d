"""The rule for a loop over examples that have nothing to do with each other: each device loops over its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jaxdist import compat
from jaxdist.ir.interpreter import has_effect
from jaxdist.ir.operations import ADDITION, FOR_ITSELF
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.strategy import DeviceContext, Strategy
from jaxdist.placements.model.values import REPLICATED, Partial, Placement, Split, form, is_wide
from jaxdist.placements.rules.context import RuleContext


def own_iterations(
    ctx: RuleContext, node: Node, ins: Sequence[Placement], block: Block, carry_inputs: range
) -> Strategy | None:
    """Split a loop over the batch whose iterations are independent but for sums of results, if it is one.

    Each device loops over its own examples, and its sums are over these alone, a Partial; for two devices::

        lax.scan(lambda total, x: (total + f(x), g(x)), 0, [a, b, c, d])

        device 0: total = f(a) + f(b)    device 1: total = f(c) + f(d)    Partial: added up where it is used
                  ys    = [g(a), g(b)]             ys    = [g(c), g(d)]   Split(0)
    """
    # Under `jax.vmap`, a callback with ``vmap_method="sequential"`` says that it treats each example separately.
    alone = FOR_ITSELF - {"pure_callback"} if compat.batches(node.eqn) else FOR_ITSELF
    if any(has_effect(n.eqn) or n.name in alone for n in block.nodes):
        return None
    first, count = carry_inputs.start, len(carry_inputs)
    taken, returned = [block.inputs[k] for k in carry_inputs], block.outputs[:count]
    if not all(_is_a_sum(block, i, o) for i, o in zip(taken, returned, strict=True)):
        return None
    split = next(p for p in ins[carry_inputs.stop :] if isinstance(p, Split) and p.dim == 0 and not p.of_state)
    if split.outer > 1 and count and split.is_padded(ctx.n):
        return None
    params, narrow = node.eqn.params, [block.avals[i] for i in taken]
    body = jaxpr_as_fun(params["jaxpr"])

    def run(device: DeviceContext, node: Node, args: list[Any]) -> Sequence[Any]:
        consts, carry, xs = args[:first], args[first : carry_inputs.stop], args[carry_inputs.stop :]
        padded = split.is_padded(device.n)
        counts = device.real(replace(split, dim=0), 1) if padded and carry else None

        def iteration(carry: Any, xs: Any) -> Any:
            xs, real = xs
            outs = body(*consts, *[c.astype(a.dtype) for c, a in zip(carry, narrow, strict=True)], *xs)
            new = [o.astype(c.dtype) for o, c in zip(outs[:count], carry, strict=True)]
            if real is not None:
                new = [jnp.where(real, a, b) for a, b in zip(new, carry, strict=True)]
            return tuple(new), tuple(outs[count:])

        settings = {k: params[k] for k in ("reverse", "unroll")}
        carry, ys = lax.scan(iteration, tuple(carry), (tuple(xs), counts), length=split.rows, **settings)
        return [*carry, *ys]

    in_forms = [*[REPLICATED] * first, *[Partial()] * count, *[form(split)] * (len(ins) - carry_inputs.stop)]
    out_placements: list[Placement] = [Partial(gradient=node.backward)] * count
    out_placements += [replace(split, whole=False)] * (len(node.outs) - count)
    return Strategy(in_forms, out_placements, run)


def _is_a_sum(block: Block, i: int, o: int) -> bool:
    """Check whether an iteration only adds to a carry: it takes value `i` and returns `o`."""
    node = block.makers.get(o)
    # ``total + total`` doubles in each iteration, of which a device has only its own.
    if node is None or node.name not in ADDITION or i not in node.ins or node.ins[0] == node.ins[1]:
        return False
    # What else looks at the total would see that of one device's examples.
    return block.uses[i] == 1 and block.uses[o] == 1 and is_wide(block.avals[i].dtype)
