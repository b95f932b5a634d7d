"""One job saves into a directory at a time: it holds the system's lock on `.jaxdist-lock` there.

The file says who that is. The system frees the lock when its owner ends, however it does, also on another host of a
file system that they share (NFS, Lustre).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
from pathlib import Path

from jaxdist.errors import CheckpointError

_NAME = ".jaxdist-lock"
_NONE_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without locks
_MOST = 64  # directories that a process owns at a time: each keeps a file open
_log = logging.getLogger("jaxdist")
_held: dict[Path, int] = {}  # descriptors, by directory


def take(directory: Path) -> None:
    """Make sure that this process owns a directory."""
    directory = directory.resolve()
    file = directory / _NAME
    if directory in _held and _is(_held[directory], file):
        return
    _release(directory)
    while True:
        fd = _opened(file)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(fd)
            os.close(fd)
            raise CheckpointError(
                f"another job saves into {directory}: {owner}. Two jobs would mix up their checkpoints: give each a "
                "directory of its own, or end that one"
            ) from None
        except OSError as error:
            if error.errno not in _NONE_HERE:
                os.close(fd)
                raise
            _log.warning("%s is on a file system without locks: see to it that one job at a time saves there", file)
        if _is(fd, file):
            break
        os.close(fd)  # its owner has removed it just now
    _held[directory] = fd
    if len(_held) > _MOST:
        _release(next(iter(_held)))  # that it came to first
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk: what counts is the lock
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)


def release_all() -> None:
    """At the end of the process."""
    for directory in list(_held):
        _release(directory)


def _release(directory: Path) -> None:
    fd, file = _held.pop(directory, None), directory / _NAME
    if fd is not None:
        with contextlib.suppress(OSError):
            if _is(fd, file):
                file.unlink()
        os.close(fd)


def _forget() -> None:
    """In a forked child: the locks are its parent's."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget)


def _opened(file: Path) -> int:
    """A descriptor of the file, in place of whatever else has its name."""
    with contextlib.suppress(FileNotFoundError):
        mode = file.lstat().st_mode
        if not stat.S_ISREG(mode):
            _log.warning("%s is no lock, and is removed", file)
            shutil.rmtree(file) if stat.S_ISDIR(mode) else file.unlink()
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _is(fd: int, file: Path) -> bool:
    """Whether a descriptor is that of what is at this path now."""
    try:
        return os.path.samestat(os.fstat(fd), file.lstat())
    except FileNotFoundError:
        return False


def _owner(fd: int) -> str:
    try:
        said = json.loads(os.pread(fd, 1000, 0))
        return f"process {said['pid']} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "a process that its lock file does not name"
