"""Starts a job's processes, passes signals on to them, and leaves none behind.

Each process leads a process group of its own, so that what it started ends with it, and asks the
kernel for a signal when this process dies, so that even SIGKILL here leaves no orphans.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from jaxdist.control import guard
from jaxdist.launch.output import LineFilter, Pump, report_lost, say

# After one rank failed its peers have this long to end by SIGTERM before SIGKILL; they may be
# stuck in a collective. After the user's own signal they have longer, to write a checkpoint.
FAILURE_GRACE_S = 2.0
SIGNAL_GRACE_S = 10.0
# What a rank started and left behind may hold its pipe open; for so long its silence is waited for.
_SILENCE_S = 1.0
# So long a command that failed has to say because of which one, and that one to end, before it is taken for the first.
_HEARD_S = 1.0
# So long the last lines of a job that failed wait for somebody to read them; those of others as long as it takes.
_UNREAD_S = 3.0
_LOOK_S = 1.0  # so often we look whether somebody reads
# What a rank has left behind has as long to end by SIGTERM (some of it cleans up what is shared), then by SIGKILL.
_LEFT_S = 1.0

# Becomes the program that it is told, after asking for a signal when its parent dies (PR_SET_PDEATHSIG, linux/prctl.h).
# A program of its own, and no function between fork and exec: this process may have JAX's threads, and warns of forks.
_BECOME = """
import ctypes, os, signal, sys
parent, number, *command = sys.argv[1:]
prctl = getattr(ctypes.CDLL(None), "prctl", None)  # absent off Linux: only the SIGKILL case is lost
if prctl is not None:
    prctl(1, int(number))
    if os.getppid() != int(parent):  # it died before the call
        sys.exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and so would the program
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"jaxdist: {command[0]}: {error.strerror}")
"""


@dataclass(frozen=True)
class Command:
    """One process of a job.

    Attributes:
        name: what messages call it.
        argv: its command line.
        environment: variables on top of this process's.
        line_filter: what becomes of each line it writes; None leaves it the terminal.
        death_signal: what it is sent when this process dies.
        orders: what it is sent on its standard input, which stays open: signals but SIGKILL follow
            there, as a line with the number, instead of going to its process group. None leaves it
            the standard input of this process.
        failure_mark: a line on its standard error that begins so goes on with an exit code: a part
            of the command failed and the rest of it is about to end.
        last_words: a line that matches says that the job failed; the command has as long to end as
            after a signal.
        cause: a line on its standard error that matches says that this command is about to end because another one
            failed, whose name is the first group. These three need a `line_filter`.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    line_filter: LineFilter | None = None
    death_signal: signal.Signals = signal.SIGKILL
    orders: bytes | None = None
    failure_mark: bytes | None = None
    last_words: re.Pattern[bytes] | None = None
    cause: re.Pattern[bytes] | None = None


class Failed(NamedTuple):
    """The first command of a job that failed: its name, and its exit code as of a shell."""

    name: str
    code: int


@dataclass(frozen=True)
class _Exited:
    index: int
    code: int  # as of a shell: 128 + n for signal n
    because_of: str = ""  # another one's failure, as it has said


@dataclass(frozen=True)
class _PartFailed:
    index: int
    code: int


@dataclass(frozen=True)
class _LastWords:
    """Of a command that should now end by itself."""


@dataclass(frozen=True)
class _Signal:
    number: int


_Event = _Exited | _PartFailed | _LastWords | _Signal


def run_job(
    commands: Sequence[Command],
    *,
    on_start: Callable[[], None] | None = None,
    on_failure: Callable[[Failed], None] | None = None,
) -> int:
    """Runs the commands together; returns 0, or the exit code of the first that failed, or that of lost output.

    When one fails the others are ended within seconds. SIGINT, SIGTERM and SIGHUP are passed on,
    unless they were ignored; a second one ends the job at once. Call it from the main thread.

    Args:
        commands: what to run.
        on_start: called once signals are caught.
        on_failure: called with that one as soon as it is known, before the others have ended.
    """
    # SimpleQueue.put is reentrant, so that a signal handler may call it.
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    asked, over = threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        events.put(_Signal(number))
        asked.set()

    # What is ignored stays ignored, here and in the ranks: `nohup`, a shell's job in the background.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in caught}
    running: dict[int, subprocess.Popen[bytes]] = {}
    pumps: list[Pump] = []
    started: list[subprocess.Popen[bytes]] = []
    leaders: list[guard.Name] = []
    verdict = 1
    try:
        if on_start is not None:
            on_start()
        for index, command in enumerate(commands):
            process = _start(command)
            started.append(process)
            leaders += [seen.name] if (seen := guard.look(process.pid)) else []
            running[index] = process
            said: list[bytes] = []
            its = _pump_output(process, command, index, events, said)
            pumps += its
            threading.Thread(target=_await, args=(process, index, events, its, said), daemon=True).start()
        threading.Thread(target=_relieve, args=(pumps, leaders, asked, over), daemon=True).start()
        verdict = _supervise(commands, running, events, on_failure)
    finally:
        over.set()
        _end_sessions(leaders)
        for process in started:
            _signal_group(process, signal.SIGKILL)
        _drain(pumps, events, patient=verdict == 0)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
    lost = report_lost(pumps)
    return verdict or lost


def _supervise(
    commands: Sequence[Command],
    running: dict[int, subprocess.Popen[bytes]],
    events: "queue.SimpleQueue[_Event]",
    on_failure: Callable[[Failed], None] | None,
) -> int:
    verdict = 0
    kill_at: float | None = None
    while running:
        try:
            patience = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            event = events.get(timeout=patience)
        except queue.Empty:
            _signal_all(commands, running, signal.SIGKILL)
            kill_at = time.monotonic() + 1.0
            continue
        if isinstance(event, _LastWords):
            kill_at = kill_at or time.monotonic() + SIGNAL_GRACE_S
            continue
        if isinstance(event, _Signal):
            again = kill_at is not None
            verdict = verdict or 128 + event.number
            _signal_all(commands, running, signal.SIGKILL if again else signal.Signals(event.number))
            if event.number == signal.SIGINT and not again:
                say("interrupted: ending the job. (Ctrl-C again: at once)")
            kill_at = kill_at or time.monotonic() + SIGNAL_GRACE_S
            continue
        if isinstance(event, _Exited):
            running.pop(event.index).wait()
        if event.code == 0 or verdict != 0:
            continue
        if isinstance(event, _Exited):  # what others fail of may be seen before what has ended it
            event = _origin(commands, running, event)
        verdict = event.code
        who = (isinstance(event, _Exited) and event.because_of) or commands[event.index].name
        # Not the part's own command: it sees to its other parts, and a second signal would end them at once.
        others = {index: process for index, process in running.items() if index != event.index}
        _signal_all(commands, others, signal.SIGTERM)
        if on_failure is not None:
            on_failure(Failed(who, verdict))
        if running:
            rest = f"; ending the other {len(others)}" if others else ""
            say(f"{who} failed with exit code {verdict}{rest}")
            kill_at = time.monotonic() + FAILURE_GRACE_S
    return verdict


def _origin(commands: Sequence[Command], running: Mapping[int, subprocess.Popen[bytes]], seen: _Exited) -> _Exited:
    """The end of the command because of which another one was seen to end, if it has ended or does so now."""
    give_up_at = time.monotonic() + _HEARD_S
    named = [i for i in running if commands[i].name == seen.because_of]
    while True:
        for i, process in running.items():
            if (code := _crashed(process)) or (i in named and (code := _ended(process, os.WNOHANG))):
                return _Exited(i, code)
        if not named or time.monotonic() > give_up_at:
            return seen
        time.sleep(0.01)


def _await(
    process: "subprocess.Popen[bytes]",
    index: int,
    events: "queue.SimpleQueue[_Event]",
    pumps: Sequence[Pump],
    said: Sequence[bytes],
) -> None:
    code = _ended(process)
    give_up_at = time.monotonic() + _HEARD_S
    for pump in pumps if code else ():  # its last words may say whose failure it is
        pump.join(max(0.0, give_up_at - time.monotonic()))
    events.put(_Exited(index, code, b"".join(said[-1:]).decode()))


def _ended(process: "subprocess.Popen[bytes]", options: int = 0) -> int:
    """The exit code of a command, as of a shell, once it has ended; 0 with WNOHANG if it runs.

    The command is left for `Popen.wait`: between the system's answer and Popen's own record of it, another thread would
    learn nothing.
    """
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | options)
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status


def _crashed(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of a command that has ended by a signal which no other command's failure leads to; else 0."""
    crashes = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    code = _ended(process, os.WNOHANG)
    return code if code - 128 in crashes else 0


def _start(command: Command) -> "subprocess.Popen[bytes]":
    pipe = None if command.line_filter is None else subprocess.PIPE
    become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(int(command.death_signal))]
    process = subprocess.Popen(
        [*become, *command.argv],
        env={**os.environ, **command.environment},
        stdin=None if command.orders is None else subprocess.PIPE,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
    )
    if command.orders is not None:
        _order(process, command.orders)
    return process


def _relieve(
    pumps: Sequence[Pump], leaders: Collection[guard.Name], asked: threading.Event, over: threading.Event
) -> None:
    """Frees an mpirun that waits for somebody to read what it writes: it would not see to a signal or a rank's end."""
    written: list[int] = []
    ranks = set[guard.Name]()  # that ran while nobody read
    while not over.wait(_LOOK_S):
        before, written = written, [pump.written for pump in pumps]
        if before != written or not any(pump.writing for pump in pumps):
            ranks.clear()
            continue
        parents = {leader.pid for leader in leaders}
        running = {seen.name for seen in guard.running() if seen.parent in parents}
        ranks |= running
        if asked.is_set() or ranks != running or not ranks:
            for pump in pumps:
                if pump.writing:
                    pump.relieve()


def _drain(pumps: Sequence[Pump], events: "queue.SimpleQueue[_Event]", *, patient: bool) -> None:
    """Lets the last lines out, unless a signal says to stop.

    Args:
        pumps: of all processes, which have ended.
        events: where signals come.
        patient: however slowly they are read (`| less`).
    """
    quiet = unread = 0.0
    while waiting := [pump for pump in pumps if pump.is_alive()]:
        begin, written = time.monotonic(), sum(pump.written for pump in pumps)
        waiting[0].join(timeout=0.05)
        spent = time.monotonic() - begin
        if not any(pump.writing for pump in waiting):
            quiet += spent
        elif written == sum(pump.written for pump in pumps):
            unread += spent
        else:
            unread = 0.0
        if quiet > _SILENCE_S or (unread > _UNREAD_S and not patient):
            return
        with contextlib.suppress(queue.Empty):
            if isinstance(events.get_nowait(), _Signal):
                return


def _pump_output(
    process: "subprocess.Popen[bytes]",
    command: Command,
    index: int,
    events: "queue.SimpleQueue[_Event]",
    said: list[bytes],
) -> list[Pump]:
    """Passes its output on; `said` gets the name of the command because of which it ends."""
    line_filter, mark, last_words = command.line_filter, command.failure_mark, command.last_words
    if line_filter is None:
        return []

    def shown(line: bytes) -> bytes | None:
        if last_words is not None and last_words.search(line):
            events.put(_LastWords())
        return line_filter(line)

    def shown_of_errors(line: bytes) -> bytes | None:
        if mark is not None and line.startswith(mark):
            events.put(_PartFailed(index, int(line.removeprefix(mark))))
            return None
        if command.cause is not None and (match := command.cause.match(line)):
            said.append(match.group(1))
        return shown(line)

    assert process.stdout is not None
    assert process.stderr is not None
    pumps = [Pump(process.stdout, sys.stdout, shown), Pump(process.stderr, sys.stderr, shown_of_errors)]
    for pump in pumps:
        pump.start()
    return pumps


def _signal_all(
    commands: Sequence[Command], running: Mapping[int, "subprocess.Popen[bytes]"], number: signal.Signals
) -> None:
    for index, process in running.items():
        if commands[index].orders is None or number is signal.SIGKILL:
            _signal_group(process, number)
        else:
            _order(process, b"%d\n" % number)


def _order(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.write(line)
        process.stdin.flush()


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _end_sessions(leaders: Collection[guard.Name]) -> None:
    """Ends what a rank itself started and left behind, also what left its group, as mpirun's ranks and its ssh do."""

    def left() -> list[guard.Name]:
        found = guard.running()
        # One that got the number of a command which ended long ago may lead a session of its own.
        others = {seen.name.pid for seen in found if seen.name not in leaders}
        sessions = {leader.pid for leader in leaders} - others
        return [seen.name for seen in found if seen.session in sessions]

    for number in (signal.SIGTERM, signal.SIGKILL):
        told, give_up_at = set[guard.Name](), time.monotonic() + _LEFT_S
        while names := left():
            for name in names:
                if name not in told:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(name.pid, number)
            told.update(names)
            if time.monotonic() > give_up_at:
                break
            time.sleep(0.02)
