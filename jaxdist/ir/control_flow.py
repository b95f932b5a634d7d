"""A view of JAX's control flow: the programs that an equation runs, and what they take of its operands.

Reference: https://docs.jax.dev/en/latest/jaxpr.html#control-flow
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxdist import compat

T = TypeVar("T")

CHECKPOINT = ("checkpoint", "remat", "remat2")
"""Names of `jax.checkpoint`, whose operands are its body's."""
CONTROL_FLOW = frozenset({"scan", "while", "cond", *CHECKPOINT})


class Body(NamedTuple):
    """A program that control flow runs, and how its values and those of the equation correspond."""

    closed: ClosedJaxpr
    ins: Sequence[int]  # of each input: the operand
    outs: Sequence[int] = ()  # of each output: the result; of a loop's condition: none
    carry: range = range(0)  # inputs that a loop carries: the first outputs of its body are these in the next turn
    # inputs that are slices of their operands, and outputs that are slices of their results, along the first dimension
    xs: range = range(0)
    ys: range = range(0)

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """The operands that it takes as they are, those that it carries, and the rest."""
        taken, start, stop = [operands[k] for k in self.ins], self.carry.start, self.carry.stop
        return taken[:start], taken[start:stop], taken[stop:]


def bodies(eqn: JaxprEqn) -> list[Body]:
    """Of control flow: the condition of a `while` before its body. None of anything else."""
    params, ins, outs = eqn.params, range(len(eqn.invars)), range(len(eqn.outvars))
    match eqn.primitive.name:
        case "scan":
            consts, carries = compat.scan_split(params)
            carry = range(consts, consts + carries)
            return [Body(params["jaxpr"], ins, outs, carry, ins[carry.stop :], outs[carries:])]
        case "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            tested, taken = [*ins[:first], *ins[first + second :]], ins[first:]
            condition = Body(params["cond_jaxpr"], tested, carry=range(first, len(tested)))
            return [condition, Body(params["body_jaxpr"], taken, outs, range(second, len(taken)))]
        case "cond":  # the first operand chooses
            return [Body(branch, ins[1:], outs) for branch in params["branches"]]
        case "checkpoint" | "remat" | "remat2":
            return [Body(compat.closed(params["jaxpr"]), ins, outs)]
    return []
