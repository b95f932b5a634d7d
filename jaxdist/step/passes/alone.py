"""The *alone* pass: on a mesh of one device nothing is reduced. XLA for CPUs would copy each gradient all the same."""

from __future__ import annotations

from jaxdist.step.interpreter import Interpreter
from jaxdist.step.primitives import all_reduce_p, alone_p


class Alone(Interpreter):
    """Evaluates a traced step without the reductions that data parallelism added."""

    def __init__(self) -> None:
        super().__init__({all_reduce_p: lambda _, eqn, x: alone_p.bind(x, axes=eqn.params["axes"])})
