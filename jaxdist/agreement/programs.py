"""Whether the ranks run the same program: what a rank traces in a call is compared, and nobody waits for it.

A rank that traces a step's program in a call tells rank 0 a digest of it, and rank 0 tells all. Who hears
of a program for arguments of some types compares it with its own one for these, once it knows which that is: the one
that it traces in the same call, or one that it has from an earlier call. So a rank that traces alone, because its
cache was cleared, is left in peace.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr

from jaxdist.control.channel import Control
from jaxdist.control.progress import Progress
from jaxdist.ir.dataflow import dataflow, operations
from jaxdist.ir.fingerprint import fingerprint

_TRACED, _DIFFERS = "a program was traced", "a program differs"


_COMPUTES, _HOLDS = "computes ", "numbers and arrays with the checksum "
_SHOWN = 3  # operations of each rank that the other does not have


class _Traced(NamedTuple):
    """A program of a step: for which arguments, the call in which it was traced (0: none), and what is compared.

    On its way to the others it has no `lines` and `operations` at first; they come when the digests differ.
    """

    step: str
    types: str  # a digest
    call: int
    digest: str
    lines: tuple[str, ...] = ()
    operations: bytes = b""  # packed: they may be many


class Programs:
    """The programs of this rank's steps, and what it heard of the others'.

    Args:
      control: of the job.
      steps: this rank's progress.
    """

    def __init__(self, control: Control, steps: Mapping[str, Progress]):
        self._control, self._steps = control, steps
        self._mine: dict[tuple[str, str], _Traced] = {}  # by step and types: the latest
        self._heard: list[tuple[int, _Traced]] = []
        self._lock = threading.Lock()
        control.listen(_TRACED, self._hear)
        control.listen(_DIFFERS, self._differs)

    def traced(self, step: str, program: ClosedJaxpr, held: str = "") -> None:
        """This rank has traced a program of the step; in a call of it, or (`lower`) in none: then nothing is sent.

        Args:
          step: its name.
          program: as one device runs it.
          held: a checksum of the numbers and arrays that it holds.
        """
        progress = self._steps.get(step)
        current = progress.current if progress else None
        call = 0 if current is None or current.returned else current.number
        types = _digest(f"{a.dtype}{a.shape}" for a in program.in_avals)
        lines = (*fingerprint(program), _COMPUTES + dataflow(program), _HOLDS + held)
        mine = _Traced(step, types, call, _digest(lines), lines, _packed(operations(program)))
        with self._lock:
            self._mine[step, types] = mine
        if call:
            self._control.post(_TRACED, mine._replace(lines=(), operations=b""), to=0 if self._control.rank else None)
            self.compare()

    def compare(self, stuck: bool = False) -> None:
        """Compare what can be compared now with what was heard.

        Args:
          stuck: this rank has been in its call for long: if it has not traced a program by now, it won't.
        """
        if not self._heard:
            return
        differing: list[tuple[int, _Traced]] = []
        with self._lock:
            heard, self._heard = self._heard, []
            for rank, theirs in heard:
                mine = self._mine.get((theirs.step, theirs.types))
                progress = self._steps.get(theirs.step, Progress())
                current = progress.current
                settled = progress.committed - (not stuck and current is not None and not current.returned)
                if (mine is None or mine.call < theirs.call) and settled < theirs.call:
                    self._heard.append((rank, theirs))
                elif mine is None:
                    if not (progress.failed and progress.committed == theirs.call):  # else it has its own error
                        differing.append((rank, theirs._replace(digest="")))
                elif mine.call <= theirs.call and mine.digest != theirs.digest:
                    differing.append((rank, mine._replace(call=theirs.call)))
        for rank, program in differing:
            self._control.post(_DIFFERS, program, to=rank)

    def _hear(self, rank: int, theirs: _Traced) -> None:
        with self._lock:
            self._heard.append((rank, theirs))
        self.compare()

    def _differs(self, rank: int, theirs: _Traced) -> None:
        """Another rank has found that its program is not the one that this rank told of."""
        me = self._control.rank
        where = f"step {theirs.step!r}, call {theirs.call}: "
        if not theirs.digest:
            self._control.fail(
                f"{where}rank {me} came with arguments of another shape or dtype than before, and rank {rank} did not. "
                "State and batch must have the same types on every rank."
            )
            return
        mine = self._mine[theirs.step, theirs.types]
        pairs = list(zip_longest(mine.lines, theirs.lines, fillvalue="none"))
        n = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        if all(line.startswith(_HOLDS) for line in pairs[n]):
            self._control.fail(
                f"{where}the ranks run the same collectives on other numbers: what the step closes over, a number or "
                f"an array, is not the same on rank {me} and rank {rank}. Pass what differs as part of the batch, or "
                "make it the same everywhere (a seed that depends on the rank? an `if rank == ...` in the step?)"
            )
            return
        if all(line.startswith(_COMPUTES) for line in pairs[n]):
            here, there = _unpacked(mine.operations), _unpacked(theirs.operations)
            self._control.fail(
                f"{where}the ranks run different programs, with other operations between the same collectives. Only on "
                f"rank {me}: {_listed(here - there)}; only on rank {rank}: {_listed(there - here)}. Another version of "
                "the script or a package on some host, other settings of JAX, an `if rank == ...`, a loop over a set?"
            )
            return
        (one, other), (all_of_mine, all_of_theirs) = pairs[n], (len(mine.lines) - 2, len(theirs.lines) - 2)
        self._control.fail(
            f"{where}the ranks run different programs. Collective {n + 1} of rank {me} ({all_of_mine} in all) is: "
            f"{one if n < all_of_mine else 'none'}; of rank {rank} ({all_of_theirs} in all): "
            f"{other if n < all_of_theirs else 'none'}. Inside a step nothing may depend on the rank: look for "
            "`if ctx.rank == ...`, a loop over a set, options that differ."
        )


def _packed(operations: Counter[str]) -> bytes:
    return zlib.compress("\n".join(f"{count} {text}" for text, count in sorted(operations.items())).encode(), 1)


def _unpacked(packed: bytes) -> Counter[str]:
    lines = (line.partition(" ") for line in zlib.decompress(packed).decode().splitlines())
    return Counter({text: int(count) for count, _, text in lines})


def _listed(operations: Counter[str]) -> str:
    if not operations:
        return "none (the same ones, with other operands)"
    shown = [f"{count} x {text}" if count > 1 else text for text, count in sorted(operations.items())]
    return "; ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
