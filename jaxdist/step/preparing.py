"""What a call of a step runs: its program, and its leaves on the mesh, as of an earlier call or found out anew."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jaxdist.agreement.calls import Agreement, StepCall
from jaxdist.compat import trace_settings
from jaxdist.runtime.context import Context
from jaxdist.step import modules
from jaxdist.step.donation import check_there, without_aliases
from jaxdist.step.entering import ORIGINS, Entering
from jaxdist.step.latest import Latest, expected, types
from jaxdist.step.placer import ELSEWHERE, Placer
from jaxdist.step.program import Program
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.reading import Reader
from jaxdist.step.signature import Signature, Signatures, flat


class Preparing:
    """Prepares the calls of one step.

    Args:
      name: of the step.
      context: the job.
      placer: onto the step's devices.
      cache: its programs.
      reader: reads a call that is new.
      entering: compares it over the ranks.
      signatures: of earlier calls.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        placer: Placer,
        cache: ProgramCache,
        reader: Reader,
        entering: Entering,
        signatures: Signatures,
    ):
        self._name, self._context, self._placer, self._cache = name, context, placer, cache
        self._reader, self._entering, self._signatures = reader, entering, signatures
        self._agreement = context.only(Agreement)
        self._latest: dict[Any, Latest] = {}
        self._varied: set[Any] = set()  # structures of arguments that come with states of several types
        self._agreed: dict[Any, dict[Sequence[int], StepCall]] = {}  # what the ranks have compared

    def clear(self) -> None:
        """Forget the programs of earlier calls."""
        self._latest.clear()

    def failed(self) -> None:
        """A call has failed on this rank: the next one finds out whether it did on every rank."""
        self._agreed.clear()
        for latest in self._latest.values():
            latest.agreed.clear()

    def prepared(
        self, args: tuple[Any, ...], keywords: tuple[str, ...], call: int, other_types: bool = False
    ) -> tuple[Program, list[Any], list[Any]]:
        """The program for these arguments, and the leaves of state and batch on the mesh.

        Args:
          args: of the step.
          keywords: names of the last arguments.
          call: its number.
          other_types: the call was entered for a program that takes other types than these.
        """
        try:
            leaves, tree = flat(args, keywords)
            check_there(self._name, self._reader.calling, args, keywords, leaves)
            if other_types:  # two models take turns, say: from now on their types are looked at before a call
                self._varied.add(tree)
            key = (tree, types(leaves)) if self._varied and tree in self._varied else tree
            if other_types:
                self._latest.pop(tree, None)
                self._latest.pop(key, None)
            latest = self._latest.get(key)
            if latest is None and modules.found(args):
                raise modules.FoundError
            misplaced = (latest or Latest([None] * len(leaves))).misplaced(leaves, self._placer)
            constants = self._signatures.constants(tree, leaves, misplaced)
            if latest is not None and latest.constants != constants:
                latest = None
            fresh = False
            signature: Signature | None = latest.signature if latest else self._signatures.get((tree, constants))
            if signature is None:
                fresh, signature = True, self._reader.read(args, keywords)
                if signature.numbers:
                    self._signatures.numbers[tree] = signature.numbers
                    constants = self._signatures.constants(tree, leaves)
        except modules.FoundError:
            raise
        except Exception as error:
            clearer = self._reader.bad_constant(args, keywords)
            self._entering.report(clearer or error)
            if clearer is None:
                raise
            raise clearer from None
        gone = {i for i, *_ in constants}
        if gone:
            moved = list(itertools.accumulate(int(i not in gone) for i in range(len(leaves))))
            misplaced = [moved[i] - 1 for i in misplaced if i not in gone]
            leaves = [x for i, x in enumerate(leaves) if i not in gone]

        differs: dict[int, list[int]] | None = None
        if fresh:
            if self._context.size > 1:
                own = [leaves[i] for i in signature.batch]
                self._entering.agree(signature, leaves, own)
                differs = self._reader.compare(signature, args, call, self._context)
            self._signatures[tree, constants] = signature
        batch = [leaves[i] for i in signature.batch]
        known = (signature, trace_settings(), self._cache.debugging, *map(self._placer.batch_key, batch))
        if key is not tree:
            known += key
        if latest is not None and latest.known != known:
            latest = None
        program = latest and latest.program
        changed = program is None or any(not signature.is_batch[i] for i in misplaced)
        outside = () if other_types else self._entering.outside(signature, leaves)
        # State that is kept in another way has another program.
        kept = [self._placer.layout(leaves[i]) for i in signature.state] if changed else []
        agreed = self._agreed.setdefault((known, *kept), {}) if latest is None or changed else latest.agreed
        what = agreed.get(self._entering.origins)
        if other_types:  # the others find the same, or that this rank traces a program which they don't
            what = what or self._entering.kind_of_call(signature, batch)
            self._agreement.corrected(what)
        elif what is None or ELSEWHERE in kept or outside or not self._agreement.known(call, what):
            compared = self._entering.agree(signature, leaves, batch, outside)
            what = what or compared
            self._agreement.compared(call, what)
            if len(agreed) >= ORIGINS:
                agreed.clear()
        agreed[self._entering.origins] = what
        if changed:
            self._agreement.may_trace(self._name, True)
            program = self._cache.program(signature, leaves)
            self._agreement.may_trace(self._name, not program.known)
            self._entering.place(program, leaves, call, differs)
            self._latest[key] = Latest(expected(program, sorted(gone)), program, signature, constants, known, agreed)
        assert program is not None
        if self._entering.origins and program.following is not None and () not in agreed:
            agreed[()] = self._entering.kind_of_call(signature, batch)  # what follows: no rank has to wait for it
            self._agreement.expect(agreed[()])
        state = list(signature.pick_state(leaves))
        for i in program.padded:
            state[i] = state[i].array
        if program.donates and len(set(map(id, state))) < len(state):
            state = without_aliases(state)
        return program, state, self._placer.batch_argument(batch, program.batch)
