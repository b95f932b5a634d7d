"""Starts a job's processes, passes signals on to them, and leaves none behind."""

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxdist.launch.command import (
    ASK_TO_END,
    Command,
    all_children_ended,
    ask_to_end,
    end_sessions,
    exit_code,
    signal_group,
    start,
)  # fmt: skip
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
_ALONE_S = 2.0  # between two looks; each looks at all processes of the machine

# What a rank says before it ends because of another one (`jaxdist.control`), or as they do not make the same calls:
# each says that, and none is the first.
_CAUSE = re.compile(
    rb"\[jaxdist rank \d+\] ((rank \d+) \([^)]*, pid \d+\)"
    rb"(?:: | failed: | ended its script | was interrupted| died without | can't be reached ).*"
    rb"|.*(?:the ranks make different calls|has finished after|not every rank has come).*)"
)
# Open MPI, when it has lost a host. It would wait forever for the other half to confirm.
_LOST = re.compile(rb"PRTE has lost communication.*|(?:prterun|mpirun) (?:has )?detected that one.*")


class Ended(NamedTuple):
    """How a job has ended: its exit code as of a shell, and the command that failed first; "": none, or by a signal."""

    code: int
    failed: str


class Job:
    """Commands that run together."""

    def __init__(self, commands: Sequence[Command]):
        self._commands = {command.name: command for command in commands}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._failed: dict[str, int] = {}  # exit codes, in the order in which they were seen
        self._pumps: dict[str, list[Pump]] = {}
        self._causes: list[tuple[str, str]] = []  # of a failure, as ranks have told one another: in words, and whose
        self._lost = ""  # a host, in words of mpirun's
        self._heard: list[int] = []  # signals
        self._asked = False  # to end, by one of the user's

    def run(self) -> Ended:
        """Run the commands to their end, from the main thread."""
        # When one fails the others are ended within seconds. SIGINT, SIGTERM and SIGHUP are passed on, unless they were
        # ignored; a second one ends the job at once. If output is lost the exit code is `NOT_WRITTEN`.
        # What is ignored stays ignored, here and in the ranks: `nohup`, a shell's job in the background.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        caught = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, lambda number, _: self._heard.append(number)) for number in caught}
        started: list[subprocess.Popen[bytes]] = []
        ended = Ended(1, "")
        try:
            for command in self._commands.values():
                started.append(start(command))
                self._running[command.name] = started[-1]
                self._pumps[command.name] = self._passed_on(command, started[-1])
            ended = self._supervised()
        finally:
            end_sessions(started)
            for process in started:
                signal_group(process, signal.SIGKILL)
                process.wait()
            pumps = [pump for its in self._pumps.values() for pump in its]
            self._drain(pumps, patient=ended.code == 0)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
        cause = self._causes[0][0] if self._causes else self._lost
        if cause and ended.failed:
            say(cause)  # again, since the output in between may be long
        problem = next((pump.problem for pump in pumps if pump.problem), "")
        if problem:
            say(f"output could not be written: {problem}")
        return ended._replace(code=ended.code or (NOT_WRITTEN if problem else 0))

    def _supervised(self) -> Ended:
        ended: Ended | None = None
        kill_at = decide_at = math.inf
        look_at, alone = time.monotonic() + _ALONE_S, False
        while self._running or (self._failed and ended is None):
            time.sleep(_LOOK_S)
            while self._heard:
                number = signal.Signals(self._heard.pop(0))
                again, self._asked = self._asked, True
                self._pass_on(number, again=again)
                ended = ended or Ended(128 + number, "")
                kill_at = min(kill_at, time.monotonic() + SIGNAL_GRACE_S)
            self._look_who_has_ended()
            # With the network gone mpirun waits for its other half, and for what a killed rank had started: for ever.
            if (self._causes or self._lost) and not self._asked:
                kill_at = min(kill_at, time.monotonic() + _HEARD_S + FAILURE_GRACE_S)
            if self._failed and ended is None:
                decide_at = min(decide_at, time.monotonic() + _HEARD_S)
                ended = self._first(patient=time.monotonic() < decide_at)
                if ended is not None:
                    self._end_others(ended)
                    kill_at = min(kill_at, time.monotonic() + FAILURE_GRACE_S)
            if time.monotonic() > look_at:  # a stranger that connects to one of its ports can stop mpirun
                look_at, before = time.monotonic() + _ALONE_S, alone
                mpirun = self._running.get("mpirun")
                alone = mpirun is not None and all_children_ended(mpirun.pid)
                if alone and before:
                    say("all ranks have ended, and mpirun has not noticed (a stranger on one of its ports?): ending it")
                    kill_at = 0.0
            if time.monotonic() > kill_at:
                for process in self._running.values():
                    signal_group(process, signal.SIGKILL)
        return ended or Ended(0, "")

    def _pass_on(self, number: signal.Signals, *, again: bool) -> None:
        for name, process in self._running.items():
            if again:
                signal_group(process, signal.SIGKILL)
            else:
                ask_to_end(self._commands[name], process, number)
        if number == signal.SIGINT and not again:
            say("interrupted: ending the job. (Ctrl-C again: at once)")

    def _look_who_has_ended(self) -> None:
        for name, process in list(self._running.items()):
            code = exit_code(process, stays_awake=self._commands[name].end_signal is ASK_TO_END)
            if code is not None:
                del self._running[name]
                self._failed.update({name: code} if code else {})

    def _first(self, *, patient: bool) -> Ended | None:
        """Find what ended the job: others that fail of it may be seen before. None: it may still be seen, or said."""
        named = self._causes[0][1] if self._causes else ""
        if named in self._failed:
            return Ended(self._failed[named], named)
        first = next(iter(self._failed))
        known = named in self._commands
        if patient and (named in self._running if known else any(pump.is_alive() for pump in self._pumps[first])):
            return None
        return Ended(self._failed[first], named or first)

    def _end_others(self, ended: Ended) -> None:
        for process in self._running.values():
            signal_group(process, signal.SIGTERM)
        rest = f"; ending the other {len(self._running)}" if self._running else ""
        say(f"{ended.failed} failed with exit code {ended.code}{rest}")

    def _drain(self, pumps: Sequence[Pump], *, patient: bool) -> None:
        """Let the last lines out, unless a signal says to stop."""
        begin = time.monotonic()

        def waits(pump: Pump) -> bool:
            since = max(begin, pump.since)
            return pump.is_alive() and ((patient and pump.writing) or time.monotonic() < since + _UNREAD_S)

        while any(map(waits, pumps)) and not self._heard:
            time.sleep(_LOOK_S)

    def _passed_on(self, command: Command, process: "subprocess.Popen[bytes]") -> list[Pump]:
        """Pass its output on, and note the causes that it tells."""
        assert process.stdout is not None
        assert process.stderr is not None

        def noted(line: bytes) -> bytes:
            if match := _CAUSE.search(line):
                self._causes.append((match[1].decode(errors="replace"), (match[2] or b"").decode()))
            elif match := _LOST.search(line):
                self._lost = match[0].decode(errors="replace")
            return command.line_filter(line)

        return [Pump(process.stdout, sys.stdout, noted), Pump(process.stderr, sys.stderr, noted)]
