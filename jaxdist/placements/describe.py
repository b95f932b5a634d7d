"""What an operation does to the dimensions of its operands: its factors.

A factor is a loop of the operation: ``bd,dh->bh`` has three, b, d and h. Each dimension of an operand or a result runs
along one of them, or along none (None: all of it is needed, or made, at once). To cut a factor is to give each device
a part of its turns: what has the factor is `Split` along it, what has not is whole. A factor that no result has is
reduced over, and gives a summand (`Partial`) or is put together by an exchange.

Reference: the sharding rules of Shardy (``OpShardingRule``), and the ``einsum`` notation of GSPMD, arXiv 2105.04663.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdist.placements.values import Split

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Factors:
    """An operation's loops."""

    operands: tuple[Dims, ...]  # by operand, the factor of each of its dimensions
    results: tuple[Dims, ...]  # by result
    # how a factor that no result has is reduced: ``"sum"``, ``"max"``, ``"min"``, ``"or"``, ``"and"``
    reduced: Mapping[int, str] = field(default_factory=dict)
    onto: int | None = None  # the operand to which the reduction of a factor is added: it is counted once
    # operands whose padding must not count when a factor is reduced; None: all that have the factor
    masked: tuple[int, ...] | None = None
    # the parameters that depend on the shapes, for slices: ``params(eqn params, factor, split)``
    params: Callable[[Mapping[str, Any], int, Split], Mapping[str, Any]] | None = None


def along(*shapes: tuple[int, ...], results: tuple[tuple[int, ...], ...], axes: tuple[int, ...] = ()) -> Factors:
    """Of an operation whose operands and results have the same dimensions, of which it needs `axes` whole."""
    out = results[0]

    def dims(shape: tuple[int, ...]) -> Dims:
        if len(shape) != len(out):
            return (None,) * len(shape)
        return tuple(None if d in axes or (n == 1 and out[d] != 1) else d for d, n in enumerate(shape))

    return Factors(tuple(map(dims, shapes)), tuple(map(dims, results)))
