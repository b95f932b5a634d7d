"""The XLA communicator: NCCL on GPUs, gloo between CPU processes, shared memory on virtual devices."""

from __future__ import annotations

from typing import Any

from jaxdist.step.interpreter import Interpreter
from jaxdist.step.primitives import AXIS, Op, all_reduce_p, reduced


class XlaLowering(Interpreter):
    """Evaluates a step's jaxpr on one device of a ``shard_map``, its reductions as XLA's own collectives."""

    def __init__(self) -> None:
        super().__init__({all_reduce_p: lambda _, eqn, x: reduced(x, **eqn.params)})

    def all_reduce(self, x: Any, op: Op) -> Any:
        """The sum or mean of `x` over the devices."""
        return reduced(x, (AXIS,), op)
