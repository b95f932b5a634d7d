"""Which arguments of a step are the batch, where `batch_argnums` does not say so.

Within one process the answer decides only what is split over the devices: the result is the same. Between several it
decides what the step means: a batch is each rank's own part, state is the same on all. So it is not guessed there. In
order:

1. An argument that can't be a batch is state: one with a number, a key or what is no array in it, with arrays of
   several lengths, kept on the mesh by an earlier call, or of which the step returns the next value.
2. Of the others, those that are as long as the last one are the batch, and so are longer or shorter ones that do not
   come first.
3. Of several ranks, what has another length and is the same on all is state: if it differs in a later call, that is an
   error. What 2 says and the values deny else is tried: an argument as long as the batch that is the same on every rank
   while others are not may be state; the first, and one that the step returns, may be batch if it differs. Readings in
   which the step can't be traced, with the examples of all ranks together, are out. If several are left, that is an
   error which names them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Argument(NamedTuple):
    """One argument of a call.

    Attributes:
      name: of the parameter.
      length: of all its arrays, if it may be a batch; None: it can't be one.
      differs: whether the ranks come with other values; None: they were not compared.
    """

    name: str
    length: int | None
    differs: bool | None = None


def length(leaves: Sequence[Any], kept: Callable[[Any], bool]) -> int | None:
    """How many examples an argument has if it is a batch; None: it can't be one.

    Args:
      leaves: of the argument.
      kept: whether a leaf is on the mesh as state is kept.

    Example:
      >>> length([np.ones((8, 3)), np.ones(8)], lambda x: False), length([np.ones(8), 0.1], lambda x: False)
      (8, None)
    """
    lengths = set()
    for x in leaves:
        dtype = getattr(x, "dtype", None)
        if dtype is None or not np.ndim(x) or jnp.issubdtype(dtype, jax.dtypes.prng_key) or kept(x):
            return None
        lengths.add(np.shape(x)[0])
    raw_key = len(leaves) == 1 and leaves[0].dtype == np.uint32 and np.shape(leaves[0]) in ((2,), (4,))
    return lengths.pop() if len(lengths) == 1 and not raw_key else None


class AmbiguousError(ValueError):
    """Two readings of a call are possible."""


def which(
    arguments: Sequence[Argument],
    returned: Callable[[], Collection[int]],
    traces: Callable[[tuple[int, ...]], bool],
) -> tuple[int, ...]:
    """The positions of the arguments that are the batch.

    Args:
      arguments: of the call.
      returned: tells of which of them the step returns the next value; asked only where it matters.
      traces: whether the step can be traced if these are the batch, with more examples than they have.

    Raises:
      AmbiguousError: there are several readings, of which the text names two.

    Example:
      >>> state, x, y, z = Argument("w", 3), Argument("x", 8), Argument("y", 8), Argument("z", 32)
      >>> which([state, x, y], lambda: [0], lambda reading: True)
      (1, 2)
      >>> which([state, x, z], lambda: [0], lambda reading: True)
      (1, 2)
    """
    able = [i for i, a in enumerate(arguments) if a.length is not None]
    alike = len({arguments[i].length for i in able}) == 1
    usual = bool(able) and alike and able[0] > 0 and able[-1] == len(arguments) - 1  # (state, batch), (state, x, y)
    alone = all(arguments[i].differs is None for i in able)

    def read(carried: Collection[int]) -> tuple[list[int], list[int]]:
        """The batch by the rules, and what is in doubt of it."""
        free = [i for i in able if i not in carried]
        order = sorted(free, key=lambda i: (bool(arguments[i].differs), i))
        last = next((arguments[i].length for i in reversed(order)), None)
        batch = [i for i in able if i not in carried and (arguments[i].length == last or i > 0)]
        if alone:
            return batch, [i for i in batch if arguments[i].length != last]
        batch = [i for i in batch if arguments[i].length == last or arguments[i].differs]
        some = any(arguments[i].differs for i in batch)
        return batch, [i for i in able if arguments[i].differs is not (i in batch) and (some or i not in batch)]

    batch, doubtful = read(() if usual or not able else returned())
    if usual and (doubtful or not (alone or any(arguments[i].differs for i in able))):  # no batch, as it seems
        batch, doubtful = read(returned())
    if not doubtful:
        return tuple(batch)
    certain = [i for i in batch if i not in doubtful]
    readings = [
        tuple(sorted((*certain, *chosen)))
        for count in range(len(doubtful), -1, -1)
        for chosen in itertools.combinations(doubtful, count)
    ]
    if alone:  # any would do
        return next(filter(traces, readings), tuple(batch))
    possible = [reading for reading in readings if traces(reading)]
    if len(possible) > 1:
        raise AmbiguousError(_two_readings(arguments, possible[:2], doubtful))
    return possible[0] if possible else tuple(batch)  # an error of the step's own will come


def _two_readings(arguments: Sequence[Argument], readings: Sequence[tuple[int, ...]], doubtful: Sequence[int]) -> str:
    def said(reading: tuple[int, ...]) -> str:
        names = tuple(arguments[i].name for i in reading)
        rest = [a.name for i, a in enumerate(arguments) if i not in reading]
        each = f"each rank has its own part of {_list(names)}" if names else "there is no batch"
        state = f", and {_list(rest)} {'is' if len(rest) == 1 else 'are'} the same on all" if rest else ""
        return f"batch_argnums={(names[0] if len(names) == 1 else names)!r}: {each}{state}"

    found = "; ".join(
        f"{arguments[i].name} ({arguments[i].length} entries) is "
        f"{'not the same' if arguments[i].differs else 'the same'} on all ranks"
        for i in doubtful
    )
    return f"which arguments are the batch can't be told: {found}. Say which: " + "; or ".join(map(said, readings))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
