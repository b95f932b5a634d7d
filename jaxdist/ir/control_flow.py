"""Views of JAX's control flow: how the operands of an equation are divided, and the programs that it runs.

Reference: https://docs.jax.dev/en/latest/jaxpr.html#control-flow
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr

from jaxdist import compat

T = TypeVar("T")

CHECKPOINT = ("checkpoint", "remat", "remat2")
"""Names of `jax.checkpoint`, whose operands are its body's."""
CONTROL_FLOW = frozenset({"scan", "while", "cond", *CHECKPOINT})


class Scan(NamedTuple):
    """A `lax.scan`."""

    consts: int  # number of operands that each turn takes as they are
    carries: int  # number of those that each turn hands on to the next
    body: ClosedJaxpr  # ``(*consts, *carry, *slices of xs) -> (*carry, *slices of ys)``

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Scan:
        """That of an equation with these parameters."""
        return cls(*compat.scan_split(params), params["jaxpr"])

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Constants, carry and xs."""
        xs = self.consts + self.carries
        return operands[: self.consts], operands[self.consts : xs], operands[xs:]


class While(NamedTuple):
    """A `lax.while_loop`."""

    cond_consts: int  # number of operands that only the condition takes
    body_consts: int  # number of those that only the body takes
    cond: ClosedJaxpr  # ``(*cond_consts, *carry) -> whether to go on``
    body: ClosedJaxpr  # ``(*body_consts, *carry) -> carry``

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> While:
        """That of an equation with these parameters."""
        return cls(params["cond_nconsts"], params["body_nconsts"], params["cond_jaxpr"], params["body_jaxpr"])

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Constants of the condition, constants of the body, and carry."""
        carry = self.cond_consts + self.body_consts
        return operands[: self.cond_consts], operands[self.cond_consts : carry], operands[carry:]


def branches(params: Mapping[str, Any]) -> tuple[ClosedJaxpr, ...]:
    """Of a `lax.cond` or `lax.switch`; the first operand chooses one, which takes the others."""
    return params["branches"]


def checkpointed(params: Mapping[str, Any]) -> ClosedJaxpr:
    """The body of a `jax.checkpoint`."""
    return compat.closed(params["jaxpr"])
