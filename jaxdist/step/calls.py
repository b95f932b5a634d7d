"""The calls of a step: one that is new to this rank is compared with the other ranks', and its state is placed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.agreement.calls import CHANGED, agree
from jaxdist.agreement.description import Description, list_ranks, unlike_the_root
from jaxdist.agreement.ledger import Entry, Ledger
from jaxdist.agreement.turns import Turns
from jaxdist.compat import trace_settings
from jaxdist.control.watchdog import ActiveCall
from jaxdist.errors import in_words
from jaxdist.ir.fingerprint import type_text
from jaxdist.placements.layouts import Layout, Padded, physical
from jaxdist.runtime.compiler import settings as of_jax
from jaxdist.runtime.context import Context
from jaxdist.step import batch, modules
from jaxdist.step.calling import Settings
from jaxdist.step.known import Known, check_there
from jaxdist.step.placer import ELSEWHERE, Placer, checksum, spans
from jaxdist.step.program import Program
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.reading import Reader
from jaxdist.step.signature import Signature, Signatures, flat

_log = logging.getLogger("jaxdist")
_names: dict[str, itertools.count[int]] = {}


class Calls:
    """The calls of one step."""

    def __init__(
        self,
        base: str,
        settings: Settings,
        context: Context,
        placer: Placer,
        cache: ProgramCache,
        reader: Reader,
        signatures: Signatures,
        announce: Callable[[Program], None],
    ):
        self.name, self.number = base, 0
        self._entered = 0  # the last call that this rank has entered for good
        self._active: ActiveCall | None = None
        self._settings, self._context, self._placer = settings, context, placer
        self._cache, self._reader, self._signatures, self._announce = cache, reader, signatures, announce
        self._ledger, self._turns = context.only(Ledger), context.only(Turns)
        self._several = context.size > 1
        self._latest: dict[Any, Known] = {}  # by structure
        self._known: dict[Any, Known] = {}
        self._agreed: set[bytes] = set()  # digests of calls that all ranks have made
        self._unsure: set[Signature] = set()  # of calls in which all ranks have passed the same batch so far
        self._announced: set[Program] = set()

    def clear(self) -> None:
        """Forget the programs of earlier calls."""
        self._latest.clear()
        self._known.clear()

    def begin(self) -> None:
        """A call begins."""
        self._turns.begin()
        if not self.number:
            count = next(_names.setdefault(self.name, itertools.count()))
            self.name += f"#{count}" * bool(count)
        self.number, self._active = self._entered + 1, None
        self._ledger.check_all_here(self.name)

    def find(self, args: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Known, Sequence[Any]]:
        """Return the known call for these arguments, and its leaves, with the state on the mesh."""
        try:
            leaves, tree = flat(args, keywords)
            known = latest = self._latest.get(tree)
            settings = trace_settings(), self._cache.looked_for
            if known is None or not known.fits(leaves, self._placer.batch_key, settings) or known.gone(leaves):
                if known is None and modules.found(args):
                    raise modules.FoundError
                check_there(self.name, self._settings.calling, args, keywords, leaves)
                known, moved = self._look_up(args, keywords, leaves, tree, settings)
            else:
                moved = ()
        except modules.FoundError:
            raise
        except Exception as error:
            clearer = self._reader.bad_constant(args, keywords)
            self.report(clearer or error)
            if clearer is None:
                raise
            raise clearer from None
        differs: dict[int, list[int]] = {}
        fresh = known is not latest and (tree, known.constants) not in self._signatures
        fresh |= self._with_bits and known.signature in self._unsure
        new = fresh or moved or known.entry.digest not in self._agreed or self._with_bits
        if self._several and (new or self._ledger.waits(known.entry)):
            differs = self._compare(known, leaves, fresh, moved)
        if fresh:
            self._signatures[tree, known.constants] = known.signature
        if moved:
            leaves = self._moved(known, leaves, moved, differs)
            known = self._known.setdefault(self._key(known.signature, known.signature.data(leaves), settings), known)
        if known is not latest:
            self._latest[tree] = known.like(leaves)
        if known.program not in self._announced:
            self._announced.add(known.program)
            self._announce(known.program)
        return known, leaves

    def _look_up(
        self, args: tuple[Any, ...], keywords: tuple[str, ...], leaves: list[Any], tree: Any, settings: Any
    ) -> tuple[Known, Sequence[int]]:
        """Look up a call by its key. Also returns the leaves of the state that have to move."""
        constants = self._signatures.constants(tree, leaves)
        signature = self._signatures.get((tree, constants))
        if signature is None:
            signature = self._reader.read(args, keywords)
            self._signatures.numbers[tree] = signature.numbers
            constants = self._signatures.constants(tree, leaves)
        data = signature.data(leaves)
        key = self._key(signature, data, settings)
        known = self._known.get(key)
        if known is None:
            self._check(signature, data)
            program = self._cache.program(signature, data)
            out = {i for i, *_ in constants}
            at = [i for i in range(len(leaves)) if i not in out]
            own = [self._placer.batch_key(data[i]) for i in signature.batch]
            entry = self._entry(signature, data, program)
            known = self._known[key] = Known(program, signature, constants, settings, at, own, entry)
        layouts = known.program.placed.layouts
        return known, [i for i in signature.state if self._placer.layout(data[i]) is not layouts[i]]

    def _key(self, signature: Signature, data: Sequence[Any], settings: Any) -> Any:
        """Return the key that selects a program."""
        placer = self._placer
        state = [(_type(data[i]), placer.layout(data[i])) for i in signature.state]
        return signature, settings, tuple(state), tuple(placer.batch_key(data[i]) for i in signature.batch)

    def _check(self, signature: Signature, data: Sequence[Any]) -> None:
        names = signature.names
        if problem := self._placer.batch_problem(signature, data):
            raise ValueError(problem)
        for i in signature.state:
            if problem := self._placer.state_problem(data[i]):
                raise ValueError(f"state leaf {names[i]} {problem}")

    # --- between ranks

    @property
    def _with_bits(self) -> bool:
        """Check whether this call compares the copies of state, which code outside of the step may have changed on
        some ranks: in the first, second, fourth, eighth, ..."""
        return self.number & (self.number - 1) == 0

    @property
    def _tag(self) -> str:
        return f"call {self._ledger.count + 1} of the job"

    def _entries(self, signature: Signature, data: Sequence[Any]) -> tuple[tuple[str, str], ...]:
        """Return the properties of a call that must be the same on all ranks."""
        entries = [*self._settings.said(), *((f"constant {name}", value) for name, value in signature.constants)]
        entries += [(f"setting {name}", value) for name, value in of_jax().items()]
        entries.append(("setting for NaN and infinity", str(self._cache.looked_for)))
        for name, is_batch, x in zip(signature.names, signature.is_batch, data, strict=True):
            if is_batch:
                entries.append((f"leaf {name}", f"{_type_of(x)} (batch)"))
                continue
            how = self._placer.layout(x)
            where = "" if how is ELSEWHERE else ", on the mesh" if how is None else f", in shards along axis {how.dims}"
            where += " in the host's memory" if isinstance(how, Layout) and how.host else ""
            entries.append((f"leaf {name}", f"{_type_of(x)} (state{where})"))
        return tuple(entries)

    def _entry(self, signature: Signature, data: Sequence[Any], program: Program) -> Entry:
        """Return the ledger's entry for a call with these leaves once they are on the mesh."""
        if not self._several:
            return Entry(b"", "")
        types = [(_type_of(x), how and str(how)) for x, how in zip(data, program.placed.layouts, strict=True)]
        said = self.name, self._settings.said(), signature.constants, signature.names, signature.is_batch, types
        digest = hashlib.blake2b(repr(said).encode(), digest_size=16)
        digest.update(program.traced.digest.encode())
        shown = [f"{signature.names[i]} {_type_of(data[i])}" for i in signature.batch[:4]]
        text = f"step {self.name!r}" + (f" with a batch of {', '.join(shown)}" if shown else "")
        if signature.constants:  # the difference must show here
            values = ", ".join(f"{name}={value}" for name, value in signature.constants)
            short = hashlib.sha256(values.encode()).hexdigest()[:8]
            text += f" and {values}" if len(values) < 200 else f" and constants (digest {short})"
        return Entry(digest.digest(), text)

    def _compare(
        self, known: Known, leaves: Sequence[Any], fresh: bool, moved: Collection[int]
    ) -> dict[int, list[int]]:
        """Compare a call that is new; the leaves that are not the same on all ranks, and the ranks where not."""
        signature, context = known.signature, self._context
        data = signature.data(leaves)
        about = Description(f"step {self.name!r}, call {self.number}", self._entries(signature, data))
        values = [_value(x, self._placer, fresh or i in moved, self._with_bits) for i, x in enumerate(data)]
        everyone = agree(context, self._tag, about, known.entry.text, known.program.traced, values)
        self._ledger.unsettled = False
        self._agreed.add(known.entry.digest)
        differs = {}
        for i, of_ranks in enumerate(zip(*everyone, strict=True)):
            if others := list(range(context.size)) if of_ranks[0] is None else unlike_the_root(of_ranks):
                differs[i] = others
        copies = [i for i in differs if self._placer.layout(data[i]) is None and not signature.is_batch[i]]
        if copies:
            raise ValueError(self._changed(signature.names[copies[0]], differs[copies[0]]))
        if fresh:
            tells = self._reader.check(signature, data, everyone, differs, context)
            (self._unsure.discard if tells else self._unsure.add)(signature)
        return differs

    def _changed(self, name: str, others: Sequence[int]) -> str:
        return (
            f"step {self.name!r}: state leaf {name} is an array of all ranks, and rank 0 and rank {list_ranks(others)} "
            f"do not hold the same. {CHANGED}"
        )

    def report(self, error: Exception) -> None:
        """The other ranks learn of an error that came before the arguments could be compared."""
        if not self._several:
            return
        about = Description(f"step {self.name!r}, call {self.number}", problem=in_words(error))
        with contextlib.suppress(ValueError):  # this rank raises its own
            agree(self._context, self._tag, about, f"step {self.name!r}, and an error: {in_words(error)}", None)

    # --- state that is not on the mesh yet

    def _moved(
        self, known: Known, leaves: Sequence[Any], moved: Sequence[int], differs: dict[int, list[int]]
    ) -> list[Any]:
        """Return the leaves, with the state where the program needs it."""
        data, layouts = known.signature.data(leaves), known.program.placed.layouts
        # Shards move between memories without a broadcast.
        taken = [i for i in moved if not isinstance(self._placer.layout(data[i]), Layout)]
        self._say_differs(known, taken, data, differs)
        placed = self._placer.place_state([data[i] for i in moved], [layouts[i] for i in moved])
        out = list(leaves)
        for i, x in zip(moved, placed, strict=True):
            out[known.at[i]] = x
        return out

    def _say_differs(
        self, known: Known, taken: Collection[int], data: Sequence[Any], differs: dict[int, list[int]]
    ) -> None:
        """Rank 0's state is used on all ranks. State that is only read must not differ; for other state, warn."""
        placed, names = known.program.placed, known.signature.names
        differs = {i: ranks for i, ranks in differs.items() if i in taken and not spans(physical(data[i]))}
        read = placed.unreturned.union(self._may_be_batch(known.signature, data))
        for i in sorted(read.intersection(differs)):
            advice = (
                "If each rank has its own part of it, it belongs to the batch: name its argument in batch_argnums. If "
                "the ranks should have the same, decorate the step that made it with jaxdist.data_parallel. "
                + batch.INDICES
            )
            shape, dtype = placed.avals[i].shape, placed.avals[i].dtype
            if not shape:
                advice = "It has no per-example axis, so every rank must pass the same value"
            if jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and shape in ((2,), (4,))):
                advice = "Use one key on all ranks: each example gets numbers of its own from it"
            raise ValueError(
                f"step {self.name!r}: state leaf {names[i]} is not the same on rank 0 and rank "
                f"{list_ranks(differs[i])}. {advice}"
            )
        differ = sorted(differs)
        if differ and self._context.is_root:
            also = f" (and {len(differ) - 1} other leaves)" if len(differ) > 1 else ""
            _log.warning(
                "step %r: state leaf %s%s is not the same on rank 0 and rank %s: all continue with rank 0's value",
                self.name, names[differ[0]], also, list_ranks(differs[differ[0]]),
            )  # fmt: skip

    def _may_be_batch(self, signature: Signature, data: Sequence[Any]) -> set[int]:
        """Leaves of the state that could as well be the batch, since all arrays of their argument have one length."""
        if self._settings.batch is not None:
            return set()
        lengths = [(at, set(batch.sizes([data[i] for i in at])) - {None}) for _, at, _ in signature.arguments]
        return {i for at, own in lengths if len(own) == 1 for i in at}

    # --- the call itself

    def enter(self, known: Known) -> None:
        """The program is about to run: nothing stops this rank from its collectives."""
        if self._several:
            self._ledger.enter(known.entry)
            self._active = self._context.watchdog.enter(f"step {self.name!r}, call {self.number}")
        self._entered = self.number

    def failed(self, error: BaseException) -> None:
        """The call has ended with an error."""
        if self._active is not None:
            self._active.finish(None, type(error).__name__)
        if self._several:
            self._ledger.failed(error)
        self._context.control.process.stay_if_ending()  # a rank that left may be its cause

    def returned(self, result: object) -> None:
        """The program has returned, and may still run."""
        if self._several:
            assert self._active is not None
            self._active.finish(result)
            self._turns.dispatched(self._active.output)


def _type(x: Any) -> Any:
    return (x.shape, x.dtype, getattr(x, "weak_type", None)) if hasattr(x, "shape") else type(x)


def _dtype_of(x: Any) -> Any:
    # The dtype after conversion: with jax_enable_x64 on one rank alone, NumPy's float64 differs between ranks.
    return (
        jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True) if hasattr(x, "dtype") else type(x).__name__
    )


def _type_of(x: Any) -> str:
    return type_text(_dtype_of(x), np.shape(x)) + (f" of {x.total} in all" if isinstance(x, batch.BatchPart) else "")


def _value(x: Any, placer: Placer, own: bool, copies: bool) -> int | None:
    """Return the checksum of a leaf, or None if it is in parts on several processes."""
    if type(x) is not Padded and not spans(x):
        return checksum(x) if own else 0
    if placer.layout(x) is not None:
        return None
    return checksum(physical(x).addressable_data(0)) if copies else 0
