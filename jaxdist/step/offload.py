"""State in the host's memory, within a step: brought to its device for the update, and back at the end.

XLA starts a copy as soon as it may: at the start of the step, and the state would lie on the device while activations
do, which is what it is kept elsewhere for. So the copy of a leaf waits for the gradient that it is updated with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxdist.ir.interpreter import Interpreter, live
from jaxdist.ir.primitives import shard_p

_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


def run_offloaded(
    interpreter: Interpreter, closed: ClosedJaxpr, args: Sequence[Any], offloaded: Collection[int]
) -> Any:
    """The outputs of a device's program, some of whose arguments are in the host's memory.

    A leaf that is used but as `jaxdist.zero` marks it (a norm of it is taken, say) is brought at once.

    Args:
      interpreter: that runs the program.
      closed: the program, with the marks.
      args: of the program.
      offloaded: positions of those in the host's memory.
    """
    if not offloaded:
        return interpreter.run(closed, *args)
    jaxpr = closed.jaxpr
    used = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    used |= {v for e in live(jaxpr) if e.primitive is not shard_p for v in e.invars if not isinstance(v, Literal)}
    args = [jax.device_put(x, _DEVICE) if i in offloaded and jaxpr.invars[i] in used else x for i, x in enumerate(args)]
    away = {id(args[i]) for i in offloaded if jaxpr.invars[i] not in used}
    gradients: list[Any] = []
    seen: dict[tuple[int, ...], int] = {}

    def marked(_: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        if eqn.params["role"] == "gradient":
            gradients.append(x)
        if id(x) not in away:
            return x
        # Mostly the state has one leaf, or a few, for each parameter, in their order.
        alike = [g for g in gradients if g.shape == x.shape]
        if alike:
            k = seen[x.shape] = seen.get(x.shape, -1) + 1
            alike = [alike[k % len(alike)]]
        return jax.device_put(lax.optimization_barrier((x, *(alike or gradients)))[0], _DEVICE)

    interpreter.rules[shard_p] = marked
    interpreter.rewritten = set(interpreter.rules)
    return interpreter.run(closed, *args)


def to_host(x: Any) -> Any:
    """A result that is kept in the host's memory."""
    return jax.device_put(x, _HOST)
