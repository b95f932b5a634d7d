"""Communicators: how arrays move. Each is a table of lowering rules for the collectives of a step."""

from __future__ import annotations

from typing import Any, Protocol

from jaxdist.step.primitives import Op


class Lowering(Protocol):
    """What a communicator makes of a step: an interpreter of its jaxpr, used once, in program order."""

    def run(self, closed: Any, *args: Any) -> list[Any]: ...
    def all_reduce(self, x: Any, op: Op) -> Any: ...


def lowering(communicator: str) -> Lowering:
    """The lowering rules of a communicator.

    Args:
      communicator: ``"xla"`` or ``"mpi"``.

    Raises:
      ValueError: for any other name.
    """
    if communicator == "xla":
        from jaxdist.communicators.xla import XlaLowering

        return XlaLowering()
    if communicator == "mpi":
        from jaxdist.communicators.mpi import MpiLowering

        return MpiLowering()
    raise ValueError(f"unknown communicator {communicator!r}; there are 'xla' and 'mpi'")
