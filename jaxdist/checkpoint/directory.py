"""The directory of a run's checkpoints: its steps, its lock, and moving checkpoints in and away."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

from jaxdist.checkpoint import manifest
from jaxdist.errors import CheckpointError

ITEM = "default"  # the name that orbax's CheckpointManager gives to the only item of a step
UNFINISHED = ".orbax-checkpoint-tmp"  # of a directory that orbax also takes for an unfinished checkpoint
_ASIDE = f".replaced{UNFINISHED}"
_SPECIAL = re.compile(r"[*?\[\]\\]|:/")  # of a pattern or a URL
_LOCK = ".jaxdist-lock"
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # locks, by this file system
_MOST = 64  # locks that a process holds at a time: each keeps a file open
_log = logging.getLogger("jaxdist")
_held: dict[Path, int] = {}  # lock files, with descriptors
_warned: set[str] = set()
passed_over: set[Path] = set()
"""Damaged checkpoints instead of which this process has restored older ones: it will come to their steps again."""


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory of checkpoints."""
    if not os.fspath(path):
        raise ValueError("the path of the checkpoints is empty: give a directory ('.' is the current one)")
    found = Path(path).expanduser().absolute()
    str(found).encode()  # a name that is not UTF-8 is a ValueError
    if special := _SPECIAL.search(str(found)):
        raise ValueError(
            f"{path}: checkpoints are in directories of a file system, not at a URL, and orbax takes {special[0]!r} "
            "for more than a name: use a directory without * ? [ ] \\ and :/ that all processes share"
        )
    return found


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before."""
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def steps(path: Path) -> list[int]:
    """Return the steps in a directory in ascending order, damaged ones included.

    A job may add one and remove another meanwhile: the directory is listed until its names stay the same.
    """
    names, found = set[str](), list[int]()
    while True:
        before = names
        try:
            names = {p.name.removesuffix(_ASIDE) for p in path.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return []
        if names == before:
            return sorted(found)
        numbers = {int(name) for name in names if name.isdecimal() and str(int(name)) == name}
        found = [n for n in numbers if any((place(path / str(n)) / part).exists() for part in (manifest.FILE, ITEM))]


def place(final: Path) -> Path:
    """Return where the checkpoint of a step is: aside, if a save was killed while it replaced the step."""
    aside = final.with_name(f"{final.name}{_ASIDE}")
    return aside if aside.is_dir() and not final.is_dir() else final


def publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name, and discard an older one of that name."""
    aside = final.with_name(f"{final.name}{_ASIDE}")
    sync_to_disk(temporary)
    if final.exists():
        final.rename(aside)  # after a kill here, `place` finds it
    temporary.rename(final)
    sync_to_disk(final.parent)
    if os.path.lexists(aside):
        discard(aside)


def sync_to_disk(directory: Path) -> None:
    """Flush a directory: only then does a rename in it survive a power failure."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tidy(final: Path, keep: int | None) -> None:
    """Remove leftovers of killed jobs, and old checkpoints; the new one is there, whatever happens to these."""
    path, step = final.parent, int(final.name)
    for left in path.glob(f"*{UNFINISHED}"):
        discard(left)
    passed_over.discard(final.resolve())
    others = [s for s in steps(path) if s != step and (path / str(s)).resolve() not in passed_over]
    if others and others[-1] > step:
        warn_once(
            f"step {others[-1]} in {path} is higher than the step that was saved just now, and restore takes the "
            "highest: to go on from here, remove the higher ones, or save into a different directory"
        )
    for old in others[: max(0, len(others) + 1 - keep)] if keep else []:
        discard(path / str(old))


def discard(directory: Path) -> None:
    """Remove a checkpoint or a leftover; warn if it stays (a mount, a file that NFS keeps for a reader)."""
    gone = directory
    try:
        if directory.name.endswith(_ASIDE) or not directory.name.endswith(UNFINISHED):  # or readers would find half
            gone = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}{UNFINISHED}")
            directory.rename(gone)
        if gone.is_symlink():  # the user has moved the checkpoint elsewhere: only the link is ours
            gone.unlink()
        else:
            shutil.rmtree(gone)
    except OSError as error:
        warn_once(f"{gone} can't be removed, and stays: {error}")


def lock(path: Path) -> None:
    """Make this process the only one that saves into a directory, until it ends: the system frees its locks."""
    file = path.resolve() / _LOCK
    if file in _held and file.exists() and os.path.samestat(os.fstat(_held[file]), file.stat()):
        return
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    said = file.read_text(errors="replace")[:200]
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if said and not said.startswith("process "):
            warn_once(f"{file} is broken, and no process holds it: this job takes it over")
    except BlockingIOError:
        os.close(fd)
        raise CheckpointError(
            f"another job saves into {path}: {said!r}, as {file} says. Two jobs would mix up their checkpoints: give "
            "each its own directory, or end that job"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            os.close(fd)
            raise
        warn_once(f"{file} is on a file system without locks: make sure that one job at a time saves there")
    _held[file] = fd
    if len(_held) > _MOST:
        os.close(_held.pop(next(iter(_held))))  # of the first directory
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk: the lock counts, not the text
        os.truncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)


def _forget_locks() -> None:
    """Close the locks in a forked child: they are its parent's, and end with it."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget_locks)
