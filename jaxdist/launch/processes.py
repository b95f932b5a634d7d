"""Starts a job's processes, passes signals on to them, and leaves none behind."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from jaxdist.launch import proc
from jaxdist.launch.command import ASK_TO_END, Command, ask_to_end, crashed, end_sessions, ended, signal_group, start
from jaxdist.launch.output import Pump, report_lost, say

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
class _LastWords:
    """Of a command that should now end by itself."""


@dataclass(frozen=True)
class _Signal:
    number: int


_Event = _Exited | _LastWords | _Signal


def run_job(
    commands: Sequence[Command],
    *,
    on_failure: Callable[[Failed], None] | None = None,
) -> int:
    """Runs the commands together; returns 0, or the exit code of the first that failed, or that of lost output.

    When one fails the others are ended within seconds. SIGINT, SIGTERM and SIGHUP are passed on, unless they were
    ignored; a second one ends the job at once. Call it from the main thread.
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
    leaders: list[proc.Name] = []
    causes: list[bytes] = []  # of a failure, as ranks have told one another
    verdict = 1
    try:
        for index, command in enumerate(commands):
            process = start(command)
            started.append(process)
            leaders += [seen.name] if (seen := proc.look(process.pid)) else []
            running[index] = process
            said: list[bytes] = []
            its = _pump_output(process, command, events, said, causes)
            pumps += its
            threading.Thread(target=_await, args=(process, index, events, its, said), daemon=True).start()
        if any(command.end_signal is ASK_TO_END for command in commands):
            threading.Thread(target=_relieve, args=(pumps, leaders, asked, over), daemon=True).start()
        verdict = _supervise(commands, running, events, on_failure)
    finally:
        over.set()
        end_sessions(leaders)
        for process in started:
            signal_group(process, signal.SIGKILL)
        _drain(pumps, events, patient=verdict == 0)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
    if causes and verdict in range(1, 128):
        say(causes[0].decode(errors="replace"))  # once more: what was said meanwhile may be long
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
            _signal_all(running, signal.SIGKILL)
            kill_at = time.monotonic() + 1.0
            continue
        if isinstance(event, _LastWords):
            kill_at = kill_at or time.monotonic() + SIGNAL_GRACE_S
            continue
        if isinstance(event, _Signal):
            again = kill_at is not None
            verdict = verdict or 128 + event.number
            for index, process in running.items():
                if event.number == signal.SIGINT or again:
                    signal_group(process, signal.SIGKILL if again else signal.SIGINT)
                else:
                    ask_to_end(commands[index], process)
            if event.number == signal.SIGINT and not again:
                say("interrupted: ending the job. (Ctrl-C again: at once)")
            kill_at = kill_at or time.monotonic() + SIGNAL_GRACE_S
            continue
        running.pop(event.index).wait()
        if event.code == 0 or verdict != 0:
            continue
        event = _origin(commands, running, event)  # what others fail of may be seen before what has ended it
        verdict = event.code
        who = event.because_of or commands[event.index].name
        others = {index: process for index, process in running.items() if index != event.index}
        _signal_all(others, signal.SIGTERM)
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
            if (code := crashed(process)) or (i in named and (code := ended(process, os.WNOHANG))):
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
    code = ended(process)
    give_up_at = time.monotonic() + _HEARD_S
    for pump in pumps if code else ():  # its last words may say whose failure it is
        pump.join(max(0.0, give_up_at - time.monotonic()))
    events.put(_Exited(index, code, b"".join(said[-1:]).decode()))


def _relieve(
    pumps: Sequence[Pump], leaders: Collection[proc.Name], asked: threading.Event, over: threading.Event
) -> None:
    """Frees an mpirun that does not see to a signal or a rank's end: it waits for somebody to read what it writes, or
    somebody has stopped it."""
    written: list[int] = []
    ranks = set[proc.Name]()  # that ran while nobody read
    while not over.wait(_LOOK_S):
        before, written = written, [pump.written for pump in pumps]
        unread = before == written and any(pump.writing for pump in pumps)
        stopped = [leader for leader in leaders if (seen := proc.look(leader.pid)) is not None and seen.stopped]
        if not unread:
            ranks.clear()
        if not (unread or stopped):
            continue
        parents = {leader.pid for leader in leaders}
        running = {seen.name for seen in proc.running() if seen.parent in parents}
        for leader in stopped if not running else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader.pid, signal.SIGCONT)
        if not unread:
            continue
        ranks |= running
        if asked.is_set() or ranks != running or not ranks:
            for pump in pumps:
                if pump.writing:
                    pump.relieve()


def _drain(pumps: Sequence[Pump], events: "queue.SimpleQueue[_Event]", *, patient: bool) -> None:
    """Lets the last lines out, unless a signal says to stop."""
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
    events: "queue.SimpleQueue[_Event]",
    said: list[bytes],
    causes: list[bytes],
) -> list[Pump]:
    """Passes its output on; `said` gets the name of the command because of which it ends, `causes` why that has."""
    line_filter, last_words = command.line_filter, command.last_words
    if line_filter is None:
        return []

    def shown(line: bytes) -> bytes | None:
        if last_words is not None and last_words.search(line):
            events.put(_LastWords())
        return line_filter(line)

    def shown_of_errors(line: bytes) -> bytes | None:
        if command.cause is not None and (match := command.cause.match(line)):
            causes.append(match.group(1))
            said.append(match.group(2))
        return shown(line)

    assert process.stdout is not None
    assert process.stderr is not None
    pumps = [Pump(process.stdout, sys.stdout, shown), Pump(process.stderr, sys.stderr, shown_of_errors)]
    for pump in pumps:
        pump.start()
    return pumps


def _signal_all(running: Mapping[int, "subprocess.Popen[bytes]"], number: signal.Signals) -> None:
    for process in running.values():
        signal_group(process, number)
