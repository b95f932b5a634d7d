"""What a job writes, passed on line by line; and what the launcher says itself.

Whoever reads it may pause (`less`, Ctrl-S) or be stuck. Then a rank waits that writes more, as it would without a
launcher; the launcher itself never does: it has to hear of signals and of ranks that end.
"""

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

from jaxdist.control.process import within

# What to write for a line of a process.
LineFilter = Callable[[bytes], bytes]

_LONGEST = 1 << 20  # bytes of a line; a longer one is passed on in parts
_PROMPT_MS = 100  # that a line has to end, before it is taken for one that a person is to answer
NOT_WRITTEN = 120  # the exit code of a Python that can't write its output
_SAY_S = 1.0  # that a word of our own may take before we go on without it
_locks: dict[tuple[int, int], threading.Lock] = {}


class Pump(threading.Thread):
    """Passes lines on from a process's pipe."""

    def __init__(self, source: IO[bytes], target: TextIO, shown: LineFilter) -> None:
        super().__init__(daemon=True)
        self.writing, self.since = False, 0.0  # whether it waits for who reads, or for the process; since when
        self.problem = ""
        self._source, self._target, self._shown = source, target, shown
        self.start()

    def run(self) -> None:
        # If nobody will read any more, the process shall see it as if it had written there itself.
        with contextlib.suppress(OSError), self._source:
            begun, out = b"", False  # of a line that has no end yet; whether its start is out
            number, poll = self._source.fileno(), select.poll()
            poll.register(number, select.POLLIN)
            while data := os.read(number, 1 << 16):
                # Ends at \r, too: a progress bar's, which begins its line anew.
                *lines, begun = (begun + data).splitlines(keepends=True)
                ends = begun.endswith((b"\n", b"\r"))
                if ends or len(begun) > _LONGEST or not poll.poll(_PROMPT_MS):
                    lines, begun = [*lines, begun], b""
                self._write(b"".join([*lines[:out], *map(self._shown, lines[out:])]))
                out = out if not lines else not ends and not begun
            if begun or out:
                self._write((begun if out else self._shown(begun)) + b"\n")

    def _write(self, lines: bytes) -> None:
        self.writing, self.since = True, time.monotonic()
        try:
            write(self._target, lines)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.problem = error.strerror or str(error)
            raise
        finally:
            self.writing, self.since = False, time.monotonic()


def say(text: str) -> None:
    """A line of our own."""

    def speak() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody is there
            write(sys.stderr, f"jaxdist: {text}\n".encode())

    within(_SAY_S, speak)


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
    file = os.fstat(number)
    with _locks.setdefault((file.st_dev, file.st_ino), threading.Lock()):  # both may lead to one file
        view = memoryview(lines)
        while view:
            try:
                view = view[os.write(number, view) :]
            except BlockingIOError:  # a terminal that a program beside this one has set so
                select.select([], [number], [])
