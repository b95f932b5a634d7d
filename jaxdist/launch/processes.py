"""Starts a job's processes, passes signals on to them, and leaves none behind."""

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from jaxdist.launch.command import ASK_TO_END, Command, ask_to_end, end_sessions, exit_code, signal_group, start
from jaxdist.launch.output import NOT_WRITTEN, Pump, say

# After one rank failed its peers have this long to end by SIGTERM before SIGKILL; they may be
# stuck in a collective. After the user's own signal they have longer, to write a checkpoint.
FAILURE_GRACE_S = 2.0
SIGNAL_GRACE_S = 10.0
# So long a command that failed has to say because of which one, and that one to end, before it is taken for the first.
_HEARD_S = 1.0
# So long the last lines of a job that failed wait for somebody to read them; those of others as long as it takes. What
# a rank started and left behind may hold a pipe open, too.
_UNREAD_S = 3.0
_LOOK_S = 0.02

# What a rank says before it ends because of another one (`jaxdist.control`).
_CAUSE = re.compile(
    rb"\[jaxdist rank \d+\] ((rank \d+) \([^)]*, pid \d+\)"
    rb"(?:: | failed: | ended its script | was interrupted| died without | can't be reached ).*)"
)
# What Open MPI says that has lost a host. It would wait for ever for the other half to confirm.
_LOST = re.compile(rb"(prterun|mpirun) (?:has )?detected that one.*")
# No other command's failure leads to these.
_CRASHES = {128 + s for s in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}

Running = Mapping[int, "subprocess.Popen[bytes]"]


class Failed(NamedTuple):
    """The first command of a job that failed: its name, and its exit code as of a shell."""

    name: str
    code: int


def run_job(commands: Sequence[Command], *, on_failure: Callable[[Failed], None]) -> int:
    """Runs the commands together; returns 0, or the exit code of the first that failed, or that of lost output.

    When one fails the others are ended within seconds. SIGINT, SIGTERM and SIGHUP are passed on, unless they were
    ignored; a second one ends the job at once. Call it from the main thread.
    """
    heard: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    # What is ignored stays ignored, here and in the ranks: `nohup`, a shell's job in the background.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in caught}
    started: dict[int, subprocess.Popen[bytes]] = {}
    pumps: dict[int, list[Pump]] = {}
    causes: list[tuple[str, str]] = []  # of a failure, as ranks have told one another: in words, and whose
    verdict = 1
    try:
        for index, command in enumerate(commands):
            started[index] = start(command)
            pumps[index] = _pumps(started[index], command, causes)
        verdict = _supervise(commands, started, pumps, causes, heard, on_failure)
    finally:
        end_sessions(started.values())
        for process in started.values():
            signal_group(process, signal.SIGKILL)
            process.wait()
        every = [pump for its in pumps.values() for pump in its]
        _drain(every, heard, patient=verdict == 0)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
    if causes and verdict and verdict - 128 not in signals:
        say(causes[0][0])  # once more: what was said meanwhile may be long
    problem = next((pump.problem for pump in every if pump.problem), "")
    if problem:
        say(f"output could not be written: {problem}")
    return verdict or (NOT_WRITTEN if problem else 0)


def _supervise(
    commands: Sequence[Command],
    started: Running,
    pumps: Mapping[int, Sequence[Pump]],
    causes: Sequence[tuple[str, str]],
    heard: list[int],
    on_failure: Callable[[Failed], None],
) -> int:
    running = dict(started)
    failed: dict[int, int] = {}  # exit codes, in the order in which they were seen
    verdict, kill_at, decide_at = 0, math.inf, math.inf
    asked = False  # by a signal of the user's
    while running or (failed and not verdict):
        time.sleep(_LOOK_S)
        while heard:
            number = signal.Signals(heard.pop(0))
            verdict = verdict or 128 + number
            for index, process in running.items():
                if number == signal.SIGINT or asked:
                    signal_group(process, signal.SIGKILL if asked else number)
                else:
                    ask_to_end(commands[index], process)
            if number == signal.SIGINT and not asked:
                say("interrupted: ending the job. (Ctrl-C again: at once)")
            asked, kill_at = True, min(kill_at, time.monotonic() + SIGNAL_GRACE_S)
        for index, process in list(running.items()):
            code = exit_code(process, stays_awake=commands[index].end_signal is ASK_TO_END)
            if code is not None:
                del running[index]
                failed.update({index: code} if code else {})
        if causes:  # with the network gone mpirun waits for its other half, and would not end
            kill_at = min(kill_at, time.monotonic() + SIGNAL_GRACE_S)
        if failed and not verdict:
            decide_at = min(decide_at, time.monotonic() + _HEARD_S)
            first = _origin(commands, running, failed, pumps, causes, patient=time.monotonic() < decide_at)
            if first is None:
                continue
            verdict = first.code
            on_failure(first)
            for process in running.values():
                signal_group(process, signal.SIGTERM)
            if len(commands) > 1:
                rest = f"; ending the other {len(running)}" if running else ""
                say(f"{first.name} failed with exit code {verdict}{rest}")
            kill_at = min(kill_at, time.monotonic() + FAILURE_GRACE_S)
        if time.monotonic() > kill_at:
            for process in running.values():
                signal_group(process, signal.SIGKILL)
    return verdict


def _origin(
    commands: Sequence[Command],
    running: Running,
    failed: Mapping[int, int],
    pumps: Mapping[int, Sequence[Pump]],
    causes: Sequence[tuple[str, str]],
    *,
    patient: bool,
) -> Failed | None:
    """What ended the job: others that fail of it may be seen before. None: it may still be seen, or be said."""
    named = causes[0][1] if causes else ""
    by_name = {command.name: index for index, command in enumerate(commands)}
    crashed = next((index for index, code in failed.items() if code in _CRASHES), None)
    first = next(iter(failed))
    if crashed is not None:
        return Failed(named if named and len(commands) == 1 else commands[crashed].name, failed[crashed])
    if by_name.get(named) in failed:
        return Failed(named, failed[by_name[named]])
    if patient and (by_name[named] in running if named in by_name else any(pump.is_alive() for pump in pumps[first])):
        return None
    return Failed(named or commands[first].name, failed[first])


def _drain(pumps: Sequence[Pump], heard: Sequence[int], *, patient: bool) -> None:
    """Lets the last lines out, unless a signal says to stop."""
    written, give_up_at = -1, 0.0
    while any(pump.is_alive() for pump in pumps) and not heard:
        so_far = sum(pump.written for pump in pumps)
        if so_far != written or (patient and any(pump.writing for pump in pumps)):
            written, give_up_at = so_far, time.monotonic() + _UNREAD_S
        if time.monotonic() > give_up_at:
            return
        time.sleep(_LOOK_S)


def _pumps(process: "subprocess.Popen[bytes]", command: Command, causes: list[tuple[str, str]]) -> list[Pump]:
    """Passes its output on, and notes the causes that it tells."""
    shown = command.line_filter
    if shown is None or process.stdout is None or process.stderr is None:
        return []

    def noted(line: bytes) -> bytes | None:
        if match := _CAUSE.search(line):
            causes.append((match[1].decode(errors="replace"), match[2].decode()))
        elif match := _LOST.search(line):
            causes.append((match[0].decode(errors="replace"), command.name))
        return shown(line)

    return [Pump(process.stdout, sys.stdout, noted), Pump(process.stderr, sys.stderr, noted)]
