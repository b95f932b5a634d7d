"""Which arguments of a step are the batch, where `batch_argnums` does not say so; and what of them is cut.

Of an argument that is the batch, arrays are cut, each along its own first dimension. Numbers, arrays without a
dimension and single keys are whole, and so is what an earlier call left whole on the mesh.

Within one process the answer decides only what is split over the devices: the result is the same. Between several it
decides what the step means: a batch is each rank's own part, state is the same on all. So it is not guessed there. In
order:

1. An argument that can't be a batch is state: one without an array, with arrays of several lengths, kept on the mesh by
   an earlier call, or of which the step returns the next value.
2. Of the others, those that are as long as the last one are the batch, and so are longer or shorter ones that do not
   come first.
3. Of several ranks, what has another length and is the same on all is state: if it differs in a later call, that is an
   error. What 2 says and the values deny else is tried: an argument as long as the batch that is the same on every rank
   while others are not may be state; the first, and one that the step returns, may be batch if it differs. Readings in
   which the step can't be traced, with the examples of all ranks together, are out. If several are left, that is an
   error which names them.
4. Within one process arrays beside numbers and keys, and arrays of several lengths, are tried as well (`pieces`):
   what can be twice as long is the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

INDICES = (
    "A batch is the parts of all ranks, one after the other: positions within a part (the edges of a graph, say) need "
    "the entries of the ranks before it added, edges + rank * nodes"
)
"""To be said where `batch_argnums` is advised to several ranks: nobody can know which numbers are indices."""

_MOST_ARGUMENTS = 4  # that are tried together: each way is a trace of the step
_MOST_LENGTHS = 8  # of one argument


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


def is_keys(x: Any) -> bool:
    """Whether a leaf is a typed PRNG key, or an array of them."""
    return jnp.issubdtype(getattr(x, "dtype", None) or type(x), jax.dtypes.prng_key)


def sizes(leaves: Sequence[Any], kept: Callable[[Any], bool] = lambda x: False) -> list[int | None]:
    """For each leaf of an argument that is a batch how many entries there are to be cut; None: it is whole.

    Args:
      leaves: of the argument.
      kept: whether a leaf is on the mesh as state is kept.

    Example:
      >>> sizes([np.ones((8, 3)), np.ones(5), 0.1, np.float32(1), np.zeros((0, 3))])
      [8, 5, None, None, None]
    """
    found = [
        None if getattr(x, "dtype", None) is None or not np.ndim(x) or kept(x) else int(np.shape(x)[0]) for x in leaves
    ]
    raw = [n is not None and _like_a_raw_key(x) for x, n in zip(leaves, found, strict=True)]
    lengths = {n for n, key in zip(found, raw, strict=True) if n and not key}
    return [
        None if (key and n not in lengths) or (n == 0 and lengths) else n for n, key in zip(found, raw, strict=True)
    ]


def length(sizes: Sequence[int | None]) -> int | None:
    """How many examples an argument has if it is a batch; None: it has none, or arrays of several lengths.

    Args:
      sizes: of its leaves, as of `sizes`.

    Example:
      >>> length([8, 8, None]), length([8, 5]), length([None])
      (8, None, None)
    """
    found = {n for n in sizes if n is not None}
    return found.pop() if len(found) == 1 else None


def _like_a_raw_key(x: Any) -> bool:
    return x.dtype == np.uint32 and np.shape(x) in ((2,), (4,))


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


def pieces(
    parts: Sequence[Mapping[int, Sequence[int]]],
    batch: Sequence[int],
    mixed: Sequence[int],
    traces: Callable[[Collection[tuple[int, int]]], bool],
) -> set[tuple[int, int]]:
    """What is cut of the arguments of one process, where some of them can't be told by their length alone.

    Args:
      parts: of each argument: the leaves that may be cut, by their length.
      batch: arguments that are one, as `which` says of those that are arrays of one length and nothing else.
      mixed: other arguments that may be one.
      traces: whether the step can be traced if these, ``(argument, length)``, are twice as long.

    Example:
      >>> params, graph = {3: [0], 5: [1]}, {8: [2], 12: [3]}
      >>> sorted(pieces([params, graph], [], [0, 1], lambda cut: {i for i, _ in cut} == {1}))
      [(1, 8), (1, 12)]
    """

    def of(arguments: Sequence[int]) -> set[tuple[int, int]]:
        return {(i, n) for i in arguments for n in parts[i]}

    certain = [i for i in batch if i]
    tried = [i for i in mixed if i][-_MOST_ARGUMENTS:]
    if tried == list(mixed) and len(tried) == 1 and not batch and len(parts[tried[0]]) == 1:
        return of(tried)  # nothing else may be the batch: what is wrong costs time alone
    if not certain and 0 in (*batch, *mixed):
        tried.append(0)  # the state, in most steps
    chosen = itertools.chain.from_iterable(itertools.combinations(tried, k) for k in range(len(tried), 0, -1))
    cut = next(filter(traces, (of([*certain, *some]) for some in chosen)), of(certain))
    known = {n for _, n in cut}
    for i in mixed:  # a part of it may be: the examples, and not the weights of the classes
        for n in sorted(parts[i], reverse=True)[:_MOST_LENGTHS] if len(parts[i]) > 1 else ():
            if (not known or n in known) and (i, n) not in cut and traces(cut | {(i, n)}):
                cut.add((i, n))
    return cut


def unsplit(names: Sequence[str], devices: int, processes: int) -> str:
    """What to say of a step of which nothing is split.

    Args:
      names: of the arguments that may be the batch.
      devices: of the step.
      processes: of the step.
    """
    which, last = " or ".join(names[-3:]), names[-1]
    return (
        f"no argument is taken for the batch, so each of the {devices} devices computes all of it. If {which} has an "
        f"entry an example, say so: batch_argnums={last!r}, or a part of it, batch_argnums=\"{last}['x']\". "
        "batch_argnums=() says that there is no batch" + (f". {INDICES}" if processes > 1 else "")
    )


def carried_over(names: Sequence[str]) -> str:
    """What to say of a step that returns the next value of its batch, and has no other arrays.

    Args:
      names: of the arguments that are the batch.
    """
    return (
        f"{_list(names)} {'is' if len(names) == 1 else 'are'} taken for the batch and split over the devices, and the "
        "step returns the next value. If it is the state, batch_argnums=() says that there is no batch; else "
        f"batch_argnums={names[0] if len(names) == 1 else tuple(names)!r} says that it is one"
    )


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
    return (
        f"which arguments are the batch can't be told: {found}. Say which: "
        + "; or ".join(map(said, readings))
        + f". {INDICES}"
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


class BatchPart(np.ndarray):
    """A process's part of a batch that the processes don't divide, filled up with copies of the last example.

    Made by `jaxdist.loader`. What numpy makes of it is a plain array.

    Attributes:
      total: examples of all parts, without the copies.
    """

    total: int

    def __array_finalize__(self, other: Any) -> None:
        pass


def batch_part(x: Any, total: int) -> Any:
    """A `BatchPart` of an array."""
    out = np.asarray(x).view(BatchPart)
    out.total = total
    return out


def problem(names: Sequence[str], leaves: Sequence[Any], devices: Sequence[int]) -> str | None:
    """What is wrong with a batch whose leaves must be multiples of so many examples each, or None."""
    for name, x, parts in zip(names, leaves, devices, strict=True):
        shape = np.shape(x)
        if not shape:
            return (
                f"batch leaf {name} is a scalar ({x!r}): each leaf of the batch needs a leading axis, one entry an "
                "example. Pass settings and counters as part of the state, or close over them"
            )
        if not shape[0]:
            return f"batch leaf {name} is empty (shape {shape}): it needs at least one example"
        if shape[0] % parts:
            return (
                f"batch leaf {name} has {shape[0]} examples (shape {shape}), which can't be divided over the "
                f"{parts} devices of this process, one of several: pass a multiple of {parts}"
            )
    return None
