"""What a rank starts ends with it, whatever ends the rank: a process of its own sees to that.

Workers of a data set, their resource tracker and a script's own programs do not notice that the rank is gone. They
would live for ever, hold memory and GPUs, and keep an mpirun waiting that reads the pipes which they have inherited.

Linux can kill a child when its parent dies (PR_SET_PDEATHSIG), but only a child that asks for it, and already when the
*thread* that started it ends. So each rank has a guard: this file, run as a program that imports nothing but the
standard library. It waits for the end of the rank, looks for what the rank has left behind, and ends it. A guard that
is killed itself is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "JAXDIST_GUARDED"
"""A variable that is set to the `Name` of the rank: whatever program the rank starts has it in its environment."""

_SOFT_SECONDS = 1.0  # to end by SIGTERM
_HARD_SECONDS = 5.0  # for SIGKILL to take effect: a process may wait for a disk
_IN_ORDER = "over"
_AGAIN_SECONDS = 1.0  # from the end of a guard that was killed to the start of another
_POLL_SECONDS = 0.5  # where Linux is too old to tell of the end of a process that is not a child (5.3)

_started: list[int] = []  # in which process


class Name(NamedTuple):
    """A process, told from a later one that got its number."""

    pid: int  # its number
    born: int  # when it started, in ticks since the machine did

    def __str__(self) -> str:
        return f"{self.pid}.{self.born}"

    @classmethod
    def of(cls, text: str) -> Name:
        """What `str` has made of it."""
        pid, _, born = text.partition(".")
        return cls(int(pid), int(born))


class Seen(NamedTuple):
    """What /proc says of a process."""

    name: Name  # of it
    parent: int  # its number
    session: int  # its session


def look(pid: int) -> Seen | None:
    """A process that runs; None: it has ended."""
    try:
        # The name of the program, in parentheses, may have spaces and parentheses in it.
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else Seen(Name(pid, int(rest[18])), int(rest[0]), int(rest[2]))


def running() -> list[Seen]:
    """All processes of this machine."""
    return [seen for entry in Path("/proc").glob("[0-9]*") if (seen := look(int(entry.name))) is not None]


def start(*, whole_job: bool) -> None:
    """Have what this process starts from now on, and what it has started already, end with it.

    After an end in order (the interpreter's own, with its exit handlers) what is in a session of its own stays: it was
    meant to. Does nothing where there is no /proc, and in a second call.
    """
    own = look(os.getpid())
    if own is None or _started[-1:] == [os.getpid()]:
        return
    _started.append(os.getpid())
    os.environ[MARK] = str(own.name)
    # Not a child of this process for longer than a moment: scripts wait for all of theirs (`os.wait`).
    program = [sys.executable, "-I", "-S", __file__, str(own.name), str(own.session), "job" if whole_job else ""]
    try:
        guards = [_Guard(program)]
    except OSError:  # no more processes: the job matters more
        return

    def keep() -> None:
        while guards[-1].was_killed():
            time.sleep(_AGAIN_SECONDS)
            with contextlib.suppress(OSError, RuntimeError):  # no more processes, or the interpreter ends
                guards.append(_Guard(program))

    threading.Thread(target=keep, name="jaxdist-guard", daemon=True).start()
    # A child that is forked, and does not become another program, has no environment of its own.
    os.register_at_fork(after_in_child=lambda: guards[-1].tell(str(seen.name)) if (seen := look(os.getpid())) else None)
    atexit.register(lambda: guards[-1].tell(_IN_ORDER) if os.getpid() == own.name.pid else None)


class _Guard:
    """A guard that runs, as this process sees it: told of its children."""

    def __init__(self, program: Sequence[str]):
        reading, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                program, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)
        os.set_blocking(self._pipe, False)
        self._itself = os.fstat(self._pipe)
        for child in running():
            if child.parent == os.getpid():
                self.tell(str(child.name))

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            if self._is_open():
                os.write(self._pipe, f"{line}\n".encode())

    def was_killed(self) -> bool:
        """Wait until nobody reads what it is told; False: the pipe is gone, so that can't be known."""
        self._process.wait()
        waiting = select.poll()
        waiting.register(self._pipe, 0)
        try:
            waiting.poll()
            if known := self._is_open():
                os.close(self._pipe)
        except OSError:
            return False
        return known

    def _is_open(self) -> bool:
        """Whether the pipe is still there: a child, or the script, may have closed all it had, and opened others."""
        return os.path.samestat(self._itself, os.fstat(self._pipe))


# --- the guard itself


def main(rank: Name, session: int, whole_job: bool) -> None:
    """Wait for the end of a rank, and end what it has left behind."""
    started = set[Name]()
    in_order = _listen(rank, started)
    if in_order and not whole_job:
        return
    all_sessions = whole_job and not in_order
    begin, told = time.monotonic(), set[Name]()
    while time.monotonic() < begin + _SOFT_SECONDS + _HARD_SECONDS:
        left = [each for each in _left_behind(rank, started) if all_sessions or each.session == session]
        if not left:
            return
        soft = time.monotonic() < begin + _SOFT_SECONDS
        for each in left:
            if not (soft and each.name in told):
                with contextlib.suppress(OSError):
                    os.kill(each.name.pid, signal.SIGTERM if soft else signal.SIGKILL)
            told.add(each.name)
        time.sleep(0.1)


def _listen(rank: Name, started: set[Name]) -> bool:
    """Until the rank has ended; whether it did so in order. Collects what it says it has started."""
    waiting, rest, in_order = select.poll(), b"", False
    waiting.register(0, select.POLLIN)
    end: int | None = None
    with contextlib.suppress(OSError, AttributeError):
        end = os.pidfd_open(rank.pid)
        waiting.register(end, select.POLLIN)
    while True:
        seen = look(rank.pid)
        over = seen is None or seen.name != rank
        for source, _ in waiting.poll(0 if over else None if end is not None else 1000 * _POLL_SECONDS):
            if source != 0:
                over = True
                continue
            data = os.read(0, 1 << 16)
            if not data:
                waiting.unregister(0)
            *lines, rest = (rest + data).split(b"\n")
            in_order = in_order or _IN_ORDER.encode() in lines
            started.update(Name.of(line.decode()) for line in lines if b"." in line)
            if len(started) > 1000:  # most of them have ended
                started -= {name for name in started if (seen := look(name.pid)) is None or seen.name != name}
        if over:
            return in_order


def _left_behind(rank: Name, started: set[Name]) -> list[Seen]:
    """What has the mark or was told of, and what these have started."""
    mark = f"\0{MARK}={rank}\0".encode()
    all_of_them = {seen.name.pid: seen for seen in running()}
    known: dict[int, bool] = {os.getpid(): False, rank.pid: False}  # whether it is left behind

    def left(seen: Seen) -> bool:
        pid = seen.name.pid
        if pid not in known:
            known[pid] = False
            parent = all_of_them.get(seen.parent)
            known[pid] = seen.name in started or mark in _environment(pid) or (parent is not None and left(parent))
        return known[pid]

    return [seen for seen in all_of_them.values() if left(seen)]


def _environment(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:  # another user's
        return b""


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    if os.fork() == 0:
        main(Name.of(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3]))
