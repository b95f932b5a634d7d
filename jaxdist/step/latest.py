"""What a step was last called with: in the steady state a call is known by one look at each leaf of its state."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdist.agreement.calls import StepCall
from jaxdist.compat import sharding_of
from jaxdist.step.placer import Placer
from jaxdist.step.program import Program
from jaxdist.step.signature import picker

NEITHER = object()
"""In place of how a leaf is kept: one of the batch, or a constant."""


@dataclass
class Latest:
    """What a step was last called with, for arguments of one structure.

    Attributes:
      expected: for each leaf how it is kept on the mesh; `NEITHER` for those of the batch and constants.
      constants: the leaves that are no arrays.
      known: structure and types of what the ranks have agreed on.
      agreed: by the origins of its state, the kinds of call that they agreed on; none if one has failed since.
    """

    expected: Sequence[Any]
    program: Program | None = None
    signature: Any = None
    constants: tuple[Any, ...] = ()
    known: Any = None
    agreed: dict[Sequence[int], StepCall] = field(default_factory=dict)
    _shardings: Sequence[Any] | None = None
    _misplaced: Sequence[int] = ()

    @functools.cached_property
    def _pick_state(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        return picker([i for i, how in enumerate(self.expected) if how is not NEITHER])

    def misplaced(self, leaves: Sequence[Any], placer: Placer) -> Sequence[int]:
        """Positions of the leaves that are not kept as expected, all those of the batch and constants among them."""
        try:  # in the steady state one look at each leaf of the state, and no line of Python
            shardings = list(map(sharding_of, self._pick_state(leaves)))
        except AttributeError:  # a leaf that is not on any device
            return placer.misplaced(leaves, self.expected)
        if self._shardings is None or not all(map(operator.is_, shardings, self._shardings)):
            self._misplaced, self._shardings = placer.misplaced(leaves, self.expected), shardings
        return self._misplaced


def types(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The type of each leaf; a number's is its class."""
    return tuple((x.shape, x.dtype, getattr(x, "weak_type", None)) if hasattr(x, "shape") else type(x) for x in leaves)


def expected(program: Program, constants: Sequence[int]) -> list[Any]:
    signature = program.signature
    expected = [NEITHER if b else how for b, how in zip(signature.is_batch, program.layouts, strict=True)]
    for i in constants:
        expected.insert(i, NEITHER)
    return expected
