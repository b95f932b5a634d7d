"""A call that a step knows: its program, and the check that the next call is the same."""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.agreement.calls import Rows
from jaxdist.agreement.ledger import Entry
from jaxdist.compat import bits_of, sharding_of
from jaxdist.errors import DonatedError
from jaxdist.ir.fingerprint import type_text
from jaxdist.placements.layouts import Padded, physical
from jaxdist.step.batch import is_keys
from jaxdist.step.calling import Calling
from jaxdist.step.placer import Placer, type_key, without_aliases
from jaxdist.step.program import Program
from jaxdist.step.signature import Signature, leaf_name, picker

_aval_of, _is_deleted = operator.attrgetter("aval"), operator.methodcaller("is_deleted")


@dataclass
class Known:
    """An earlier call and its program."""

    program: Program  # for it
    constants: tuple[tuple[int, type, Any], ...]  # position, type and value of each leaf that is not an array
    settings: Any  # of JAX, under which it is traced
    at: Sequence[int]  # of each leaf that is data, its position among all
    batch: Sequence[Any]  # types of the leaves that are split
    untold: set[int]  # rows of those that no loader has marked, of all ranks together
    entry: Entry  # of the ledger
    compared_with: int = 0  # so many sizes of batches
    in_doubt: bool = False  # one of them is as long on some rank
    _keys: Sequence[int] = ()
    _avals: Sequence[Any] = ()
    _shardings: Sequence[Any] = ()

    @property
    def signature(self) -> Signature:
        return self.program.placed.signature

    @functools.cached_property
    def totals(self) -> dict[int, int]:
        """The rows of each leaf of the batch, of all ranks together."""
        return {i: self.program.placed.avals[i].shape[0] for i in self.signature.batch}

    @functools.cached_property
    def _pick(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        return picker([self.at[i] for i in self.signature.state])

    def rows(self, leaves: Sequence[Any], placer: Placer) -> Rows:
        """The rows of each leaf, of this rank and of all."""
        own = tuple(map(placer.part, leaves))
        of = {self.at[i]: total for i, total in self.totals.items()}
        return Rows(own, tuple(n if n is None else of.get(k, placer.everywhere(n)) for k, n in enumerate(own)))

    def remember(self, leaves: Sequence[Any]) -> None:
        """Let `fits` know the state by these leaves."""
        self._keys = [k for k, x in enumerate(self._pick(leaves)) if is_keys(x)]
        state = self._arrays(leaves)
        self._avals, self._shardings = list(map(_aval_of, state)), list(map(sharding_of, state))

    def _arrays(self, leaves: Sequence[Any]) -> Sequence[Any]:
        state = self._pick(leaves)
        if self._keys:
            state = list(state)
            for k in self._keys:
                state[k] = bits_of(state[k])
        return state

    def fits(self, leaves: Sequence[Any], settings: Any) -> bool:
        """Check whether a call of the same structure is this one and its arrays still exist."""
        # By the identity of types: a step's results keep theirs from call to call.
        try:
            state = self._arrays(leaves)
            same = all(map(operator.is_, map(_aval_of, state), self._avals))
            same = same and all(map(operator.is_, map(sharding_of, state), self._shardings))
        except AttributeError:  # a leaf that is not on any device
            return False
        batch = [leaves[self.at[i]] for i in self.signature.batch]
        return (
            same
            and all(type(state[k]) is Padded for k in self.program.placed.padded)
            and self.settings == settings
            and all((type(leaves[i]), leaves[i]) == (kind, value) for i, kind, value in self.constants)
            and list(map(type_key, batch)) == self.batch
            and not any(map(_is_deleted, self._pick(leaves)))  # by a different call
            and not any(map(is_gone, batch))
        )

    def check_compiled(self, compiled: Program) -> None:
        """Refuse a call of a compiled step that it was not compiled for."""
        if self.program is compiled:
            return
        names = self.signature.names
        differs = "their structure, a constant, where the state is, or a setting of JAX"
        if names == compiled.placed.signature.names:
            pairs = zip(names, compiled.placed.avals, self.program.placed.avals, strict=True)
            texts = ((name, type_text(a.dtype, a.shape), type_text(b.dtype, b.shape)) for name, a, b in pairs)
            differs = next((f"{name}, {a} then and {b} now" for name, a, b in texts if a != b), differs)
        raise TypeError(
            f"step {compiled.name!r} was compiled for other arguments: what differs is {differs}. Lower and compile it "
            "for these, or call the step itself, which compiles a program for each"
        )

    def arguments(self, leaves: Sequence[Any], placer: Placer) -> tuple[list[Any], list[Any]]:
        """Return the program's arguments: the leaves of the state and of the batch, on the mesh."""
        state, program = list(self._pick(leaves)), self.program
        for k in program.placed.padded:
            state[k] = state[k].array
        if program.donated and len(set(map(id, state))) < len(state):
            state = without_aliases(state)
        parts = [leaves[self.at[i]] for i in self.totals]
        return state, placer.place_batch(parts, program.placed.batch, list(self.totals.values()))


# --- memory that an earlier call has taken

# By the `Calls` of each step: its name, its latest call that took memory, and the arrays that are gone.
taken: "weakref.WeakKeyDictionary[Any, tuple[str, int, Sequence[Any]]]" = weakref.WeakKeyDictionary()


def check_there(
    step: str, calling: Calling, args: tuple[Any, ...], keywords: tuple[str, ...], leaves: Sequence[Any]
) -> None:
    """Refuse an array whose memory an earlier call has taken."""
    if not any(map(is_gone, leaves)):
        return
    path, array = next((path, x) for path, x in jax.tree_util.tree_leaves_with_path(args) if is_gone(x))
    name, array = leaf_name(calling.of(len(args), keywords), path), physical(array)
    by = [f"call {call} of step {of!r}" for of, call, gone in list(taken.values()) if any(x is array for x in gone)]
    by = by[0] if by else "an earlier call of a step or of jax.jit, or a deletion,"
    raise DonatedError(
        f"step {step!r}: {name} is gone: {by} took its memory (donate=). Go on with what that call returned, pass it a "
        "copy (jax.numpy.copy), or leave donate= out where it was given"
    )


def is_gone(x: Any) -> bool:
    """Check whether the memory of a leaf was taken or released."""
    deleted = getattr(x, "is_deleted", None)
    return deleted is not None and deleted()
