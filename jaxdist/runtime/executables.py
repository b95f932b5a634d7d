"""One rank of a host compiles a program, which takes its lock; the others load what it made, in a millisecond or two.

A program is known by its text, the compiler's options and versions; so ranks whose programs differ compile each one.
Nobody depends on another to go on: the kernel frees the lock when its holder dies, and who has waited for as long as a
collective may, finds nothing, or something that can't be loaded, compiles as without all this.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import io
import os
import platform
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from jaxdist import compat
from jaxdist.communicators.handles import put_in, take_out
from jaxdist.control import scratch

_JAXLIB = version("jaxlib").encode()
_PREFIX = "jaxdist-programs-"
_MOST = 1 << 28  # bytes of an executable: one that is larger holds arrays, and is compiled by each rank
_ALONE = b""  # in place of an executable: each rank compiles it


class LoweredProgram(NamedTuple):
    """What `jax.jit` compiles."""

    backend: Any  # for which
    module: ir.Module  # StableHLO
    devices: Any  # that it runs on
    options: Any  # of the compiler
    callbacks: Sequence[Any]  # functions of this process that it calls

    def copy(self) -> LoweredProgram:
        """One whose module can be changed."""
        return self._replace(module=ir.Module.parse(_bytecode(self.module), self.module.context))

    def key(self) -> str:
        """Equal keys, equal executables, but for the number of the device, if it runs on one."""
        module = self.copy().module
        with module.context:  # what it computes, not where in the sources that was written
            PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        options = compat.for_any_device(self.options).SerializeAsString()
        parts = [_bytecode(module), options, _JAXLIB, self.backend.platform_version.encode()]
        # XLA divides the work of a program among so many threads.
        parts += [os.environ.get(name, "").encode() for name in ("XLA_FLAGS", "PJRT_NPROC", "NPROC")]
        parts.append(b"%d" % len(os.sched_getaffinity(0)))
        return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).hexdigest()


def _bytecode(module: ir.Module) -> bytes:
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


def offer(local_rank: int) -> str:
    """A folder for the ranks of this machine, made by the first of them; "": another rank does."""
    if local_rank:
        return ""
    try:
        folder, _ = scratch.make(_PREFIX)  # in use as long as this process lives
    except OSError:
        return ""
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def share(timeout: float, folders: Sequence[str]) -> None:
    """From now on share what is compiled with the ranks of this machine, by the folder that one of them made."""
    folder = next(filter(None, folders), "")
    if len(folders) == 1 or not folder:
        return
    try:
        found = os.lstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700 or not stat.S_ISDIR(found.st_mode):
            return  # what lies in it is run as code
        scratch.use(folder)
    except OSError:  # another file system: containers
        return
    compat.on_compile(Executables(timeout, Path(folder)), LoweredProgram)


class Executables:
    """Compiles programs for the CPU devices of one machine's ranks, each once."""

    def __init__(self, timeout: float, folder: Path):
        self._timeout, self._folder = timeout, folder

    def __call__(self, compile_: Callable[[LoweredProgram], Any], program: LoweredProgram) -> Any:
        """The executable of a program."""
        if program.callbacks or program.backend.platform != "cpu":  # callbacks are functions of this process
            return compile_(program)
        portable = program.copy()
        handles = take_out(portable.module)
        entry = self._folder / portable.key()
        try:
            lock = self._turn(entry)
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
            if found == _ALONE:
                return None
            return program.backend.deserialize_executable(put_in(found, handles), program.devices, program.options)
        except (OSError, jax.errors.JaxRuntimeError):
            return None

    def _turn(self, entry: Path) -> int | None:
        """A lock once it is this rank's turn to make a program; None: it is there, or was waited for too long."""
        lock = os.open(f"{entry}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up_at, pause = time.monotonic() + self._timeout, 0.002
        while not entry.exists():
            if _locked(lock):
                if entry.exists():
                    break
                return lock
            if time.monotonic() > give_up_at:
                break
            time.sleep(pause)
            pause = min(0.05, 1.3 * pause)
        _unlock(lock)
        return None


def processor() -> bytes:
    """What programs that are compiled on this machine may ask of another's."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.platform().encode()
    names = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.startswith(names)).encode()


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
