"""Starts a job's processes, passes signals on to them, and leaves none behind."""

import math
import re
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxdist.launch.command import Child, Command, end_sessions
from jaxdist.launch.output import NOT_WRITTEN, Pump, say

# Time for a failed command to name the one that caused it, and for that one to end, before it counts as the first.
_HEARD_S = 0.3
# Time from the first sign of a failure until remaining ranks are killed: they may be stuck in a collective. After the
# user's own signal they have longer, to write a checkpoint.
_FAILURE_GRACE_S = 3.0
_SIGNAL_GRACE_S = 10.0
# Time for somebody to read the last lines of a failed job; other jobs wait as long as it takes. Processes that a rank
# started and left behind may hold a pipe open, too.
_UNREAD_S = 3.0
_LOOK_S = 0.02
_STUCK_S = 2.0  # between two looks; each looks at all processes of the machine

ENDED_EARLY = "ended with exit code 0 before its part was done (os._exit?)"
_HINTS = {128 + signal.SIGKILL: " (SIGKILL: the system ran out of memory?)"}

# Lines that a rank prints before it ends because a different one failed (`jaxdist.control`), or because the ranks make
# different calls (each prints that, and none is the first); and Open MPI's line when it has lost a host. It would wait
# forever for the other half to confirm.
_CAUSE = re.compile(
    rb"\[jaxdist rank \d+\] ((rank \d+) \([^)]*, pid \d+\)"
    rb"(?:: | failed: | ended its script | was interrupted| died without | can't be reached ).*"
    rb"|.*(?:the ranks make different calls|has finished after|not every rank has come).*)"
    rb"|(PRTE has lost communication.*)"
)
# prterun's report of a rank that ended in its own way. (Its text offers `--quiet`, which mpirun does not have.)
_ECHO = re.compile(
    rb"-{74}\nprterun (?:has exited due|detected that one or more processes exited)(?:.*\n)*?"
    rb"(?: +Process name: \[\S*,(\d+)\]\n.*\n)?-{74}\n"
)


class Ended(NamedTuple):
    """The end of a job: its exit code as of a shell, and the command that failed first ("" if none, or by a signal)."""

    code: int
    failed: str
    ending: str = ""  # of that command, in words


class Job:
    """Commands that run together."""

    def __init__(self, commands: Sequence[Command]):
        self._commands = commands
        self._children: dict[str, Child] = {}
        self._running: dict[str, Child] = {}  # those still running
        self._failed: dict[str, int] = {}  # exit codes, in the order in which they were seen
        self._cause = self._failing = ""  # the first cause of a failure that a line names, and its rank
        self._heard, self._asked = list[int](), False  # signals; whether one has come

    def run(self) -> Ended:
        """Run the commands to their end, from the main thread."""
        # When one fails the others are ended within seconds. SIGINT, SIGTERM and SIGHUP are passed on, unless they were
        # ignored; a second one ends the job at once. If output is lost the exit code is `NOT_WRITTEN`.
        # Ignored signals stay ignored, here and in the ranks: `nohup`, a shell's job in the background.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        caught = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, lambda number, _: self._heard.append(number)) for number in caught}
        ended = Ended(1, "")
        try:
            for command in self._commands:
                self._children[command.name] = self._running[command.name] = Child(command, self._note)
            ended = self._supervised()
        finally:
            end_sessions(self._children.values())
            for child in self._children.values():
                child.send(signal.SIGKILL)
                child.process.wait()
            pumps = [pump for child in self._children.values() for pump in child.pumps]
            begin = time.monotonic()

            def waits(pump: Pump) -> bool:
                unread = time.monotonic() < max(begin, pump.since) + _UNREAD_S
                return pump.is_alive() and (unread or (ended.code == 0 and pump.writing))

            while any(map(waits, pumps)) and not self._heard:  # the last lines, unless a signal says to stop
                time.sleep(_LOOK_S)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
        if self._cause and ended.failed:
            say(self._cause)  # again, since the output in between may be long
        problem = next((pump.problem for pump in pumps if pump.problem), "")
        if problem:
            say(f"output could not be written: {problem}")
        return ended._replace(code=ended.code or (NOT_WRITTEN if problem else 0))

    def _supervised(self) -> Ended:
        ended: Ended | None = None
        kill_at = decide_at = math.inf
        look_at, stuck = time.monotonic() + _STUCK_S, 0
        while self._running or (self._failed and ended is None):
            time.sleep(_LOOK_S)
            now = time.monotonic()
            while self._heard:
                number = signal.Signals(self._heard.pop(0))
                if self._asked:
                    kill_at = 0.0
                    continue
                self._asked, kill_at = True, min(kill_at, now + _SIGNAL_GRACE_S)
                ended = ended or Ended(128 + number, "")
                for child in self._running.values():
                    child.ask_to_end(number)
                if number == signal.SIGINT:
                    say("interrupted: ending the job. (Ctrl-C again: at once)")
            codes = {name: child.exit_code() for name, child in self._running.items()}
            self._running = {name: child for name, child in self._running.items() if codes[name] is None}
            self._failed.update({name: code for name, code in codes.items() if code})
            # Without the network, mpirun waits forever for its other half, and for processes of a killed rank.
            if (self._failed or self._cause) and not self._asked:
                decide_at, kill_at = min(decide_at, now + _HEARD_S), min(kill_at, now + _FAILURE_GRACE_S)
            if self._failed and ended is None and now >= decide_at:
                first, named = next(iter(self._failed)), self._failing
                culprit = named or first
                code = self._failed.get(culprit, self._failed[first])
                early = culprit in self._children and culprit not in self._failed | self._running
                ending = ENDED_EARLY if early else f"failed with exit code {code}{_HINTS.get(code, '')}"
                ended = Ended(code, culprit, ending)
                self._send(signal.SIGTERM)
                rest = f"; ending the other {len(self._running)}" if self._running else ""
                say(f"{culprit} {ending}{rest}")
            if now > look_at:  # a stranger that connects to one of its ports can stop mpirun
                stuck = stuck + 1 if any(child.is_stuck() for child in self._running.values()) else 0
                look_at = now + _STUCK_S
                if stuck == 2:
                    say("all ranks have ended, and mpirun has not noticed (a stranger on one of its ports?): ending it")
                    kill_at = 0.0
            if now > kill_at:
                self._send(signal.SIGKILL)
        return ended or Ended(0, "")

    def _send(self, number: signal.Signals) -> None:
        for child in self._running.values():
            child.send(number)

    def _note(self, lines: bytes) -> bytes:
        """Return lines, without prterun's where more is known; note the first cause of a failure that they tell."""
        # To search all lines takes time.
        told = not (self._cause and self._failing) and (b"[jaxdist rank" in lines or b"PRTE" in lines)
        # One read may hold several, and a later one has the script's line.
        for match in _CAUSE.finditer(lines) if told else ():
            cause = (match[1] or match[3]).decode(errors="replace")
            if not self._cause:
                self._cause, self._failing = cause, (match[2] or b"").decode()
            elif self._cause in cause:  # no rank is the first: again, with the line of one
                self._cause = cause
        if b"prterun" in lines and (match := _ECHO.search(lines)):
            self._failing = self._failing or (f"rank {int(match[1])}" if match[1] else "")
            lines = _ECHO.sub(b"", lines) if self._cause or self._failing or self._asked else lines
        return lines
