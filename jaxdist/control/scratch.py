"""Folders for a job's own files, which the next job removes if this one is killed."""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder(prefix: str, within: str | None = None) -> Iterator[str]:
    """A new folder for this user alone, removed at the end; by default where temporary files are."""
    within = within or tempfile.gettempdir()
    for path in Path(within).glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
    path, lock = _locked(within, prefix)
    try:
        yield path
    finally:
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _locked(within: str, prefix: str) -> tuple[str, int]:
    """A new folder, and a descriptor: it is in use for as long as that is open."""
    while True:  # another job may take it for a leftover before it is locked
        path = tempfile.mkdtemp(prefix=prefix, dir=within)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks: leftovers stay
                fcntl.flock(lock, fcntl.LOCK_SH)
            if Path(path).exists():
                return path, lock
            os.close(lock)
