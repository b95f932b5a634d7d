"""What a job writes, passed on line by line; and what the launcher says itself.

Whoever reads it may pause (`less`, Ctrl-S) or be stuck. Then a rank waits that writes more, as it would without a
launcher; the launcher itself never does: it has to hear of signals and of ranks that end.
"""

import collections
import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, TextIO

from jaxdist.control.process import within

# What to write for a line of a process: None drops it. The start of a very long line stands for all of it.
LineFilter = Callable[[bytes], bytes | None]

_WHOLE = 1 << 20  # bytes up to which a line comes in one piece
_CHUNK = 1 << 16
NOT_WRITTEN = 120  # the exit code of a Python that can't write its output
_SAY_S = 1.0  # that a word of our own may take before we go on without it


class Pump(threading.Thread):
    """Passes lines on from a process's pipe."""

    def __init__(self, source: IO[bytes], target: TextIO, shown: LineFilter) -> None:
        super().__init__(daemon=True)
        self.writing = False
        self.written = 0
        self.problem = ""
        self._source, self._target, self._shown = source, target, shown
        self._helper: threading.Thread | None = None
        self._reading = threading.Lock()
        self._ahead: collections.deque[bytes] = collections.deque()  # read, and not looked at yet
        self._begun: list[bytes] = []  # of a line that has no end yet
        self._length = 0
        self._within: bool | None = None  # a very long line, whose start is out already: whether it is shown

    def run(self) -> None:
        # If nobody will read any more, the process shall see it as if it had written there itself.
        with contextlib.suppress(OSError), self._source:
            self._pass_on()

    def relieve(self) -> None:
        """Keep what the process writes until somebody reads again: it has more to do than to write, and shall do it."""

        def read_ahead() -> None:
            with contextlib.suppress(OSError, ValueError):  # closed
                while self.is_alive() and self.writing:
                    with self._reading:
                        self._ahead.append(os.read(self._source.fileno(), _CHUNK))
                    if not self._ahead[-1]:
                        return

        if self._helper is None or not self._helper.is_alive():
            self._helper = threading.Thread(target=read_ahead, daemon=True)
            self._helper.start()

    def _read(self) -> bytes:
        with self._reading:
            return self._ahead.popleft() if self._ahead else os.read(self._source.fileno(), _CHUNK)

    def _pass_on(self) -> None:
        last = b""
        while data := self._read():
            # Ends at \r, too: a progress bar's, which begins its line anew.
            lines = data.splitlines(keepends=True)
            if last.endswith(b"\r") and lines[0] == b"\n":
                self._write(lines.pop(0))
            self._write(b"".join(map(self._piece, lines)))
            last = data
        if self._begun:
            self._write(self._piece(b"\n"))

    def _piece(self, part: bytes) -> bytes:
        """What can be written once this has come: a line, or what of it is too long to be kept; else nothing."""
        complete = part.endswith((b"\n", b"\r"))
        if self._within is None:
            self._begun.append(part)
            self._length += len(part)
            if not complete and self._length < _WHOLE:
                return b""
            line = self._shown(b"".join(self._begun))
            self._begun.clear()
            self._length = 0
        else:
            line = part if self._within else None
        self._within = None if complete else line is not None
        return line or b""

    def _write(self, lines: bytes) -> None:
        self.writing = True
        try:
            if lines:
                write(self._target, lines)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.problem = error.strerror or str(error)
            raise
        finally:
            self.written += 1
            self.writing = False


def say(text: str) -> None:
    """A line of our own."""

    def speak() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody is there
            write(sys.stderr, f"jaxdist: {text}\n".encode())

    within(_SAY_S, speak)


def report_lost(pumps: Sequence[Pump]) -> int:
    """Says why lines of a job were lost; returns the exit code for it, 0 if none was."""
    if problem := next((pump.problem for pump in pumps if pump.problem), ""):
        say(f"output could not be written: {problem}")
        return NOT_WRITTEN
    return 0


def write(target: TextIO | None, lines: bytes) -> None:
    """In one piece: lines of several ranks don't mix."""
    if target is None:  # a closed one
        return
    buffer = getattr(target, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # itself: of a Python without buffers
    if not isinstance(raw, io.FileIO):  # a notebook's, or a StringIO
        target.write(lines.decode(errors="replace"))
        target.flush()
        return
    # Not into its buffer, whose lock a thread that is stuck would keep: Python could not end.
    target.flush()
    number = raw.fileno()
    with _lock(number):
        view = memoryview(lines)
        while view:
            try:
                view = view[os.write(number, view) :]
            except BlockingIOError:  # a terminal that a program beside this one has set so
                select.select([], [number], [])


def _lock(number: int) -> threading.Lock:
    """One for all descriptors that lead to the same file."""
    found = os.fstat(number)
    return _locks.setdefault((found.st_dev, found.st_ino), threading.Lock())


_locks: dict[tuple[int, int], threading.Lock] = {}
