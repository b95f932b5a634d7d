"""The directory of a run's checkpoints: its steps, its lock, adding and removing checkpoints."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

from jaxdist.checkpoint import manifest
from jaxdist.errors import CheckpointError
from jaxdist.text import say_once

ITEM = "default"  # orbax's CheckpointManager gives this name to the only item of a step
UNFINISHED = ".orbax-checkpoint-tmp"  # orbax, too, treats such directories as unfinished
_SPECIAL = re.compile(r"[*?\[\]\\]|:/")  # characters of a pattern or a URL
_LOCK = ".jaxdist-lock"
_held: dict[Path, int] = {}  # lock files and their descriptors
passed_over: set[Path] = set()  # damaged checkpoints, skipped for older ones; this process will reach their steps again


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory of checkpoints."""
    if not os.fspath(path):
        raise ValueError("the path of the checkpoints is empty: give a directory ('.' is the current one)")
    found = Path(path).expanduser().absolute()
    str(found).encode()  # raises ValueError for a name that is not UTF-8
    if special := _SPECIAL.search(str(found)):
        raise ValueError(
            f"{path}: expected a directory of a file system, not a URL, and orbax gives {special[0]!r} "
            "a special meaning: use a directory without * ? [ ] \\ and :/ that all processes share"
        )
    return found


def steps(path: Path) -> list[int]:
    """Return the steps in a directory in ascending order, including damaged ones."""
    names, found = set[str](), list[int]()
    while True:  # until the names stay the same: a job may add and remove steps meanwhile
        before = names
        try:
            names = {p.name for p in path.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return []
        if names == before:
            return sorted(found)
        numbers = {int(name) for name in names if name.isdecimal() and str(int(name)) == name}
        found = [n for n in numbers if any((path / str(n) / part).exists() for part in (manifest.FILE, ITEM))]


def sync_to_disk(directory: Path) -> None:
    """Flush a directory, so that a rename in it survives a power failure."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tidy(final: Path, keep: int | None) -> None:
    """Remove leftovers of killed jobs, and old checkpoints. The new one is safe already."""
    path, step = final.parent, int(final.name)
    for left in path.glob(f"*{UNFINISHED}"):
        discard(left)
    passed_over.discard(final.resolve())
    others = [s for s in steps(path) if s != step and (path / str(s)).resolve() not in passed_over]
    if others and others[-1] > step:
        say_once(
            f"step {others[-1]} in {path} is higher than the step just saved, and restore takes the "
            "highest. To continue from here, remove the higher ones or save into a different directory"
        )
    for old in others[: max(0, len(others) + 1 - keep)] if keep else []:
        discard(path / str(old))


def discard(directory: Path) -> None:
    """Remove a checkpoint or leftover; warn if it stays (a link, a mount, a file that NFS keeps)."""
    gone = directory
    try:
        if not directory.name.endswith(UNFINISHED):  # or readers find half
            gone = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}{UNFINISHED}")
            directory.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        say_once(f"{gone} can't be removed, and stays: {error}")


def lock(path: Path) -> None:
    """Make this process the only one to save into a directory, until it ends."""
    file = path.resolve() / _LOCK
    if file in _held and file.exists() and os.path.samestat(os.fstat(_held[file]), file.stat()):  # still the same
        return
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    said = os.pread(fd, 200, 0).decode(errors="replace")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(fd)
            raise CheckpointError(
                f"a different job saves into {path}: {said!r}, according to {file} ({error}). To keep checkpoints "
                "apart, give each job its own directory, or end that job"
            ) from None
        say_once(f"{file} is on a file system without locks: make sure that one job at a time saves there")
    _held[file] = fd
    with contextlib.suppress(OSError):  # on a full disk: the lock counts, not the text
        os.truncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _forget_locks() -> None:
    """Close the locks in a forked child: they are its parent's."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget_locks)
