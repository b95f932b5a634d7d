"""One job saves into a directory at a time: a lock that outlives neither its owner nor, for long, its owner's host.

`.jaxdist-lock` in the directory names the owner. The owner renews it (its time of modification) every few seconds and
removes it at its end. Another job takes it over at once if the owner was a process of this machine and is dead, and
else when it was not renewed for a minute. Times are compared by the file system's own clock. An owner that was
suspended for longer looks before it gives a checkpoint its name, and gets the error then.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

from jaxdist.errors import CheckpointError

NAME = ".jaxdist-lock"
LEASE = 60.0  # seconds after which a lock that was not renewed is nobody's
_RENEW = 10.0
_LOOK = 0.25

_locks: dict[Path, Lock] = {}
os.register_at_fork(after_in_child=_locks.clear)  # they are the parent's, who lives on when the child ends


class Lock:
    """A directory's, held by this process."""

    def __init__(self, directory: Path, token: str):
        self._file, self._token, self._ended = directory / NAME, token, threading.Event()
        threading.Thread(target=self._renew, name="jaxdist-lock", daemon=True).start()

    def held(self) -> bool:
        """Whether it is still this process's: it may have been removed, or taken while this host was suspended."""
        return _read(self._file)[0].get("token") == self._token

    def release(self) -> None:
        self._ended.set()
        if self.held():
            self._file.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW):
            with contextlib.suppress(OSError):  # a file server that is away for a while
                if not self.held():
                    return
                os.utime(self._file)  # now, as the file system sees it


def take(directory: Path, patience: float) -> None:
    """Make sure that this process owns a directory."""
    directory = directory.resolve()
    own = _locks.get(directory)
    if own is not None and own.held():
        return
    _locks.pop(directory, None)
    file, token = directory / NAME, secrets.token_hex(8)
    end = time.monotonic() + patience
    seen: float | None = None  # its time of modification, when first looked at
    while not _create(file, token):
        owner, modified = _read(file)
        if modified is None:
            continue  # it was released just now
        age = _now(directory) - modified
        renewed = seen is not None and modified != seen
        seen = modified
        dead = _is_dead(owner)
        if dead or age > LEASE:
            _break(file, owner)
        elif renewed or dead is False or time.monotonic() > end:
            raise CheckpointError(
                f"another job saves into {directory}: process {owner.get('pid', '?')} on {owner.get('host', '?')}, "
                f"since {owner.get('since', '?')}. Two jobs would mix up their checkpoints: give each a directory of "
                f"its own, or end that one. (If it is dead already, its lock {file} counts for {LEASE:g} s after it "
                f"was last renewed; that was {max(0.0, age):.0f} s ago)"
            )
        else:
            time.sleep(_LOOK)
    _locks[directory] = Lock(directory, token)


def release_all() -> None:
    """At the end of the process."""
    while _locks:
        with contextlib.suppress(OSError):
            _locks.popitem()[1].release()


def _create(file: Path, token: str) -> bool:
    """Whether the lock was free, and is now this process's."""
    try:
        fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    text = json.dumps({"token": token, "host": socket.gethostname(), "since": since, **_process()})
    try:
        with os.fdopen(fd, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(fd)
    except BaseException:  # a full disk: half a lock would keep everyone out, this process too
        file.unlink(missing_ok=True)
        raise
    return True


def _read(file: Path) -> tuple[dict[str, Any], float | None]:
    """What a lock says, and when it was last renewed; None: there is none. Opened: NFS then asks the server."""
    try:
        if file.is_symlink():
            return {}, 0.0  # none of ours, wherever it leads: of long ago
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as lock:  # a pipe is not waited for
            about = os.fstat(lock.fileno())
            if not stat.S_ISREG(about.st_mode):
                return {}, 0.0
            text = lock.read()
    except FileNotFoundError:
        return {}, None
    try:
        content = json.loads(text)
    except ValueError:  # its owner is just writing it, or died then
        content = {}
    return (content if isinstance(content, dict) else {}), about.st_mtime


def _now(directory: Path) -> float:
    """By the clock that file times are made with."""
    probe = directory / f"{NAME}-{secrets.token_hex(8)}"
    try:
        with probe.open("x") as file:
            return os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _break(file: Path, owner: dict[str, Any]) -> None:
    """Take away the lock of a dead owner, and no other: someone else may do the same just now."""
    taken = file.with_name(f"{NAME}-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        file.rename(taken)
        if _read(taken)[0] != owner:
            with contextlib.suppress(OSError):  # put back, unless there is a newer one again: its owner will notice
                os.link(taken, file)
        taken.unlink()


# --- who is alive


def _process(pid: int | None = None) -> dict[str, Any]:
    """This process, so that another one of the same machine can tell whether it lives."""
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "started": _started(pid)[0], "machine": _machine()}


def _machine() -> str:
    """The boot and the space of process numbers (containers have their own); "": not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


def _started(pid: int) -> tuple[int | None, str]:
    """In clock ticks after the boot, and the state of the process; None: it can't be read."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(after_name[19]), after_name[0]
    except (OSError, ValueError, IndexError):
        return None, ""


def _is_dead(owner: dict[str, Any]) -> bool | None:
    """None: this process can't know."""
    pid, machine = owner.get("pid"), owner.get("machine")
    if not machine or machine != _machine() or not isinstance(pid, int):
        return None
    if pid == os.getpid():
        return True  # this process has not taken it: a copy of a directory, or one that has left its number to this one
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    started, state = _started(pid)
    return state in ("Z", "X") or (started is not None and started != owner.get("started"))
