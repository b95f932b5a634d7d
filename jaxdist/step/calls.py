"""The calls of a step: one that is new to this rank is compared with the other ranks', and its state is placed."""

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxdist.agreement import sync
from jaxdist.agreement.calls import OtherRows, Rows
from jaxdist.agreement.ledger import Ledger
from jaxdist.agreement.meshes import connect
from jaxdist.compat import trace_settings
from jaxdist.compilation import finite, modules
from jaxdist.compilation.calling import Settings
from jaxdist.compilation.program import Pinned, Program, ProgramCache, TraceSettings
from jaxdist.compilation.signature import Args, Leaf, PyTree, Signature, Structure, flat
from jaxdist.compilation.tracing import without_collections
from jaxdist.mesh import MODEL
from jaxdist.placements import report
from jaxdist.placements.model.layouts import Layout, physical
from jaxdist.proof.compare import Verified
from jaxdist.runtime.context import Context, machine_of
from jaxdist.step import batch
from jaxdist.step.cached_call import CachedCall
from jaxdist.step.comparing import CallComparison, CallName
from jaxdist.step.donated import Donation, check_not_donated
from jaxdist.step.donated import latest as latest_donations
from jaxdist.step.leaves import dim_along, spans, type_key
from jaxdist.step.placer import ELSEWHERE, Placer
from jaxdist.step.proving import require_equal, verified_on_all
from jaxdist.step.reading import Reader
from jaxdist.step.records import Entries
from jaxdist.step.values import DifferingRanks, ValueCheck
from jaxdist.text import say_once


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: Args  # in the order of the parameters
    keywords: tuple[str, ...]  # names of the last ones, which go by keyword
    leaves: Sequence[Leaf]  # of `args`
    tree: Structure


_steps_named: "dict[str, itertools.count[int]]" = {}  # how many steps of this process have had each name


class Found(NamedTuple):
    """A call that is known now, and what its arguments need before it runs."""

    call: CachedCall
    misplaced: Sequence[int] = ()  # leaves of the state, among the data, that are not where the program wants them
    is_repeat: bool = True  # of the latest call of its structure: the state is in place


class Calls:
    """The calls of one step on one mesh.

    What a call needs before its program runs, by what this rank knows of it:

    ==================================  ========  ==================  ==========================================
    arguments                           program   state               compared with the other ranks
    ==================================  ========  ==================  ==========================================
    as in the latest call               known     in place            at calls 1, 2, 4, ...: what copies hold
    of the types of an earlier call     known     moved if elsewhere  the same; and if state is moved
    of a known structure, other types   compiled  moved if elsewhere  types and program
    of a new structure                  compiled  moved if elsewhere  types, program, what all leaves hold
    ==================================  ========  ==================  ==========================================

    Any call is compared that another rank may not expect (`Ledger.waits`).
    """

    def __init__(self, base: str, settings: Settings, context: Context, mesh: Mesh, input_mesh: Mesh | None = None):
        connect(context, mesh)
        self._name = base
        self._named = False  # so that no other step of the job has this name
        self._entered = 0  # the number of the last call that this rank has entered for good
        self._settings, self.context, self.mesh = settings, context, mesh
        self.placer = Placer(context, mesh, input_mesh)
        self.cache = ProgramCache(settings, mesh, machine_of(mesh), context.rules or context.communicator)
        self.reader = Reader(base, settings, self.placer, self.cache)
        self._values = ValueCheck(base, settings, self.placer, self.cache, self.reader)
        self._ledger = context.only(Ledger)
        self._comparison = CallComparison(settings, self.placer, self.cache, self._ledger, self._values)
        self._several = context.size > 1
        self._latest: dict[Structure, CachedCall] = {}  # the first to try: loops repeat a call
        self._cached: dict[Hashable, CachedCall] = {}  # by all that a program is for
        self._proven: set[Program] = set()  # programs that have been compared with the step
        self._is_first = True  # no program yet
        self._warned_of_gathers = False  # of what is gathered

    def clear(self) -> None:
        """Forget the programs of earlier calls."""
        self.cache.clear()
        self._latest.clear()
        self._cached.clear()
        self._proven.clear()

    def run(self, args: Args, keywords: tuple[str, ...], pinned: Pinned | None = None) -> PyTree:
        """The result of a call, which is the only one of this rank meanwhile."""
        with self._ledger:
            return self._result(args, keywords, pinned)

    def _result(self, args: Args, keywords: tuple[str, ...], pinned: Pinned | None) -> PyTree:
        """The result of a call: its program, known or new, on its arguments, once they are on the mesh."""
        name = self._next_name()
        self._ledger.check_all_here(name.step)
        objects = None
        try:
            leaves, tree = flat(args, keywords)
            # A structure that is known has no objects of nnx: theirs are split below. Looking for them takes time.
            if tree not in self._latest and modules.has_objects(args):
                args, objects = modules.split(args)
                leaves, tree = flat(args, keywords)
        except Exception as error:
            self._comparison.report(name, error)
            raise
        arguments = Arguments(args, keywords, leaves, tree)
        try:
            cached, leaves = self._agreed(name, arguments, pinned)
        except OtherRows as other:  # the ranks do not pass the rows that some rank assumed
            cached, leaves = self._agreed(name, arguments, pinned, other.total)
        # Here ranks have agreed on the call, so all of them compare its program, or none does: it takes all.
        if self._settings.verify and cached.program not in self._proven:
            placed = cached.program.placed
            require_equal(name.step, self.placer, placed, placed.signature.data(leaves))
            self._proven.add(cached.program)
        program = cached.program if pinned is None else pinned.program
        state, result, counts = self._run(name, cached, program, leaves)
        self._after(name, program, state, result, counts)
        return result if objects is None else modules.update(objects, result)

    def _next_name(self) -> CallName:
        """Name the next call."""
        if not self._named:
            # Two steps may share a name. They are told apart by their first calls, whose order is that of all ranks.
            count = next(_steps_named.setdefault(self._name, itertools.count()))
            self._name, self._named = self._name + f"#{count}" * bool(count), True
        # A call that failed before it sent anything does not count: the next one has its number.
        return CallName(self._name, self._entered + 1)

    def _agreed(
        self, name: CallName, arguments: Arguments, pinned: Pinned | None, totals: Sequence[int | None] | None = None
    ) -> tuple[CachedCall, Sequence[Leaf]]:
        """Return the call for these arguments, on which all ranks agree, and its leaves, with the state on the mesh.

        `totals` has the rows of each leaf on all ranks, once they have told each other.
        """
        leaves, rows, latest = arguments.leaves, None, self._latest.get(arguments.tree)
        settings = trace_settings(), self.cache.looked_for
        try:
            if totals is None and latest is not None and latest.fits(leaves, settings):
                found = Found(latest)
            else:
                rows = self._rows(leaves, totals)
                found = self._look_up(name.step, arguments, rows, settings)
            if pinned is not None:
                found.call.check_compiled(pinned.expected)
        except Exception as error:
            self._comparison.report(name, error, rows)
            raise
        return found.call, self._compared_and_placed(name, found, arguments, rows)

    def _run(
        self, name: CallName, cached: CachedCall, program: Program, leaves: Sequence[Leaf]
    ) -> tuple[Sequence[Leaf], PyTree, jax.Array | None]:
        """Run the program, and return its state as well. From here on nothing stops this rank from its collectives."""
        if not self._several:
            state, batch = cached.arguments(leaves, self.placer)
            self._entered = name.number
            return state, *program(state, batch)
        # Before its arguments are placed: other ranks count on this call, even if that or the program fails here. A
        # rank that went on to the next call would add its rows to theirs of this one.
        self._ledger.enter(cached.entry)
        self._entered = name.number
        with self.context.watchdog.call(str(name), is_step=True) as active:
            state, batch = cached.arguments(leaves, self.placer)
            result, counts = program(state, batch)
        active.finish(result)
        self._ledger.output = active.output
        return state, result, counts

    def _after(
        self, name: CallName, program: Program, state: Sequence[Leaf], result: PyTree, counts: jax.Array | None
    ) -> None:
        """Note what the program has taken, and check its result as the user has asked."""
        if program.donated:
            donation = latest_donations[self] = Donation(name.step, name.number, program.pick_donated(state))
            if program.virtual:  # where NumPy looks at one device's part JAX keeps it, and would crash on the others
                for x in donation.arrays:
                    x.delete()
        if counts is not None:
            kinds = (not self._settings.check_finite and self.cache.looked_for) or (True, True)
            finite.examine(program.placed.step.checked, counts, self.mesh, f"{name}: ", kinds)
        if self._settings.check_every and name.number % self._settings.check_every == 0:
            sync.compare(self.context, result, f"check of {name.step} call {name.number}", f"{name}: result")

    def read(self, arguments: Arguments, rows: Rows | None = None) -> tuple[Signature, list[Leaf]]:
        """Return the signature of a call, and its data: each part of the batch with the rows of all ranks."""
        args, keywords, leaves, tree = arguments
        parted = self.placer.parted(leaves, rows or self._rows(leaves))
        signature = self.reader.signature(args, keywords, parted, tree)
        pairs = zip(signature.is_batch, signature.data(parted), signature.data(leaves), strict=True)
        return signature, [part if is_batch else x for is_batch, part, x in pairs]

    def program(self, signature: Signature, data: Sequence[Leaf]) -> Program:
        """The program for a call with these leaves."""
        self.placer.check(signature, data)
        layouts = [(i, self.placer.layout(data[i])) for i in signature.state]
        in_shards = {i: layout for i, layout in layouts if isinstance(layout, Layout)}
        elsewhere = {i: dim for i, x in layouts if x is ELSEWHERE and (dim := dim_along(data[i], MODEL)) is not None}
        return self.cache.program(signature, self.placer.types(signature, data), in_shards, elsewhere)

    def verified(self, arguments: Arguments, points: int, strict: bool) -> Verified:
        """Compare the program for these arguments with the step. Every rank calls it."""
        name = CallName(self._name, self._entered + 1)
        options = [("points", str(points)), ("strict", str(strict))]
        with self._ledger:
            try:
                program, data = self._to_verify(name, arguments, options)
            except OtherRows as other:
                program, data = self._to_verify(name, arguments, options, other.total)
            return verified_on_all(name.step, self.placer, program.placed, data, points, strict)

    def _to_verify(
        self, name: CallName, arguments: Arguments, options: Entries, totals: Sequence[int | None] | None = None
    ) -> tuple[Program, list[Leaf]]:
        """Return the program to verify, on which all ranks agree, and its data."""
        rows = self._rows(arguments.leaves, totals)
        try:
            signature, data = self.read(arguments, rows)
            program = self.program(signature, data)
        except Exception as error:
            self._comparison.report(name, error, rows)
            raise
        self._comparison.of_verify(name, signature, data, options, program, rows)
        return program, data

    def _rows(self, leaves: Sequence[Leaf], totals: Sequence[int | None] | None = None) -> Rows:
        """Return the rows of each leaf, of this rank and of all: `totals`, or as far as this rank knows."""
        here = tuple(map(self.placer.rows_if_part, leaves))
        return Rows(here, tuple(totals or map(self._total, leaves, here)))

    def _total(self, x: Leaf, rows_here: int | None) -> int | None:
        if rows_here is None:
            return None
        # Of the batches that the job has divided, the latest of which this rank passes so many rows: 3 of 8 ranks' rows
        # may be of a batch of 24, or the last 3 of one of 23.
        totals = [x.total] if isinstance(x, batch.BatchPart) and x.total else self.context.divided
        fitting = [n for n in totals if self.placer.share.size(n) == rows_here]
        return fitting[-1] if fitting else self.placer.device_map.rows_of_all(rows_here)

    @without_collections
    def _look_up(self, step: str, arguments: Arguments, rows: Rows, settings: TraceSettings) -> Found:
        """Return the call for these arguments, with a new program if none is known."""
        args, keywords, leaves, _ = arguments
        check_not_donated(step, self._settings.calling, args, keywords, leaves)
        signature, data = self.read(arguments, rows)
        layouts = [self.placer.layout(data[i]) for i in signature.state]
        state_types = [type_key(data[i]) for i in signature.state]
        batch_types = [type_key(data[i]) for i in signature.batch]
        # The layout of the batch is not part of it: a batch is moved to where the program wants it, at each call.
        key = signature, settings, *batch_types, *zip(state_types, layouts, strict=True)
        cached = self._cached.get(key)
        if cached is None:
            cached = self._cached[key] = self._new(step, arguments, rows, settings, signature, data)
            self.announce(cached.program)
        targets = cached.program.placed.layouts
        pairs = zip(signature.state, layouts, strict=True)
        return Found(cached, [i for i, layout in pairs if layout is not targets[i]], is_repeat=False)

    def _new(
        self,
        step: str,
        arguments: Arguments,
        rows: Rows,
        settings: TraceSettings,
        signature: Signature,
        data: Sequence[Leaf],
    ) -> CachedCall:
        """Return the entry of a call that is new to this rank."""
        leaves = arguments.leaves
        program, constants = self.program(signature, data), self.reader.constants(arguments.tree, leaves)
        is_constant = {constant.position for constant in constants}
        positions = [i for i in range(len(leaves)) if i not in is_constant]
        batch_types = [type_key(leaves[positions[i]]) for i in signature.batch]
        unmarked_rows = {
            program.placed.avals[i].shape[0] for i in signature.batch
            if rows.here[positions[i]] is not None and getattr(leaves[positions[i]], "total", None) is None
        }  # fmt: skip
        entry = self._comparison.entry(step, signature, data, program)
        return CachedCall(program, constants, settings, positions, batch_types, unmarked_rows, entry)

    def _compared_and_placed(
        self, name: CallName, found: Found, arguments: Arguments, rows: Rows | None
    ) -> Sequence[Leaf]:
        """Return the leaves of a call on which all ranks agree, with the state on the mesh."""
        cached, leaves, tree = found.call, arguments.leaves, arguments.tree
        # All ranks do these in this order: each sends messages, and only the first says that a rank has failed.
        is_new = not found.is_repeat and (tree, cached.constants) not in self.reader.signatures
        differs = self._comparison(name, cached, leaves, found.misplaced, is_new, rows)
        if self._several and is_new:
            connect(self.context, cached.program.placed.run_mesh)  # the groups of ``within=``
        if not found.is_repeat:
            self.reader.signatures[tree, cached.constants] = cached.signature
            if found.misplaced:
                leaves = self._with_state(name.step, cached, leaves, found.misplaced, differs)
            cached.remember(leaves)  # the state as it is now: the next call is known by it
            self._latest[tree] = cached
        return leaves

    def announce(self, program: Program) -> None:
        """Warn about slow parts of a program, once."""
        placements, is_first, self._is_first = program.placed.emitted.propagations, self._is_first, False
        if not placements or not self.context.is_root or self._warned_of_gathers:
            return
        if is_first and (text := program.placed.padding()):
            say_once(f"step {self.reader.name!r}: {text}")
        text = report.warning(placements)
        if not text and self._settings.batch_argnums is None and (names := program.placed.unsplit()):
            text = batch.unsplit(names, self.mesh.size, self.placer.process_count)
        if text:
            self._warned_of_gathers = True  # and once of a step that is decorated anew, in a loop or for each trial
            say_once(f"step {self.reader.name!r}: {text}")

    # --- state that is not on the mesh yet

    def _with_state(
        self, step: str, cached: CachedCall, leaves: Sequence[Leaf], misplaced: Sequence[int], differs: DifferingRanks
    ) -> list[Leaf]:
        """Return the leaves, with the state where the program needs it."""
        data, layouts = cached.signature.data(leaves), cached.program.placed.layouts
        # Shards move between memories without a broadcast.
        broadcast = [i for i in misplaced if not isinstance(self.placer.layout(data[i]), Layout)]
        differs = {i: differs[i] for i in broadcast if i in differs and not spans(physical(data[i]))}
        self._values.check_state(step, cached.program.placed, data, differs)
        placed = self.placer.place_state([data[i] for i in misplaced], [layouts[i] for i in misplaced])
        out = list(leaves)
        for i, x in zip(misplaced, placed, strict=True):
            out[cached.data_positions[i]] = x
        return out
