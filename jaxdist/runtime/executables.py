"""One rank compiles a program; the others get what it made over the control channel, in a millisecond or two.

A program is known by its text, the compiler's options and versions, and the processor; so ranks whose programs differ
compile each one. A rank that has waited for as long as a collective may, or can't load what it got, compiles alone.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import os
import platform
import queue
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
from jaxdist.control.channel import Control

_JAXLIB = version("jaxlib").encode()
_PROGRAM = "program"
_MOST = 1 << 26  # bytes of an executable: one that is larger holds arrays, and is compiled by each rank
_ALONE = b""  # in place of an executable: each rank compiles it
_LOOK_SECONDS = 1.0


class LoweredProgram(NamedTuple):
    """What `jax.jit` compiles."""

    backend: Any  # for which
    module: ir.Module  # StableHLO
    devices: Any  # that it runs on
    options: Any  # of the compiler
    callbacks: Sequence[Any]  # functions of this process that it calls

    def copy(self) -> "LoweredProgram":
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
        parts += [b"%d" % len(os.sched_getaffinity(0)), processor()]
        return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).hexdigest()


def _bytecode(module: ir.Module) -> bytes:
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


class Executables:
    """Compiles programs for the CPU devices of a job's ranks, each once: rank 0 says who does, and passes it on."""

    def __init__(self, control: Control, timeout: float):
        self._control, self._timeout = control, timeout
        self._questions = itertools.count()
        # Of rank 0, on the thread of its channel: what was made, and who waits for what is being made.
        self._made: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, str]]] = {}
        self._sent: dict[str, int] = {}  # to how many ranks
        if control.rank == 0:
            control.listen(_PROGRAM, self._hear)

    def __call__(self, compile_: Callable[[LoweredProgram], Any], program: LoweredProgram) -> Any:
        """The executable of a program."""
        if program.callbacks or program.backend.platform != "cpu":  # callbacks are functions of this process
            return compile_(program)
        portable = program.copy()
        handles = take_out(portable.module)
        key = portable.key()
        found = self._ask(key)
        if found is not None:
            return _loaded(found, program, handles) or compile_(program)
        made = _ALONE
        try:
            executable = compile_(portable if handles else program)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # not every one can be serialized
                text = executable.serialize()
                made = text if len(text) <= _MOST else _ALONE
        finally:
            self._control.post(_PROGRAM, (key, made, ""), to=0)  # the others wait for it
        return executable if not handles else _loaded(made, program, handles) or compile_(program)

    def _ask(self, key: str) -> bytes | None:
        """What another rank has made; None: it is this rank's turn to make it."""
        control, name = self._control, f"{_PROGRAM} {next(self._questions)}"
        if not control.is_owner():  # a forked data worker
            return _ALONE
        control.post(_PROGRAM, (key, None, name), to=0)
        give_up_at = time.monotonic() + self._timeout
        while time.monotonic() < give_up_at and not control.over.is_set():  # then rank 0 may be gone
            with contextlib.suppress(queue.Empty):
                return control.take(name, 0, _LOOK_SECONDS)
        return _ALONE

    def _hear(self, rank: int, told: tuple[str, bytes | None, str]) -> None:
        key, made, name = told
        if made is not None:
            self._made[key] = made
            for other, question in self._waiting.pop(key, ()):
                self._pass_on(key, question, other)
        elif key in self._made:
            self._pass_on(key, name, rank)
        elif key in self._waiting:
            self._waiting[key].append((rank, name))
        else:
            self._waiting[key] = []
            self._control.put(name, None, to=rank)

    def _pass_on(self, key: str, name: str, rank: int) -> None:
        """Send an executable to a rank, and forget it once every rank has it."""
        self._control.put(name, self._made[key], to=rank)
        self._sent[key] = self._sent.get(key, 0) + 1
        if self._sent[key] == self._control.size - 1:
            del self._made[key], self._sent[key]


def _loaded(made: bytes, program: LoweredProgram, handles: Sequence[int]) -> Any:
    """What a rank has compiled; None: it is not available."""
    if made == _ALONE:
        return None
    try:
        return program.backend.deserialize_executable(put_in(made, handles), program.devices, program.options)
    except jax.errors.JaxRuntimeError:
        return None


@functools.cache
def processor() -> bytes:
    """What programs that are compiled on this machine may ask of another's."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.platform().encode()
    names = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.startswith(names)).encode()
