"""The batch by structure: which arguments of a step hold its examples, where `batch_argnums` does not say so.

The rule is in docs/rules.md. An argument that has the batch's length and is like a result is still no part of it if the
step can be traced with a batch of a different length without it: that is a state of its length by chance.

Of the batch, arrays and arrays of keys are cut along their first dimension. Numbers, single keys, arrays without a
dimension or without entries are whole.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import DTypeLike

from jaxdist.compilation.signature import Leaf

INDICES = (  # follows advice about `batch_argnums`: jaxdist cannot know which numbers are indices
    "A batch is the parts of all ranks, one after the other: positions within a part (the edges of a graph, say) need "
    "the entries of the ranks before it added, edges + rank * nodes"
)


class Argument(NamedTuple):
    """One argument of a call."""

    lengths: frozenset[int]  # the first dimensions of its arrays; none: it can't be the batch
    keys: bool = False  # it holds typed PRNG keys only: batch if arrays of their length are


def batch_of(arguments: Sequence[Argument], returned: Collection[int] = ()) -> tuple[int, ...]:
    """The positions of the arguments that are the batch."""
    of_one_length = [i for i, a in enumerate(arguments) if len(a.lengths) == 1]
    able = [i for i, a in enumerate(arguments) if a.lengths and not a.keys]
    candidates = [i for i in able if i in of_one_length and i not in returned]
    candidates = candidates or [i for i in able if i in of_one_length or i not in returned]
    if not candidates or candidates[-1] not in of_one_length:
        return tuple(candidates[-1:])
    return tuple(i for i in of_one_length if arguments[i].lengths == arguments[candidates[-1]].lengths)


def sizes(leaves: Sequence[Leaf]) -> list[int | None]:
    """Return the number of entries to split of each leaf of a batch argument; None for leaves that stay whole."""
    # Keys of `jax.random.PRNGKey` have no type of their own: what looks like one is whole, unless others are as long.
    entries = [rows(x) if hasattr(x, "dtype") and np.ndim(x) else None for x in leaves]
    may_be_key = [n is not None and like_a_raw_key(x) for x, n in zip(leaves, entries, strict=True)]
    lengths = {n for n, key in zip(entries, may_be_key, strict=True) if n and not key}
    return [
        None if (key and n not in lengths) or (n == 0 and lengths) else n
        for n, key in zip(entries, may_be_key, strict=True)
    ]


def like_a_raw_key(x: Leaf) -> bool:
    """Check whether an array may be a key of `jax.random.PRNGKey`."""
    # Threefry's keys have two words, those of rbg four.
    return x.dtype == np.uint32 and np.ndim(x) == 1 and rows(x) in (2, 4)


def unsplit(names: Sequence[str], devices: int, processes: int) -> str:
    """Return the message about a step that splits nothing."""
    which, last = " or ".join(names[-3:]), names[-1]
    return (
        f"no argument is taken for the batch, so each of the {devices} devices computes all of it. If {which} has an "
        f"entry per example, say so: batch_argnums={last!r}, or a part of it, batch_argnums=\"{last}['x']\". "
        "batch_argnums=() says that the step has no batch" + (f". {INDICES}" if processes > 1 else "")
    )


def listed(names: Sequence[str]) -> str:
    """Names, for a message."""
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def argnums(names: Sequence[str]) -> str:
    """Names as `batch_argnums` takes them, for a message."""
    return repr(names[0] if len(names) == 1 else tuple(names))


class BatchPart(np.ndarray):
    """A rank's rows of a batch of a loader, where their number alone does not tell which batch they are of."""

    total: int | None = None  # rows of all ranks; None for arrays computed from it


def batch_part(x: np.ndarray, total: int) -> BatchPart:
    """A `BatchPart` of an array."""
    out = np.asarray(x).view(BatchPart)
    out.total = total
    return out


@dataclass(frozen=True, eq=False)
class Part:
    """A process's part of a leaf of the batch, where the parts of all are not equally long."""

    array: jax.Array | np.ndarray
    total: int  # rows of all parts

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.array)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array, dtype)


def rows(x: Leaf) -> int:
    """Return the rows of a leaf of the batch: of all parts, if it is a `Part`."""
    return x.total if type(x) is Part else int(np.shape(x)[0])


def check(name: str, x: Leaf) -> None:
    """Refuse a leaf that can't be split."""
    shape = np.shape(x)
    if not shape:
        raise ValueError(
            f"batch leaf {name} is a scalar ({x!r}): each leaf of the batch needs a leading axis, one entry an "
            "example. Pass settings and counters as part of the state, or close over them"
        )
    if not rows(x):
        raise ValueError(f"batch leaf {name} is empty (shape {shape}): it needs at least one example")
