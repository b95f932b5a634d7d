"""The standard streams of this process: there even where it was started without them, and written past their locks."""

from __future__ import annotations

import contextlib
import os
import select
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_closed() -> None:
    """Let the null device stand in for standard streams that are closed, as a daemon's may be.

    The next file that is opened would get the number of the stream: output of this process and its libraries on
    standard error would go into a connection of the job.
    """
    bare = [name for name in _NAMES if getattr(sys, f"__{name}__") is None and getattr(sys, name) is None]
    for number in range(len(_NAMES)):
        if not _is_open(number):
            _open_null(number)
    for name in bare:  # most code writes to it without asking
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="backslashreplace"))  # noqa: PTH123, SIM115


def flush() -> None:
    """Write out what print() has left in Python's streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there is none, it is closed, or nobody reads it any more
            stream.flush()


def write(text: str) -> None:
    """Write on standard error, not through `sys.stderr`, whose lock a different thread may hold. Never fails."""
    data = memoryview(text.encode(errors="backslashreplace"))
    with contextlib.suppress(OSError):  # nobody reads it any more
        while data:
            try:
                data = data[os.write(2, data) :]
            except BlockingIOError:  # a terminal that some other program has set so
                select.select([], [2], [])


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _open_null(number: int) -> None:
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        if null == number:  # the lowest that was free
            os.set_inheritable(number, True)
        else:  # a different thread was faster
            os.close(null)
