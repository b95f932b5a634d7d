"""A call whose program is known: the program, and the check that the next call is the same."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdist.agreement.calls import Rows
from jaxdist.agreement.ledger import Entry
from jaxdist.compat import bits_of, sharding_of
from jaxdist.compilation.program import Program, TraceSettings
from jaxdist.compilation.signature import Constant, Leaf, Signature, is_keys, picker
from jaxdist.ir.fingerprint import type_text
from jaxdist.placements.model.layouts import Padded
from jaxdist.step.donated import is_deleted
from jaxdist.step.leaves import TypeKey, type_key
from jaxdist.step.placer import Placer, without_aliases

_aval_of, _is_deleted = operator.attrgetter("aval"), operator.methodcaller("is_deleted")


@dataclass
class CachedCall:
    """An earlier call and its program."""

    program: Program
    constants: tuple[Constant, ...]
    settings: TraceSettings  # under which it is traced
    data_positions: Sequence[int]  # of each leaf that is data, its position among all leaves
    batch_types: Sequence[TypeKey]  # of the leaves that are split
    unmarked_rows: set[int]  # rows of the split leaves that no loader has marked, of all ranks together
    entry: Entry  # of the ledger
    sizes_compared: int = 0  # with how many sizes of batches `unmarked_rows` is compared
    is_ambiguous: bool = False  # some rank passes as many rows of a batch of a different size
    _keys: Sequence[int] = ()  # which leaves of the state are keys
    _avals: Sequence[object] = ()  # compared by identity, as the shardings
    _shardings: Sequence[object] = ()

    @property
    def signature(self) -> Signature:
        return self.program.placed.signature

    # Once for all calls: a property would look at the batch at each of them.
    @functools.cached_property
    def totals(self) -> dict[int, int]:
        """The rows of each leaf of the batch, of all ranks together."""
        return {i: self.program.placed.avals[i].shape[0] for i in self.signature.batch}

    @functools.cached_property
    def _pick_state(self) -> Callable[[Sequence[Leaf]], Sequence[Leaf]]:
        return picker([self.data_positions[i] for i in self.signature.state])

    def rows(self, leaves: Sequence[Leaf], placer: Placer) -> Rows:
        """The rows of each leaf, of this rank and of all."""
        here = tuple(map(placer.rows_if_part, leaves))
        totals = {self.data_positions[i]: total for i, total in self.totals.items()}
        of_all = placer.device_map.rows_of_all
        return Rows(here, tuple(n if n is None else totals.get(k, of_all(n)) for k, n in enumerate(here)))

    def remember(self, leaves: Sequence[Leaf]) -> None:
        """Let `fits` know the state by these leaves."""
        self._keys = [k for k, x in enumerate(self._pick_state(leaves)) if is_keys(x)]
        state = self._arrays(leaves)
        self._avals, self._shardings = list(map(_aval_of, state)), list(map(sharding_of, state))

    def _arrays(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """The leaves of the state, keys as their bits."""
        state = self._pick_state(leaves)
        if self._keys:
            state = list(state)
            for k in self._keys:
                state[k] = bits_of(state[k])
        return state

    def fits(self, leaves: Sequence[Leaf], settings: TraceSettings) -> bool:
        """Check whether a call of the same structure is this one and its arrays still exist."""
        # By the identity of types: a step's results keep theirs from call to call. Comparing the shapes, dtypes and
        # shardings of some hundred leaves would cost far more.
        try:
            state = self._arrays(leaves)
            same = all(map(operator.is_, map(_aval_of, state), self._avals))
            same = same and all(map(operator.is_, map(sharding_of, state), self._shardings))
        except AttributeError:  # a leaf that is not on any device
            return False
        # A batch is new at each call: its arrays have nothing in common with the last ones but their types.
        batch = [leaves[self.data_positions[i]] for i in self.signature.batch]
        return (
            same
            and all(type(state[k]) is Padded for k in self.program.placed.padded)
            and self.settings == settings
            and all((type(leaves[i]), leaves[i]) == (kind, value) for i, kind, value in self.constants)
            and list(map(type_key, batch)) == self.batch_types
            and not any(map(_is_deleted, self._pick_state(leaves)))  # by a different call
            and not any(map(is_deleted, batch))
        )

    def check_compiled(self, compiled: Program) -> None:
        """Refuse a call of a compiled step that it was not compiled for."""
        if self.program is compiled or self.program.is_as(compiled):
            return
        names = self.signature.names
        differs = "their structure, a constant, where the state is, the mesh that is set, or a setting of JAX"
        if names == compiled.placed.signature.names:
            pairs = zip(names, compiled.placed.avals, self.program.placed.avals, strict=True)
            texts = ((name, type_text(a.dtype, a.shape), type_text(b.dtype, b.shape)) for name, a, b in pairs)
            differs = next((f"{name}, {a} then and {b} now" for name, a, b in texts if a != b), differs)
        raise TypeError(
            f"step {compiled.name!r} was compiled for other arguments; the difference: {differs}. Lower and compile it "
            "for these, or call the step itself, which compiles a program for each"
        )

    def arguments(self, leaves: Sequence[Leaf], placer: Placer) -> tuple[list[Leaf], list[Leaf]]:
        """Return the program's arguments: the leaves of the state and of the batch, on the mesh."""
        state, program = list(self._pick_state(leaves)), self.program
        for k in program.placed.padded:
            state[k] = state[k].array
        # XLA refuses to donate one buffer twice, as of an average that is still the parameters themselves.
        if program.donated and len(set(map(id, state))) < len(state):  # rare, and cheap to see
            state = without_aliases(state)
        parts = [leaves[self.data_positions[i]] for i in self.totals]
        return state, placer.batch.place(parts, program.placed.batch, list(self.totals.values()))
