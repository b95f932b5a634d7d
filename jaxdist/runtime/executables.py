"""One rank of a host compiles a program; the others load what it made.

Every rank compiles the same programs: those of the steps, and all the small ones before them (initialisers, `jnp`
functions). Here the first that comes to a program takes its lock, compiles, and puts the executable into a folder of
the job; the others wait and load it, which takes a millisecond or two. A program is known by its text, the compiler's
options and versions; so ranks whose programs differ compile each its own. The folder is on one machine: executables are
for its processor.

Nobody depends on another to go on: the lock is the kernel's, which frees it when its holder dies, and who has waited
for as long as a collective may, finds nothing, or something that can't be loaded, compiles as without all this.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import socket
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdist import compat
from jaxdist.communicators.handles import put_in, take_out
from jaxdist.control import scratch
from jaxdist.control.channel import Control
from jaxdist.runtime.lowered import LoweredProgram

_PREFIX = "jaxdist-programs-"
_SAY_SECONDS = 10.0  # of waiting, before a line says so; then again after 2, 4, 8, ... times as long
_MOST = 1 << 28  # bytes of an executable: one that is larger holds arrays, and is compiled by each rank
Compile = Callable[[LoweredProgram], Any]
_ALONE = b""  # in place of an executable: each rank compiles it


class Offer(NamedTuple):
    """What a rank tells the others before any backend starts."""

    machine: str  # the same for processes that run under one kernel
    folder: str = ""  # that it made for the executables of its machine; "": another rank does


def offer(local_rank: int) -> Offer:
    """Make a folder for the ranks of this machine, on the first of them."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    if local_rank or os.environ.get("JAXDIST_COMPILE") == "each":
        return Offer(machine)
    try:
        folder, _ = scratch.make(_PREFIX)  # in use as long as this process lives
    except OSError:
        return Offer(machine)
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return Offer(machine, folder)


def share(control: Control, timeout: float, offers: Sequence[Offer]) -> None:
    """From now on share what is compiled with the ranks of this machine, if they have a folder in common."""
    compat.same_cache_key_on_all_ranks(processor())
    machine = offers[control.rank].machine
    folder = next((o.folder for o in offers if o.machine == machine and o.folder), "")
    if sum(o.machine == machine for o in offers) == 1 or not folder:
        return
    try:
        found = os.lstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700 or not stat.S_ISDIR(found.st_mode):
            return  # what lies in it is run as code
        scratch.use(folder)
    except OSError:  # another file system: containers
        return
    compat.on_compile(Executables(control, timeout, Path(folder)), LoweredProgram)


class Executables:
    """Compiles programs for the CPU devices of one machine's ranks, each once."""

    def __init__(self, control: Control, timeout: float, folder: Path):
        self._control, self._timeout, self._folder = control, timeout, folder

    def __call__(self, compile_: Compile, program: LoweredProgram) -> Any:
        """The executable of a program."""
        if program.callbacks or program.backend.platform != "cpu":  # callbacks are functions of this process
            return compile_(program)
        if compat.writes_cache():  # JAX would not write what it took no time to load
            return compile_(program)
        portable = program.copy()
        handles = take_out(portable.module)
        entry = self._folder / _key(portable)
        try:
            lock = self._turn(entry, program)
        except OSError:  # the folder is gone, say
            return compile_(program)
        if lock is None:
            return self._loaded(entry, program, handles) or compile_(program)
        try:
            executable = compile_(portable if handles else program)
            _write(entry, _serialized(executable))
            return executable if not handles else self._loaded(entry, program, handles) or compile_(program)
        finally:
            if not entry.exists():  # the others would wait for one another
                _write(entry, _ALONE)
            _unlock(lock)

    def _loaded(self, entry: Path, program: LoweredProgram, handles: Sequence[int]) -> Any:
        """What a rank has compiled; None: it is not available."""
        try:
            found = entry.read_bytes()
            return program.load(put_in(found, handles)) if found != _ALONE else None
        except (OSError, jax.errors.JaxRuntimeError):
            return None

    def _turn(self, entry: Path, program: LoweredProgram) -> int | None:
        """Wait until a program is there, or nobody makes it.

        Returns A lock: this rank is to make it. None: it is there, or has been waited for too long.
        """
        lock = os.open(f"{entry}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        start, pause, say = time.monotonic(), 0.002, _SAY_SECONDS
        while not entry.exists():
            if _locked(lock):
                if entry.exists():
                    break
                os.pwrite(lock, f"{self._control.rank:<8}".encode(), 0)
                return lock
            waited = time.monotonic() - start
            if waited > self._timeout:
                break
            if waited > say:
                self._say(lock, entry, program.name, say)
                say *= 2
            time.sleep(pause)
            pause = min(0.05, 1.3 * pause)
        _unlock(lock)
        return None

    def _say(self, lock: int, entry: Path, name: str, seconds: float) -> None:
        """That ranks wait; one of them does."""
        with contextlib.suppress(OSError, ValueError):
            os.close(os.open(f"{entry}.{seconds:g}", os.O_CREAT | os.O_EXCL, 0o600))
            who = self._control.who(int(os.pread(lock, 8, 0)))
            self._control.say(f"has waited for {seconds:g} s: {who} compiles {name!r} for the ranks of this host")


def processor() -> bytes:
    """What programs that are compiled on this machine may ask of another's."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.platform().encode()
    names = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.startswith(names)).encode()


def _key(program: LoweredProgram) -> str:
    """Equal keys, equal executables."""
    # XLA divides the work of a program among so many threads.
    parts = [os.environ.get(name, "").encode() for name in ("XLA_FLAGS", "PJRT_NPROC", "NPROC")]
    parts += [b"%d" % len(os.sched_getaffinity(0)), *program.content()]
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).hexdigest()


def _serialized(executable: Any) -> bytes:
    try:
        made = executable.serialize()
    except jax.errors.JaxRuntimeError:  # not every one can be
        return _ALONE
    return made if len(made) <= _MOST else _ALONE


def _write(entry: Path, content: bytes) -> None:
    """All of it, or nothing."""
    draft = Path(f"{entry}.new")
    try:
        draft.write_bytes(content)
        draft.rename(entry)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # closed it may still be open in a forked child
    os.close(lock)
