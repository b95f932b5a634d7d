"""The calls of a step: one that is new to this rank is compared with the other ranks', and its state is placed."""

import contextlib
import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.agreement import sync
from jaxdist.agreement.calls import CHANGED, OtherRows, Rows, agree
from jaxdist.agreement.description import Description, list_ranks, unlike_the_root
from jaxdist.agreement.ledger import Entry, Ledger
from jaxdist.agreement.meshes import connect
from jaxdist.compat import trace_settings
from jaxdist.errors import in_words
from jaxdist.ir.fingerprint import checksum, on_host, type_text
from jaxdist.mesh import alike
from jaxdist.placements import report
from jaxdist.placements.layouts import Layout, Padded, physical
from jaxdist.runtime.compiler import settings as of_jax
from jaxdist.runtime.context import Context, divides, machine_of
from jaxdist.step import batch, finite, modules
from jaxdist.step.calling import Settings
from jaxdist.step.known import Known, check_there, taken
from jaxdist.step.placer import ELSEWHERE, Placer, spans, type_key
from jaxdist.step.program import Program, ProgramCache
from jaxdist.step.reading import Reader
from jaxdist.step.signature import Signature, flat
from jaxdist.step.tracing import say_once


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]  # in the order of the parameters
    keywords: tuple[str, ...]  # names of the last ones, which go by keyword
    leaves: Sequence[Any]  # of `args`
    tree: Any  # their structure


_log = logging.getLogger("jaxdist")
_names: "dict[str, itertools.count[int]]" = {}


class Calls:
    """The calls of one step on one mesh."""

    def __init__(self, base: str, settings: Settings, context: Context, mesh: Mesh, passed: Mesh | None = None):
        connect(context, mesh)
        self.name, self.number = base, 0
        self._entered = 0  # the last call that this rank has entered for good
        self._settings, self.context, self.mesh = settings, context, mesh
        self.placer = Placer(context, mesh, passed)
        self.cache = ProgramCache(settings, mesh, machine_of(mesh), self.placer, context.rules or context.communicator)
        self.reader = Reader(base, settings, self.placer, self.cache)
        self._ledger = context.only(Ledger)
        self._several = context.size > 1
        self._latest: dict[Any, Known] = {}  # by structure
        self._known: dict[Any, Known] = {}  # by all that a program is for
        self._compared: set[bytes] = set()  # digests of calls that all ranks have made
        self._unsure: set[Signature] = set()  # of calls in which all ranks have passed the same batch so far
        self._first = True  # no program yet
        self._warned = False  # of what is gathered

    def clear(self) -> None:
        """Forget the programs of earlier calls."""
        self.cache.clear()
        self._latest.clear()
        self._known.clear()

    def run(self, args: tuple[Any, ...], keywords: tuple[str, ...], only: tuple[Program, Program] | None = None) -> Any:
        """The result of a call: its program, known or new, on its arguments, once they are on the mesh.

        `only` is the program that it must be, and the one to run in its place.
        """
        self._ledger.begin()
        if not self.number:
            count = next(_names.setdefault(self.name, itertools.count()))
            self.name += f"#{count}" * bool(count)
        self.number = self._entered + 1
        self._ledger.check_all_here(self.name)
        objects = None
        try:
            leaves, tree = flat(args, keywords)
            if tree not in self._latest and modules.found(args):
                args, objects = modules.split(args)
                leaves, tree = flat(args, keywords)
        except Exception as error:
            self._report(error)
            raise
        arguments, compiled = Arguments(args, keywords, leaves, tree), only and only[0]
        known, total = None, None
        while known is None:  # once, or twice where the ranks do not pass the rows that some rank assumed
            try:
                known, leaves = self._agreed(arguments, compiled, total)
            except OtherRows as other:
                total = other.total
        if only is not None:
            known = dataclasses.replace(known, program=only[1])
        state, batch = known.arguments(leaves, self.placer)
        result, found = self._call(known, state, batch)
        program, name, call = known.program, self.name, self.number
        if program.donated:
            taken[self] = name, call, (gone := program.taken(state))
            if program.virtual:  # where NumPy looks at one device's part JAX keeps it, and would crash on the others
                for x in gone:
                    x.delete()
        if found is not None:
            kinds = (not self._settings.check_finite and self.cache.looked_for) or (True, True)
            finite.examine(program.placed.step.checked, found, self.mesh, f"step {name!r}, call {call}: ", kinds)
        if self._settings.check_every and call % self._settings.check_every == 0:
            sync.compare(self.context, result, f"check of {name} call {call}", f"step {name!r}, call {call}: result")
        return result if objects is None else modules.update(objects, result)

    def _agreed(
        self, arguments: Arguments, compiled: Program | None, total: Sequence[int | None] | None = None
    ) -> tuple[Known, Sequence[Any]]:
        """Return the call for these arguments, on which all ranks agree, and its leaves, with the state on the mesh.

        `total` has the rows of each leaf on all ranks, once they have told each other.
        """
        leaves, tree, rows = arguments.leaves, arguments.tree, None
        settings, latest = (trace_settings(), self.cache.looked_for), self._latest.get(tree)
        try:
            if total is None and latest is not None and latest.fits(leaves, settings):
                known, moved = latest, None
            else:
                rows = self._rows(leaves, total)
                known, moved = self._look_up(arguments, rows, settings)
            if compiled is not None:
                known.check_compiled(compiled)
        except Exception as error:
            self._report(error, rows)
            raise
        return known, self._settled(known, arguments, moved, rows)

    def _call(self, known: Known, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        """Run the program. From here on nothing stops this rank from its collectives."""
        if not self._several:
            self._entered = self.number
            return known.program(state, batch)
        self._ledger.enter(known.entry)
        active = self.context.watchdog.enter(f"step {self.name!r}, call {self.number}")
        self._entered = self.number
        try:
            result, found = known.program(state, batch)
        except BaseException as error:
            active.finish(None, type(error).__name__)
            self.context.control.stay_if_ending()  # a rank that left may be its cause
            raise
        active.finish(result)
        self._ledger.output = active.output
        return result, found

    def read(self, arguments: Arguments, rows: Rows | None = None) -> tuple[Signature, list[Any]]:
        """Return the signature of a call, and its data: each part of the batch with the rows of all ranks."""
        args, keywords, leaves, tree = arguments
        parted = self.placer.parted(leaves, rows or self._rows(leaves))
        signature = self.reader.signature(args, keywords, parted, tree)
        pairs = zip(signature.is_batch, signature.data(parted), signature.data(leaves), strict=True)
        return signature, [part if is_batch else x for is_batch, part, x in pairs]

    def _rows(self, leaves: Sequence[Any], total: Sequence[int | None] | None = None) -> Rows:
        """Return the rows of each leaf, of this rank and of all: `total`, or as far as this rank knows."""
        own = tuple(map(self.placer.part, leaves))
        return Rows(own, tuple(total or map(self._total, leaves, own)))

    def _total(self, x: Any, own: int | None) -> int | None:
        if own is None:
            return None
        of_loader = x.total if isinstance(x, batch.BatchPart) else None
        known = [n for n in (of_loader and [of_loader]) or self.context.divided if self.placer.own_rows(n) == own]
        return known[-1] if known else self.placer.everywhere(own)

    def _in_doubt(self, known: Known) -> bool:
        """Check whether some rank passes as many rows of another batch as of this one. Every rank finds the same."""
        divided = self.context.divided
        if self._several and known.compared_with != len(divided):
            pairs = itertools.product(known.untold, divided)
            known.in_doubt = any(alike(n, other, self.placer.shared) for n, other in pairs)
            known.compared_with = len(divided)
        return known.in_doubt

    def _look_up(self, arguments: Arguments, rows: Rows, settings: Any) -> tuple[Known, Sequence[int]]:
        """Return the call for these arguments, and the leaves of the state that must move."""
        args, keywords, leaves, tree = arguments
        check_there(self.name, self._settings.calling, args, keywords, leaves)
        signature, data = self.read(arguments, rows)
        parts = [type_key(data[i]) for i in signature.batch]
        kept = [(type_key(data[i]), self.placer.layout(data[i])) for i in signature.state]
        key = signature, settings, *parts, *kept
        known = self._known.get(key)
        if known is None:
            self.placer.check(signature, data)
            program, constants = self.cache.program(signature, data), self.reader.constants(tree, leaves)
            out = {i for i, *_ in constants}
            at = [i for i in range(len(leaves)) if i not in out]
            own = [type_key(leaves[at[i]]) for i in signature.batch]
            untold = {
                program.placed.avals[i].shape[0] for i in signature.batch
                if rows.own[at[i]] is not None and getattr(leaves[at[i]], "total", None) is None
            }  # fmt: skip
            known = Known(program, constants, settings, at, own, untold, self._entry(signature, data, program))
            self._known[key] = known
            self.announce(program)
        layouts = known.program.placed.layouts
        return known, [i for i, (_, how) in zip(signature.state, kept, strict=True) if how is not layouts[i]]

    def _settled(
        self, known: Known, arguments: Arguments, moved: Sequence[int] | None, rows: Rows | None
    ) -> Sequence[Any]:
        """Return the leaves of a call on which all ranks agree, with the state on the mesh."""
        leaves, tree = arguments.leaves, arguments.tree
        fresh = moved is not None and (tree, known.constants) not in self.reader.signatures
        differs: dict[int, list[int]] = {}
        if self._several:
            fresh |= self._with_bits and known.signature in self._unsure
            new = fresh or moved or known.entry.digest not in self._compared or self._with_bits
            if new or self._in_doubt(known) or self._ledger.waits(known.entry):
                differs = self._compare(known, leaves, fresh, moved or (), rows)
        if moved is not None:
            self.reader.signatures[tree, known.constants] = known.signature
            leaves = self._moved(known, leaves, moved, differs) if moved else leaves
            known.remember(leaves)
            self._latest[tree] = known
        return leaves

    def announce(self, made: Program) -> None:
        """Warn about slow parts of a program, once."""
        placed, first, self._first = made.placed.emitted[1], self._first, False
        if not placed or not self.context.is_root or self._warned:
            return
        if first and (text := made.placed.padding()):
            say_once(f"step {self.reader.name!r}: {text}")
        if text := report.warning(placed) or (self._settings.batch_argnums is None and made.placed.unsplit()):
            self._warned = True  # and once of a step that is decorated anew, in a loop or for each trial
            say_once(f"step {self.reader.name!r}: {text}")

    # --- between ranks

    @property
    def _with_bits(self) -> bool:
        """Check whether this call compares the copies of state, which code of some ranks may have changed."""
        return self.number & (self.number - 1) == 0

    @property
    def _tag(self) -> str:
        return f"call {self._ledger.count + 1} of the job"

    def _entries(self, signature: Signature, data: Sequence[Any], layouts: Sequence[Any]) -> list[tuple[str, str]]:
        """Return the properties of a call with these leaves, kept so, that must be the same on all ranks."""
        entries = [*self._settings.said(), *((f"constant {name}", value) for name, value in signature.constants)]
        entries += [(f"setting {name}", value) for name, value in of_jax().items()]
        entries.append(("setting for NaN and infinity", str(self.cache.looked_for)))
        for name, is_batch, x, how in zip(signature.names, signature.is_batch, data, layouts, strict=True):
            if is_batch:
                entries.append((f"leaf {name}", f"{_type_of(x, self.placer.logical_batch(x).shape)} (batch)"))
                continue
            where = "" if how is ELSEWHERE else ", on the mesh" if how is None else f", in shards along axis {how.dims}"
            where += " in the host's memory" if isinstance(how, Layout) and how.host else ""
            entries.append((f"leaf {name}", f"{_type_of(x, np.shape(x))} (state{where})"))
        return entries

    def _entry(self, signature: Signature, data: Sequence[Any], program: Program) -> Entry:
        """Return the ledger's entry for a call with these leaves once they are on the mesh."""
        if not self._several:
            return Entry(b"", "")
        said = self.name, self._entries(signature, data, program.placed.layouts), program.traced.digest
        digest = hashlib.blake2b(repr(said).encode(), digest_size=16).digest()
        logical = self.placer.logical_batch
        shown = [f"{signature.names[i]} {_type_of(data[i], logical(data[i]).shape)}" for i in signature.batch[:4]]
        text = f"step {self.name!r}" + (f" with a batch of {', '.join(shown)}" if shown else "")
        if signature.constants:  # the difference must show here
            values = ", ".join(f"{name}={value}" for name, value in signature.constants)
            short = hashlib.sha256(values.encode()).hexdigest()[:8]
            text += f" and {values}" if len(values) < 200 else f" and constants (digest {short})"
        return Entry(digest, text)

    def _compare(
        self, known: Known, leaves: Sequence[Any], fresh: bool, moved: Collection[int], rows: Rows | None
    ) -> dict[int, list[int]]:
        """Compare a call that is new; the leaves that are not the same on all ranks, and the ranks where not."""
        signature, context = known.signature, self.context
        rows = rows or known.rows(leaves, self.placer)
        data = signature.data(self.placer.parted(leaves, rows))
        entries = tuple(self._entries(signature, data, list(map(self.placer.layout, data))))
        about = Description(f"step {self.name!r}, call {self.number}", entries)
        values = [_value(x, self.placer, fresh or i in moved, self._with_bits) for i, x in enumerate(data)]
        program, readers = known.program.traced, self.placer.readers
        everyone = agree(context, self._tag, about, known.entry.text, program, values, rows, readers)
        self._compared.add(known.entry.digest)
        divides(context, *sorted(known.untold))
        differs = {}
        for i, of_ranks in enumerate(zip(*everyone, strict=True)):
            if others := list(range(context.size)) if of_ranks[0] is None else unlike_the_root(of_ranks):
                differs[i] = others
        copies = [i for i in differs if self.placer.layout(data[i]) is None and not signature.is_batch[i]]
        if copies:
            raise ValueError(
                f"step {self.name!r}: state leaf {signature.names[copies[0]]} is an array of all ranks, and rank 0 and "
                f"rank {list_ranks(differs[copies[0]])} do not hold the same. {CHANGED}"
            )
        if fresh:
            tells = self.reader.check(signature, data, everyone, differs)
            (self._unsure.discard if tells else self._unsure.add)(signature)
        return differs

    def _report(self, error: Exception, rows: Rows | None = None) -> None:
        """The other ranks learn of an error that came before the arguments could be compared."""
        if not self._several:
            return
        about = Description(f"step {self.name!r}, call {self.number}", problem=in_words(error))
        with contextlib.suppress(ValueError):  # this rank raises its own
            text = f"step {self.name!r}, and an error: {in_words(error)}"
            agree(self.context, self._tag, about, text, None, (), rows, self.placer.readers)

    # --- state that is not on the mesh yet

    def _moved(
        self, known: Known, leaves: Sequence[Any], moved: Sequence[int], differs: dict[int, list[int]]
    ) -> list[Any]:
        """Return the leaves, with the state where the program needs it."""
        data, layouts = known.signature.data(leaves), known.program.placed.layouts
        # Shards move between memories without a broadcast.
        broadcast = [i for i in moved if not isinstance(self.placer.layout(data[i]), Layout)]
        differs = {i: differs[i] for i in broadcast if i in differs and not spans(physical(data[i]))}
        self._say_differs(known, data, differs)
        placed = self.placer.place_state([data[i] for i in moved], [layouts[i] for i in moved])
        out = list(leaves)
        for i, x in zip(moved, placed, strict=True):
            out[known.at[i]] = x
        return out

    def _say_differs(self, known: Known, data: Sequence[Any], differs: dict[int, list[int]]) -> None:
        """Rank 0's state is used on all ranks. State that is only read must not differ; for other state, warn."""
        placed, names = known.program.placed, known.signature.names
        read = set(placed.unreturned)
        for _, at, _ in known.signature.arguments if self._settings.batch_argnums is None else ():
            if len(set(batch.sizes([data[i] for i in at])) - {None}) == 1:  # it could as well be the batch
                read.update(at)
        for i in sorted(read.intersection(differs)):
            raise ValueError(
                f"step {self.name!r}: state leaf {names[i]} is not the same on rank 0 and rank "
                f"{list_ranks(differs[i])}. If each rank has its own part of it, it belongs to the batch: name its "
                "argument in batch_argnums. If the ranks should have the same (a number, or a key, from which each "
                "example gets numbers of its own), pass it, or decorate the step that made it with "
                f"jaxdist.data_parallel. {batch.INDICES}"
            )
        differ = sorted(differs)
        if differ and self.context.is_root:
            also = f" (and {len(differ) - 1} other leaves)" if len(differ) > 1 else ""
            _log.warning(
                "step %r: state leaf %s%s is not the same on rank 0 and rank %s: all continue with rank 0's value",
                self.name, names[differ[0]], also, list_ranks(differs[differ[0]]),
            )  # fmt: skip


def _type_of(x: Any, shape: tuple[int, ...]) -> str:
    own = type(x).__name__
    if hasattr(x, "dtype"):  # with jax_enable_x64 on one rank alone, NumPy's float64 differs between ranks
        own = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return type_text(own, shape)


def _value(x: Any, placer: Placer, own: bool, copies: bool) -> int | None:
    """Return the checksum of a leaf, or None if it is in parts on several processes."""
    if type(x) is not Padded and not spans(x):
        return checksum(on_host(x.array if type(x) is batch.Part else x)) if own else 0
    if placer.layout(x) is not None:
        return None
    return checksum(on_host(physical(x).addressable_data(0))) if copies else 0
