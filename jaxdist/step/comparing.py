"""The comparison of a step's calls between ranks, before any of them sends anything else."""

import contextlib
import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxdist.agreement.calls import CHANGED, Rows, agree
from jaxdist.agreement.description import Description, list_ranks, unlike_the_root
from jaxdist.agreement.ledger import Entry, Ledger
from jaxdist.compilation.calling import Settings
from jaxdist.compilation.program import Program, ProgramCache
from jaxdist.compilation.signature import Leaf, Signature
from jaxdist.device_map import same_rows_somewhere
from jaxdist.errors import in_words
from jaxdist.runtime.context import divides
from jaxdist.step.cached_call import CachedCall
from jaxdist.step.placer import CurrentLayout, Placer
from jaxdist.step.records import Entries, checksum_of, entries_of, ledger_entry
from jaxdist.step.values import DifferingRanks, ValueCheck


class CallName(NamedTuple):
    """The name of a call, the same on every rank."""

    step: str
    number: int  # of the step's calls, from 1

    def __str__(self) -> str:
        return f"step {self.step!r}, call {self.number}"

    @property
    def compares_copies(self) -> bool:
        """Check whether this call compares the copies of state, which code of some ranks may have changed."""
        # At calls 1, 2, 4, 8, ...: checksums take time, and what changes a copy mostly does so at each call.
        return self.number & (self.number - 1) == 0


class CallComparison:
    """What the ranks of a job compare of one step's calls. With one rank nothing is compared."""

    def __init__(self, settings: Settings, placer: Placer, cache: ProgramCache, ledger: Ledger, values: ValueCheck):
        self._settings, self._placer, self._cache = settings, placer, cache
        self._ledger, self._values, self._context = ledger, values, placer.context
        self._several = placer.context.size > 1
        self._compared: set[bytes] = set()  # digests of calls that all ranks have made
        self._unconfirmed: set[Signature] = set()  # of calls in which all ranks have passed the same batch so far

    def entry(self, step: str, signature: Signature, data: Sequence[Leaf], program: Program) -> Entry:
        """Return the ledger's entry of a call with these leaves."""
        if not self._several:
            return Entry(b"", "")
        entries = self._entries(signature, data, program.placed.layouts)
        return ledger_entry(step, signature, data, entries, program, self._placer)

    def __call__(
        self,
        name: CallName,
        cached: CachedCall,
        leaves: Sequence[Leaf],
        misplaced: Collection[int],
        is_new: bool,
        rows: Rows | None,
    ) -> DifferingRanks:
        """Compare a call with the other ranks', if one of them may not expect it.

        Args:
          name: of the call.
          cached: what this rank has found for it.
          leaves: the leaves of its arguments.
          misplaced: leaves of the state, among the data, that are not where the program wants them.
          is_new: its structure is new to this rank, so what the leaves hold is compared as well.
          rows: the rows of its leaves, if they have been counted.
        """
        if not self._several:
            return {}
        is_new |= name.compares_copies and cached.signature in self._unconfirmed
        if not (is_new or misplaced or self._may_surprise(name, cached)):
            return {}  # `misplaced`: rank 0's state is sent to all, which takes all
        signature, context, placer = cached.signature, self._context, self._placer
        rows = rows or cached.rows(leaves, placer)
        data = signature.data(placer.parted(leaves, rows))
        entries = self._entries(signature, data, list(map(placer.layout, data)))
        about = Description(str(name), tuple(entries))
        checksums = [checksum_of(x, placer, is_new or i in misplaced, name.compares_copies) for i, x in enumerate(data)]
        program, sharers = cached.program.traced, placer.device_map.sharers
        by_rank = agree(context, self._tag, about, cached.entry.text, program, checksums, rows, sharers)
        self._compared.add(cached.entry.digest)
        # From here on `Calls._total` knows these sizes: by them a rank tells from its own rows how many all ranks pass.
        divides(context, *sorted(cached.unmarked_rows))
        differs: DifferingRanks = {}
        for i, of_ranks in enumerate(zip(*by_rank, strict=True)):
            if others := list(range(context.size)) if of_ranks[0] is None else unlike_the_root(of_ranks):
                differs[i] = others
        copies = [i for i in differs if placer.layout(data[i]) is None and not signature.is_batch[i]]
        if copies:
            raise ValueError(
                f"step {name.step!r}: state leaf {signature.names[copies[0]]} is an array of all ranks, and rank 0 and "
                f"rank {list_ranks(differs[copies[0]])} do not hold the same. {CHANGED}"
            )
        if is_new:
            confirmed = self._values.check(signature, data, by_rank, differs)
            (self._unconfirmed.discard if confirmed else self._unconfirmed.add)(signature)
        return differs

    def report(self, name: CallName, error: Exception, rows: Rows | None = None) -> None:
        """The other ranks learn of an error that came before the arguments could be compared.

        Raises `OtherRows` if it may be due to rows that this rank assumed wrongly: the caller then tries again.
        """
        if not self._several:
            return
        # Without this they would wait, in the comparison of the same call, until the time is out.
        about = Description(str(name), problem=in_words(error))
        with contextlib.suppress(ValueError):  # this rank raises its own
            text = f"step {name.step!r}, and an error: {in_words(error)}"
            agree(self._context, self._tag, about, text, None, (), rows, self._placer.device_map.sharers)

    def of_verify(
        self,
        name: CallName,
        signature: Signature,
        data: Sequence[Leaf],
        options: Entries,
        program: Program,
        rows: Rows,
    ) -> None:
        """Raise the same error on every rank unless all verify the same program in the same way."""
        if not self._several:
            return
        entries = self._entries(signature, data, list(map(self._placer.layout, data)))
        about = Description(f"verify step {name.step!r}", (*entries, *options))
        sharers = self._placer.device_map.sharers
        agree(self._context, self._tag, about, about.call, program.traced, (), rows, sharers)

    @property
    def _tag(self) -> str:
        return f"call {self._ledger.count + 1} of the job"

    def _entries(self, signature: Signature, data: Sequence[Leaf], layouts: Sequence[CurrentLayout]) -> Entries:
        return entries_of(signature, data, layouts, self._settings, self._cache.looked_for, self._placer)

    def _may_surprise(self, name: CallName, cached: CachedCall) -> bool:
        """Check whether some rank may not expect a call, though its structure is known and its state in place."""
        return (
            cached.entry.digest not in self._compared  # its types are new
            or name.compares_copies
            or self._is_ambiguous(cached)  # a rank may have read its rows as a batch of a different size
            or self._ledger.waits(cached.entry)  # a rank asks, or the order of calls is a new one
        )

    def _is_ambiguous(self, cached: CachedCall) -> bool:
        """Check whether some rank passes as many rows of another batch as of this one. Every rank finds the same."""
        divided = self._context.divided
        if cached.sizes_compared != len(divided):
            pairs = itertools.product(cached.unmarked_rows, divided)
            cached.is_ambiguous = any(same_rows_somewhere(self._placer.device_map, *pair) for pair in pairs)
            cached.sizes_compared = len(divided)
        return cached.is_ambiguous
