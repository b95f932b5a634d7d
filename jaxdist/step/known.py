"""A call that a step knows: what it runs, and how to tell that the next one is the same."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxdist.agreement.ledger import Entry
from jaxdist.compat import bits_of, sharding_of
from jaxdist.placements.layouts import Padded
from jaxdist.step.batch import is_keys
from jaxdist.step.donation import is_gone, without_aliases
from jaxdist.step.placer import Placer
from jaxdist.step.program import Program
from jaxdist.step.signature import Signature, picker

_aval_of, _is_deleted = operator.attrgetter("aval"), operator.methodcaller("is_deleted")


@dataclass
class Known:
    """A call that was made before, and what it runs."""

    program: Program  # for it
    signature: Signature  # of it
    constants: tuple[tuple[int, type, Any], ...]  # position, type and value of each leaf that is no array
    settings: Any  # of JAX, under which it is traced
    at: Sequence[int]  # of each leaf that is data, its position among all
    batch: Sequence[Any]  # types of the leaves that are split
    entry: Entry  # of the ledger
    _keys: Sequence[int] = ()
    _avals: Sequence[Any] = ()
    _shardings: Sequence[Any] = ()

    @functools.cached_property
    def _pick(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        return picker([self.at[i] for i in self.signature.state])

    def like(self, leaves: Sequence[Any]) -> Known:
        """The same; from now on `fits` knows the state by these leaves."""
        keys = [k for k, x in enumerate(self._pick(leaves)) if is_keys(x)]
        state = self._arrays(leaves, keys)
        return replace(self, _keys=keys, _avals=list(map(_aval_of, state)), _shardings=list(map(sharding_of, state)))

    def _arrays(self, leaves: Sequence[Any], keys: Sequence[int]) -> Sequence[Any]:
        state = self._pick(leaves)
        if keys:
            state = list(state)
            for k in keys:
                state[k] = bits_of(state[k])
        return state

    def fits(self, leaves: Sequence[Any], batch_key: Callable[[Any], Any], settings: Any) -> bool:
        """Whether a call with leaves of the same structure is this one; looks whether types are the very same objects,
        which those of a step's results are from call to call."""
        try:
            state = self._arrays(leaves, self._keys)
            same = all(map(operator.is_, map(_aval_of, state), self._avals))
            same = same and all(map(operator.is_, map(sharding_of, state), self._shardings))
        except AttributeError:  # a leaf that is not on any device
            return False
        return (
            same
            and all(type(state[k]) is Padded for k in self.program.placed.padded)
            and self.settings == settings
            and all((type(leaves[i]), leaves[i]) == (kind, value) for i, kind, value in self.constants)
            and [batch_key(leaves[self.at[i]]) for i in self.signature.batch] == self.batch
        )

    def gone(self, leaves: Sequence[Any]) -> bool:
        """Whether another call has taken the memory of some leaf; of a call that fits."""
        return any(map(_is_deleted, self._pick(leaves))) or any(
            is_gone(leaves[self.at[i]]) for i in self.signature.batch
        )

    def arguments(self, leaves: Sequence[Any], placer: Placer) -> tuple[list[Any], list[Any]]:
        """What the program takes: the leaves of the state, and of the batch, on the mesh."""
        state, program = list(self._pick(leaves)), self.program
        for k in program.placed.padded:
            state[k] = state[k].array
        if program.donated and len(set(map(id, state))) < len(state):
            state = without_aliases(state)
        return state, placer.batch_argument([leaves[self.at[i]] for i in self.signature.batch], program.placed.batch)
