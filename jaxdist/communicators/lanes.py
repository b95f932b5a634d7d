"""The communicator of lanes: XLA's, with sums in an order that does not depend on who holds a lane.

A lane is a CPU device. XLA compiles one program for all lanes, so a lane computes the same in any process. Only the
order of sums over lanes could differ: XLA and gloo add in different orders, within and between processes. So summands
are only sent, and added by a binary tree over lane numbers. Maxima, minima and gathers do not depend on order.
"""

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p
from jax.typing import DTypeLike

from jaxdist.communicators import exchange
from jaxdist.communicators.xla import Axes, GlooLowering, Groups, Results, all_gather
from jaxdist.ir.interpreter import Interpreter, axes_of, groups_of

_AT_ONCE = 1 << 12  # largest total bytes of a sum in one message: each lane gets all summands and adds them


class LanesLowering(GlooLowering):
    """Evaluate a step's jaxpr on one lane."""

    def __init__(self) -> None:
        super().__init__()
        self.rules |= {p.psum_p: self._sum}

    def _total(self, axes: Axes, x: jax.Array, wire: DTypeLike | None, groups: Groups = None) -> jax.Array:
        size = len(groups[0]) if groups else lax.axis_size(axes)
        if x.nbytes * size <= _AT_ONCE:
            return exchange.summed(all_gather(axes, x.astype(wire or x.dtype), groups)).astype(x.dtype)
        return super()._total(axes, x, wire or x.dtype, groups)

    def _sum(self, _: Interpreter, eqn: JaxprEqn, x: jax.Array) -> Results:
        axes = axes_of(eqn)
        wide = exchange.reducible(x.dtype)
        # Sum over the operand's own axes, from vmap. (A sum of int32 is int64.)
        own = x.astype(wide).sum([one for one in axes if isinstance(one, int)]).astype(wide)
        named = tuple(one for one in axes if not isinstance(one, int))
        total = (self._total(named, own, None, groups_of(eqn)) if x.size and named else own).astype(x.dtype)
        return [total] if eqn.primitive.multiple_results else total
