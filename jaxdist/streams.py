"""The standard streams of this process."""

import contextlib
import os
import sys
from collections.abc import Iterator


def open_closed() -> None:
    """Open the null device for closed standard streams: a connection of the job would get the number of one."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def flush() -> None:
    """Write out what print() has left in Python's streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there is none, it is closed, or nobody reads it any more
            stream.flush()


@contextlib.contextmanager
def silenced(number: int) -> Iterator[None]:
    """Drop what native code writes on a standard stream; what `print` has buffered stays."""
    flush()
    kept, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
        os.close(null)


def write(text: str) -> None:
    """Write on standard error, not through `sys.stderr`, whose lock a different thread may hold. Never fails."""
    data = memoryview(text.encode(errors="backslashreplace"))
    with contextlib.suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(2, data) :]
