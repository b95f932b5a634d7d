"""The output of a job, passed on line by line, and the launcher's own messages.

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

# What to write for a line of a process, or for several.
LineFilter = Callable[[bytes], bytes]

_LONGEST = 1 << 20  # bytes of a line; a longer one is passed on in parts
_RULE = b"-" * 74 + b"\n"  # above and below what prterun says, which is passed on in one piece
_PROMPT_MS = 100  # that a line has to end, before a terminal shows it unfinished; in a file no lines mix
NOT_WRITTEN = 120  # the exit code of a Python that can't write its output
_SAY_S = 1.0  # that a message of our own may take before we continue without it
_locks: dict[tuple[int, int], threading.Lock] = {}


class Pump(threading.Thread):
    """Passes lines on from a process's pipe."""

    def __init__(self, source: IO[bytes], target: TextIO | None, shown: LineFilter, note: LineFilter) -> None:
        super().__init__(daemon=True)
        self.writing, self.since = False, 0.0  # whether it waits for who reads, or for the process; since when
        self.problem = ""
        self._source, self._target, self._shown, self._note = source, target, shown, note
        self._is_terminal = target is not None and target.isatty()
        self.start()

    def run(self) -> None:
        # If nobody will read any more, the process shall see it as if it had written there itself.
        with contextlib.suppress(OSError), self._source:
            begun, out, data = b"", False, b"-"  # a line without its end; whether its start is out
            number, poll = self._source.fileno(), select.poll()
            poll.register(number, select.POLLIN)
            while data:
                data = os.read(number, 1 << 16)
                text = begun + data
                held = text.endswith(_RULE) or _RULE + b"prterun" in text
                # A line ends at \r, too: a progress bar's, which begins it anew.
                end = text.find(_RULE) if held else max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
                waits = end < len(text) and (held or self._is_terminal)
                if not data or len(text) - end > _LONGEST or (waits and not poll.poll(_PROMPT_MS)):
                    end = len(text)
                lines, begun = text[:end].splitlines(keepends=True), text[end:]
                self._write(b"".join([*lines[:out], *map(self._shown, lines[out:])]))
                out = text[end - 1] not in b"\r\n" if end else out
            if out:
                self._write(b"\n")

    def _write(self, lines: bytes) -> None:
        self.writing, self.since = True, time.monotonic()
        try:
            write(self._target, self._note(lines))
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.problem = error.strerror or str(error)
            raise
        finally:
            self.writing, self.since = False, time.monotonic()


def say(text: str) -> None:
    """A line of our own."""

    def speak() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            write(sys.stderr, f"jaxdist: {text}\n".encode())

    within(_SAY_S, speak)


def write(target: TextIO | None, lines: bytes) -> None:
    """Write lines in one piece, so that several ranks' lines don't mix."""
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
            except BlockingIOError:  # a terminal that a different program has set so
                select.select([], [number], [])
