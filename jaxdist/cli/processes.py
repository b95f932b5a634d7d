"""Starts a job's processes, passes signals on to them, and leaves none behind.

Each process leads a process group of its own, so that what it started ends with it, and asks the
kernel for a signal when this process dies, so that even SIGKILL here leaves no orphans.
"""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

# What to write for a line of a process: None drops it.
LineFilter = Callable[[bytes], bytes | None]

# After one rank failed its peers have this long to end by SIGTERM before SIGKILL; they may be
# stuck in a collective. After the user's own signal they have longer, to write a checkpoint.
FAILURE_GRACE_S = 2.0
SIGNAL_GRACE_S = 10.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # absent off Linux: only the SIGKILL case is lost


@dataclass(frozen=True)
class Program:
    """One process of a job.

    Attributes:
        name: what messages call it.
        command: its command line.
        environment: variables on top of this process's.
        line_filter: what becomes of each line it writes; None leaves it the terminal.
        death_signal: what it is sent when this process dies.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    line_filter: LineFilter | None = None
    death_signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class _Exit:
    index: int
    code: int  # as of a shell: 128 + n for signal n


@dataclass(frozen=True)
class _Signal:
    number: int


def run_job(programs: Sequence[Program]) -> int:
    """Runs the programs together; returns 0, or the exit code of the first that failed.

    When one fails the others are ended within seconds. SIGINT, SIGTERM and SIGHUP are passed on;
    a second one ends the job at once. Call it from the main thread.
    """
    # SimpleQueue.put is reentrant, so that a signal handler may call it.
    events: queue.SimpleQueue[_Exit | _Signal] = queue.SimpleQueue()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        events.put(_Signal(number))

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in caught}
    running: dict[int, subprocess.Popen[bytes]] = {}
    pumps: list[threading.Thread] = []
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index, program in enumerate(programs):
            process = _start(program)
            started.append(process)
            running[index] = process
            pumps += _pump_output(process, program.line_filter)
            threading.Thread(
                target=lambda i, p: events.put(_Exit(i, _shell_code(p.wait()))),
                args=(index, process),
                daemon=True,
            ).start()
        return _supervise(programs, running, events)
    finally:
        # Whatever a rank itself started and left behind is still in the rank's group.
        for process in started:
            _signal_group(process, signal.SIGKILL)
        for pump in pumps:
            pump.join(timeout=1.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(
    programs: Sequence[Program],
    running: dict[int, subprocess.Popen[bytes]],
    events: "queue.SimpleQueue[_Exit | _Signal]",
) -> int:
    verdict = 0
    kill_at: float | None = None
    while running:
        try:
            patience = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            event = events.get(timeout=patience)
        except queue.Empty:
            _signal_all(running, signal.SIGKILL)
            kill_at = time.monotonic() + 1.0
            continue
        match event:
            case _Signal(number):
                again = kill_at is not None
                verdict = verdict or 128 + number
                _signal_all(running, signal.SIGKILL if again else signal.Signals(number))
                kill_at = kill_at or time.monotonic() + SIGNAL_GRACE_S
            case _Exit(index, code):
                del running[index]
                if code == 0 or verdict != 0:
                    continue
                verdict = code
                if running:
                    rest = f"ending the other {len(running)}"
                    _say(f"{programs[index].name} failed with exit code {code}; {rest}")
                    _signal_all(running, signal.SIGTERM)
                    kill_at = time.monotonic() + FAILURE_GRACE_S
    return verdict


def _start(program: Program) -> "subprocess.Popen[bytes]":
    parent = os.getpid()

    def in_child() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, int(program.death_signal))
            if os.getppid() != parent:  # the parent died before the call
                os._exit(1)

    pipe = None if program.line_filter is None else subprocess.PIPE
    return subprocess.Popen(
        list(program.command),
        env={**os.environ, **program.environment},
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
        preexec_fn=in_child,
    )


def _pump_output(process: "subprocess.Popen[bytes]", line_filter: LineFilter | None) -> list[threading.Thread]:
    if line_filter is None:
        return []

    def pump(source: IO[bytes], target: IO[bytes]) -> None:
        for line in source:
            shown = line_filter(line if line.endswith(b"\n") else line + b"\n")
            if shown is not None:
                # One write per line: lines of several ranks don't mix.
                target.write(shown)
                target.flush()

    assert process.stdout is not None
    assert process.stderr is not None
    threads = [
        threading.Thread(target=pump, args=(process.stdout, sys.stdout.buffer), daemon=True),
        threading.Thread(target=pump, args=(process.stderr, sys.stderr.buffer), daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _signal_all(running: Mapping[int, "subprocess.Popen[bytes]"], number: signal.Signals) -> None:
    for process in running.values():
        _signal_group(process, number)


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _say(text: str) -> None:
    print(f"jaxdist run: {text}", file=sys.stderr, flush=True)
