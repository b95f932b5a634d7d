"""The arrays of all ranks that are known to be the same on each, and the comparison of those that are not.

An array that lies on all ranks is one array to its user, but each rank has a copy, and may compute with it by itself:
``if rank == 1: w = 3 * w`` makes an array of all ranks whose copies differ. What decorated steps and `restore` return,
and what was compared, is numbered; what comes from elsewhere is compared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.compat import mark, marks, unmark
from jaxdist.ir import fingerprint

CHANGED = (
    "Either ranks pass what different calls returned, or something changed it on some ranks outside of a decorated "
    "step (code under `if rank == ...`, say): do the same on every rank, or do it in the step"
)
"""Advice about copies that differ."""

SMALL = 1 << 20
"""Bytes that may be kept a little longer than the user does."""

_STEP, _CALL = 44, 20
"""The bits of a number that stand behind that of the step, and behind that of the call."""

_CALLS, _PLACES = (1 << _STEP - _CALL) - 1, (1 << _CALL) - 1
_OUTSIDE, _AGAIN = -1, -2


class Copies:
    """What the job's steps returned: each such array has a number, of its step, the call, and its place in the result.

    Ranks that made the same calls have the same numbers, and pass arrays of the same numbers on.

    Args:
      context: the job's; ask it for `only` this.
    """

    def __init__(self, context: object = None):
        # What was returned last, if it is small, and by which step: not numbered yet, as most of it never has to be.
        self._newest: Sequence[Any] = ()
        self._by: Results | None = None
        self._steps: list[Results] = []
        self._compared = Results(self, "")
        self._compared.count()

    def add(self, arrays: Iterable[Any]) -> None:
        """These are the same on all ranks, as far as they lie there."""
        mark(filter(_is_of_all, arrays), self._compared.count())

    def numbers(self, leaves: Sequence[Any]) -> list[int]:
        """The number of each leaf; -1: no step has returned it lately."""
        if self._by is not None:
            mark(self._newest, self._by.first)
        return marks(leaves)

    def unknown(self, leaves: Sequence[Any], numbers: Sequence[int]) -> list[int]:
        """Positions of those that lie on all ranks, whole on each device, and are not known to be the same."""
        return [i for i, n in enumerate(numbers) if n < 0 and _is_of_all(leaves[i])] if -1 in numbers else []

    def origins(self, numbers: Sequence[int], before: Sequence[int] = ()) -> tuple[int, ...]:
        """Where leaves are from: a number that is the same call after call in a loop that repeats itself.

        Args:
          numbers: of the leaves.
          before: those of the call before. What is older than the latest result of its step may be what it was then.
        """
        given, calls = np.array(numbers, np.int64), np.array([step.calls for step in self._steps])
        ago = (calls[given >> _STEP] - (given >> _CALL)) & _CALLS
        found = given & ~(_CALLS << _CALL) | ago << _CALL
        if len(before) == len(numbers):
            found[(ago > 0) & (given == np.array(before))] = _AGAIN
        found[given < 0] = _OUTSIDE
        return tuple(found.tolist())

    def in_words(self, origin: int) -> str:
        """Where a leaf is from, for a message."""
        if origin < 0:
            return "no recent call of a decorated step" if origin == _OUTSIDE else "what it was in the call before"
        step, ago, place = origin >> _STEP, origin >> _CALL & _CALLS, origin & _PLACES
        if step == 0:
            return "what was restored or compared"
        when = f" {ago} calls before" if ago else ""
        return f"leaf {place} of what step {self._steps[step].name!r} returned{when}"


class Results:
    """What one step returns.

    Args:
      copies: the job's.
      name: of the step.

    Attributes:
      calls: that have returned.
      first: the number of the first leaf of the latest result.
    """

    def __init__(self, copies: Copies, name: str):
        self.name, self.calls, self.first = name, 0, 0
        self._copies, self._number = copies, -1
        self._following: Sequence[int] | None = None
        self._given: Sequence[int] = ()  # numbers of the state of the call before
        # The origins of a state that came twice in a row, and of how many calls their steps had returned.
        self._repeated: tuple[tuple[int, ...], list[tuple[Results, int]]] | None = None

    def count(self) -> int:
        """Count a call that has returned; returns `first`."""
        if self._number < 0:  # in the order of their first calls, which is the same on all ranks
            self._number = len(self._copies._steps)
            self._copies._steps.append(self)
        self.calls += 1
        self.first = self._number << _STEP | (self.calls & _CALLS) << _CALL
        return self.first

    def returned(self, arrays: Sequence[Any], following: Sequence[int] | None, small: bool) -> None:
        """The step has returned these.

        Args:
          arrays: the leaves of the result.
          following: the places of the next call's state among them; None: not all of it is there.
          small: whether they have no more than `SMALL` bytes.
        """
        first, copies, self._following = self.count(), self._copies, following
        if not small:
            mark(arrays, first)
        copies._by, copies._newest = (self, arrays) if small else (None, ())

    def forget(self, leaves: Iterable[Any]) -> None:
        """What the step returned last may not be the same on all ranks."""
        self._copies._by, self._copies._newest = None, ()
        unmark(leaves)

    def origins(self, leaves: Sequence[Any]) -> tuple[tuple[int, ...], list[int]]:
        """Where the state of a call is from: (), if it is what the call before returned; and what is `Copies.unknown`.

        Args:
          leaves: of the state.
        """
        copies, before, following, self._given = self._copies, self._given, self._following, ()
        if following is not None and len(following) != len(leaves):
            following = None
        newest = copies._newest.__getitem__
        if following is not None and copies._by is self and all(map(operator.is_, leaves, map(newest, following))):
            return (), []
        self._given = numbers = copies.numbers(leaves)
        if following is not None and numbers == list(map(self.first.__add__, following)):
            return (), []
        repeated = numbers == before
        if repeated and self._repeated and all(step.calls == calls for step, calls in self._repeated[1]):
            return self._repeated[0], []
        found, unknown = copies.origins(numbers, before), copies.unknown(leaves, numbers)
        self._repeated = None
        if repeated and -1 not in numbers:
            of = (copies._steps[k] for k in {n >> _STEP for n in numbers})
            self._repeated = found, [(step, step.calls) for step in of]
        return found, unknown


def checksum(x: Any) -> int:
    """A checksum of this rank's copy of an array; waits for it."""
    own = x.addressable_data(0)
    own = jax.random.key_data(own) if jnp.issubdtype(own.dtype, jax.dtypes.prng_key) else own
    return fingerprint.checksum(np.asarray(own))


def _is_of_all(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable and x.is_fully_replicated and not x.is_deleted()
