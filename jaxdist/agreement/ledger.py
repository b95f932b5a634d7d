"""The ledger: this rank's calls of steps and eager collectives in order, the same on every rank.

A training loop repeats itself. A rank whose next call is known, and the one to expect after the calls so far, waits for
nobody; any other call is compared before anything is sent. So where calls differ, some rank asks (all expect the same),
and a rank that has entered its own call by then learns it from the question. Nothing less is enough: gloo ends a
process that gets messages of a different program.
"""

import contextlib
import threading
from collections import deque
from typing import NamedTuple

import jax

from jaxdist.runtime.context import Context

_TURNS = 1024  # remembered pairs of calls in a row
_NAMED = 64  # of the last calls, for messages


class Entry(NamedTuple):
    """A call."""

    digest: bytes  # of everything that must be the same on every rank
    text: str  # names it, for a person


class Ledger:
    """The calls of this rank; ask a context for its `only` one."""

    def __init__(self, context: Context):
        self.count = 0
        self._context, self._control = context, context.control
        self._calling = threading.RLock()  # held by the thread that makes a call
        self._lock = threading.RLock()  # this rank enters a call, or its watcher judges: never both at once
        self._named: deque[str] = deque(maxlen=_NAMED)
        self._last, self._run = b"", 0  # the last call, and how often it was made in a row
        self._turns: dict[tuple[bytes, int], bytes] = {}  # the call that followed a run of equal calls
        self._thread: threading.Thread | None = None  # that has made the last call
        self.output: jax.Array | None = None  # an array of its result; None if it has ended
        if context.size > 1:
            self._control.position = lambda: self.count
            self._control.listen("enter", lambda rank, entry: self._waits(rank, *entry))
            self._control.listen("bye", self._left)

    def __enter__(self) -> None:
        """Begin a call: wait for the one before, if a different thread made it."""
        if self._control.size == 1:
            return
        if not self._calling.acquire(blocking=False):
            raise RuntimeError(
                f"rank {self._context.rank}: two threads call jaxdist at the same time, and nothing says that all "
                "ranks make these calls in the same order: let one thread make them, or one wait for the other"
            )
        # XLA runs the programs of one thread on CPUs one after the other. Those of two run at once, and would take each
        # other's messages.
        if (thread := threading.current_thread()) is self._thread:
            return
        try:
            with contextlib.suppress(RuntimeError):  # it was donated to a later program, or its own program failed
                if self.output is not None:
                    self.output.block_until_ready()
        except BaseException:  # Ctrl-C
            self._calling.release()
            raise
        self.output, self._thread = None, thread

    def __exit__(self, *_: object) -> None:
        """End a call; its program may still run."""
        if self._control.size > 1:
            self._calling.release()

    def waits(self, entry: Entry) -> bool:
        """Check whether a call must be compared first: unexpected, awaited by a rank, or after one that failed."""
        asked = self.count in [place.position for *_, place in list(self._control.waiting.values())]
        return self._context.watchdog.failed or asked or not self._foreseen(entry)

    def check_all_here(self, step: str) -> None:
        """Raise an error if a rank has left that is needed for the next call, of this step."""
        for rank, count in list(self._control.left.items()):
            if count <= self.count:
                raise RuntimeError(self._missing(rank, count, f"step {step!r}"))

    def enter(self, entry: Entry) -> None:
        """Enter a call that was compared, or need not be."""
        with self._lock:
            turn = self._last, self._run
            if entry.digest == self._last:
                self._turns.pop(turn, None)
                self._run += 1
            else:
                if len(self._turns) >= _TURNS:
                    self._turns.clear()
                self._turns[turn] = entry.digest
                self._last, self._run = entry.digest, 1
            self._named.append(entry.text)
            self.count += 1
            at = self.count - 1
            left, waiting = dict(self._control.left), dict(self._control.waiting)
        # Messages since this call was found to be expected.
        for rank, count in left.items():
            self._left(rank, count)
        for rank, (*_, (position, what)) in waiting.items():
            if position == at:
                self._waits(rank, position, what)

    def _foreseen(self, entry: Entry) -> bool:
        return entry.digest == self._turns.get((self._last, self._run), self._last)

    # --- the control channel's watcher

    def _waits(self, rank: int, position: int, what: str) -> None:
        """A rank waits for the others after `position` calls."""
        with self._lock:
            if self.count <= position:
                return
            at = self.count - position
            mine = self._named[-at] if at <= len(self._named) else "a call long ago"
        if mine == what:
            what = (
                f"{what} too, but with something new: a state of other types, or kept elsewhere (on the host, on the "
                "mesh), a different constant, other settings of JAX, or after an error"
            )
        self._control.fail(
            f"the ranks make different calls: call {position + 1} of rank {self._control.rank} is {mine}, and rank "
            f"{rank} calls {what}. Every rank must make the same calls in the same order, with rows of the same batch: "
            "look for a choice that is not the same on all ranks, or a tail of the data that is not. Where batches "
            "have several lengths, ctx.rows(length) before each call, or jaxdist.loader, tells a rank which one it is"
        )

    def _left(self, rank: int, count: int) -> None:
        with self._lock:
            if self.count <= count:
                return
            what = self._named[-1]
        self._control.fail(self._missing(rank, count, what))

    def _missing(self, rank: int, count: int, what: str) -> str:
        return (
            f"rank {rank} has finished after {count} calls, and rank {self._control.rank} is in call "
            f"{max(self.count, count + 1)}, {what}: each rank must make the same number of calls"
        )
