"""The arrays of all ranks that are known to be the same on each, and the comparison of those that are not.

An array that lies on all ranks is one array to its user, but each rank has a copy, and may compute with it by itself:
``if rank == 1: w = 3 * w`` makes an array of all ranks whose copies differ. What decorated steps and `restore` return,
and what was compared, is marked; what comes from elsewhere is compared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.compat import mark, unmark, unmarked
from jaxdist.ir import fingerprint

CHANGED = (
    "Something changed it on some ranks outside of a decorated step (code under `if rank == ...`, say): change it on "
    "every rank, or in the step"
)
"""Advice about copies that differ."""

SMALL = 1 << 20
"""Bytes that may be kept a little longer than the user does."""


class Copies:
    """What the job's steps returned, and what is known of it.

    Args:
      context: the job's; ask it for `only` this.
    """

    def __init__(self, context: object = None):
        self._by: object = None
        self._latest: Sequence[Any] = ()  # if it is small, not marked yet: most of it never has to be

    def returned(self, by: object, arrays: Sequence[Any], small: bool) -> None:
        """A step has returned these.

        Args:
          by: the program; before it ran it was asked whether its state does `follow`, or `unknown` was.
          arrays: the leaves of the result.
          small: whether they have no more than `SMALL` bytes.
        """
        if not small:
            mark(arrays)
        self._by, self._latest = (by, arrays) if small else (None, ())

    def forget(self, leaves: Iterable[Any]) -> None:
        """The step that returned last may have returned what is not the same on all ranks."""
        self.returned(None, (), True)
        unmark(leaves)

    def follow(self, by: object, leaves: Sequence[Any], pick: Callable[[Sequence[Any]], Sequence[Any]]) -> bool:
        """Whether this program has returned last, and these are the ones that `pick` takes of its result."""
        return self._by is by and all(map(operator.is_, leaves, pick(self._latest)))

    def unknown(self, leaves: Sequence[Any]) -> list[int]:
        """Positions of those that lie on all ranks, whole on each device, and are not known to be the same."""
        mark(self._latest)
        return [i for i in unmarked(leaves) if _is_of_all(leaves[i])]


def add(arrays: Iterable[Any]) -> None:
    """These are the same on all ranks, as far as they lie there."""
    mark(filter(_is_of_all, arrays))


def checksum(x: Any) -> int:
    """A checksum of this rank's copy of an array; waits for it."""
    own = x.addressable_data(0)
    own = jax.random.key_data(own) if jnp.issubdtype(own.dtype, jax.dtypes.prng_key) else own
    return fingerprint.checksum(np.asarray(own))


def _is_of_all(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable and x.is_fully_replicated and not x.is_deleted()
