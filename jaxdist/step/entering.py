"""How the ranks enter a call that is new to them: what each comes with is compared, the root's state is everyone's."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.agreement import copies
from jaxdist.agreement.calls import ORIGIN, Agreement, StepCall
from jaxdist.agreement.copies import CHANGED, Copies, Results
from jaxdist.agreement.description import list_ranks, unlike_the_root
from jaxdist.errors import in_words
from jaxdist.ir.fingerprint import type_text
from jaxdist.placements.layouts import Layout, physical
from jaxdist.runtime.compiler import settings as of_jax
from jaxdist.runtime.context import Context
from jaxdist.step import batch
from jaxdist.step.batch import INDICES, BatchPart
from jaxdist.step.placer import ELSEWHERE, Placer, checksum, spans
from jaxdist.step.program import Program
from jaxdist.step.settings import Settings
from jaxdist.step.signature import Signature

_log = logging.getLogger("jaxdist")
ORIGINS = 64
"""Places that the state of a kind of call came from, which a rank remembers."""

_OFTEN = 32
"""Where each call comes with state from outside of steps, it is compared in one of so many, at least."""


class Entering:
    """Compares over the ranks how they enter the calls of one step.

    Args:
      name: of the step.
      context: the job.
      placer: onto the step's devices.
      settings: of the step.
      results: of the step; None: there is one process.

    Attributes:
      unsure: the call in progress has state that may differ between the ranks, and so may what it returns.
      origins: of the state of the call in progress.
    """

    def __init__(self, name: str, context: Context, placer: Placer, settings: Settings, results: Results | None):
        self._name, self._context, self._placer = name, context, placer
        self._options, self._declared = settings.said(), settings.batch is not None
        self._agreement, self._results = context.only(Agreement), results
        self.origins: Sequence[int] = ()
        self.unsure = False
        self._thinned: dict[Sequence[int], tuple[int, int]] = {}  # by origins: times, the call compared last

    def outside(self, signature: Signature, leaves: Sequence[Any]) -> Sequence[int]:
        """State of all ranks that comes from no decorated step, and is to be compared in this call.

        Where calls bring such state again and again (an update outside of the step) that is in the first, second,
        fourth, eighth and sixteenth of them, and then once in 32 calls: copies that differ go on to differ.

        Args:
          signature: of the call.
          leaves: of its arguments.
        """
        if self._results is None:
            return ()
        state = signature.pick_state(leaves)
        self.origins, unknown = self._results.origins(state)
        found = [signature.state[k] for k in unknown]
        self.unsure = False
        if found:
            n, latest = self._thinned.get(self.origins, (0, 0))
            n, now = n + 1, self._results.calls
            self.unsure = n & (n - 1) > 0 and now - latest < _OFTEN
            if len(self._thinned) >= ORIGINS:
                self._thinned.clear()
            self._thinned[self.origins] = n, latest if self.unsure else now
        return () if self.unsure else found

    def returned(self, result: Any) -> None:
        """The call has returned this."""
        if self.unsure and self._results is not None:
            self._results.forget(jax.tree.leaves(result))

    def place(self, program: Program, leaves: list[Any], call: int, differs: dict[int, list[int]] | None) -> None:
        """Bring the state's leaves to where `program` takes them; `differs`: what `Reader.compare` returned."""
        elsewhere = [i for i in program.signature.state if self._placer.layout(leaves[i]) is not program.layouts[i]]
        if not elsewhere:
            return
        # What is in shards goes to another memory as it is.
        taken = [i for i in elsewhere if not isinstance(self._placer.layout(leaves[i]), Layout)]
        self._compare(program, taken, leaves, call, differs)
        placed = self._placer.place_state([leaves[i] for i in elsewhere], [program.layouts[i] for i in elsewhere])
        for i, x in zip(elsewhere, placed, strict=True):
            leaves[i] = x

    def _compare(
        self,
        program: Program,
        elsewhere: Sequence[int],
        leaves: Sequence[Any],
        call: int,
        differs: dict[int, list[int]] | None,
    ) -> None:
        """The root's state is everyone's: what the step only reads must be the same everywhere, and else it is said."""
        context = self._context
        read, names = program.unreturned().union(self._may_be_batch(program, leaves)), program.signature.names
        if context.size == 1 or not elsewhere:
            return
        if differs is None:
            tag = f"state of step {self._name}, call {call}"
            mine = {i: checksum(leaves[i]) for i in sorted(elsewhere)}
            everyone = context.control.exchange(tag, mine, context.timeout)
            values = {i: [theirs.get(i) for theirs in everyone] for i in everyone[0]}
            differs = {i: others for i, each in values.items() if (others := unlike_the_root(each))}
        differs = {i: ranks for i, ranks in differs.items() if not spans(leaves[i])}  # such an array is one for all
        for i in sorted(read.intersection(elsewhere, differs)):
            advice = (
                "If each rank has its own part of it, it belongs to the batch: name its argument in batch_argnums. If "
                "the ranks should have the same, decorate the step that made it with jaxdist.data_parallel. " + INDICES
            )
            if not program.types[i][0]:
                advice = "It has no entry an example, so it is one for all: pass the same on every rank"
            shape, dtype, *_ = program.types[i]
            if jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and shape in ((2,), (4,))):
                advice = "Use one key on all ranks: each example gets numbers of its own from it"
            raise ValueError(
                f"step {self._name!r}: state leaf {names[i]} is not the same on rank 0 and rank "
                f"{list_ranks(differs[i])}. {advice}"
            )
        differ = [i for i in elsewhere if i in differs]
        if differ and context.is_root:
            also = f" (and {len(differ) - 1} other leaves)" if len(differ) > 1 else ""
            _log.warning(
                "step %r: state leaf %s%s is not the same on rank 0 and rank %s: all continue with that of rank 0",
                self._name, names[differ[0]], also, list_ranks(differs[differ[0]]),
            )  # fmt: skip

    def _may_be_batch(self, program: Program, leaves: Sequence[Any]) -> set[int]:
        """Leaves of the state that could as well be the batch, since all arrays of their argument have one length."""
        if self._declared:
            return set()
        lengths = [(at, set(batch.sizes([leaves[i] for i in at])) - {None}) for _, at, _ in program.signature.arguments]
        return {i for at, own in lengths if len(own) == 1 for i in at}

    def kind_of_call(self, signature: Signature, batch: Sequence[Any]) -> StepCall:
        names = [signature.names[i] for i in signature.batch]
        return StepCall(self._name, tuple(zip(names, map(self._type_of_part, batch), strict=True)), signature.constants)

    def _type_of_part(self, x: Any) -> str:
        """The type of a leaf of the batch, of a lane where ranks hold several numbers of them."""
        several = self._context.communicator == "lanes" and self._context.size > 1
        if not several or spans(physical(x)) or not np.ndim(x):
            return _type_of(x)
        rows, own = np.shape(x)[0], len(self._placer.own)
        if rows % own:
            return f"{_type_of(x)} for {own} lanes"
        total = f" of {x.total} in all" if isinstance(x, BatchPart) else ""
        return f"{type_text(_dtype_of(x), (rows // own, *np.shape(x)[1:]))} a lane{total}"

    def agree(
        self,
        signature: Signature,
        leaves: Sequence[Any],
        batch: Sequence[Any],
        outside: Sequence[int] | None = None,
    ) -> StepCall:
        """Compare what this rank comes with and what the others do.

        Args:
          signature: of the call.
          leaves: of its arguments.
          batch: those that are split.
          outside: what `outside` returned; None: it was not asked yet.
        """
        names = [signature.names[i] for i in signature.batch]
        problem = self._placer.batch_problem(names, batch)
        entries = [*self._options]
        entries += [*((f"constant {name}", value) for name, value in signature.constants)]
        entries += [(f"setting {name}", value) for name, value in of_jax().items()]
        for name, is_batch, x in zip(signature.names, signature.is_batch, leaves, strict=True):
            if is_batch:
                entries.append((f"leaf {name}", f"{self._type_of_part(x)} (batch)"))
                continue
            how = self._placer.layout(x)
            where = "" if how is ELSEWHERE else ", on the mesh" if how is None else f", in shards along axis {how.dims}"
            where += " in the host's memory" if isinstance(how, Layout) and how.host else ""
            entries.append((f"leaf {name}", f"{_type_of(x)} (state{where})"))
            if not problem and (found := self._placer.state_problem(x)):
                problem = f"state leaf {name} {found}"
        what, more, known = self.kind_of_call(signature, batch), "", self._context.only(Copies)
        if outside is not None:  # () are the origins of what the call before returned
            follows = itertools.repeat("what the call before returned")
            words = map(known.in_words, self.origins) if self.origins else follows
            named = [(signature.names[i], text) for i, text in zip(signature.state, words, strict=False)]
            entries += [(f"{ORIGIN}{name}", text) for name, text in named]
            shown = ", ".join(f"{name} ({text})" for name, text in named[:2])
            more = f" and with state of another origin: {shown}" if self.origins else ""
        self._agreement.check(what, tuple(entries), problem, more)
        if outside:
            self._compare_copies({signature.names[i]: copies.checksum(leaves[i]) for i in outside})
            known.add(leaves[i] for i in outside)
        return what

    def _compare_copies(self, mine: dict[str, int]) -> None:
        everyone = self._context.control.exchange(f"copies for step {self._name}", mine, self._context.timeout)
        for name in dict.fromkeys(name for own in everyone for name in own):
            if others := unlike_the_root([own.get(name) for own in everyone]):
                self._thinned.clear()
                raise ValueError(
                    f"step {self._name!r}: state leaf {name} is an array of all ranks, and rank 0 and rank "
                    f"{list_ranks(others)} do not hold the same. {CHANGED}"
                )

    def report(self, error: Exception) -> None:
        """The other ranks learn of an error that came before the arguments could be compared."""
        if self._context.size > 1:
            with contextlib.suppress(ValueError):  # this rank raises its own
                self._agreement.check(StepCall(self._name), problem=in_words(error))


def _dtype_of(x: Any) -> Any:
    # As it travels: with jax_enable_x64 on one rank alone float64 of NumPy is not the same everywhere.
    return (
        jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True) if hasattr(x, "dtype") else type(x).__name__
    )


def _type_of(x: Any) -> str:
    return type_text(_dtype_of(x), np.shape(x)) + (f" of {x.total} in all" if isinstance(x, BatchPart) else "")
