"""One command of a job: started so that it can't outlive the job, sent signals, and how it has ended.

It leads a process group of its own, so that what it started ends with it, and asks the kernel for a signal when this
process dies, so that even SIGKILL here leaves no orphans.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxdist.launch import proc
from jaxdist.launch.output import LineFilter

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
    if int(parent) not in (0, os.getppid()):  # it died before the call
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
    """One process of a job."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    line_filter: LineFilter | None = None
    death_signal: signal.Signals = signal.SIGKILL
    last_words: re.Pattern[bytes] | None = None
    cause: re.Pattern[bytes] | None = None


def that_dies_with(parent: int, number: signal.Signals = signal.SIGKILL) -> list[str]:
    """What a command line begins with whose process gets this signal when its parent dies, which is this process, or
    (0) whoever starts it."""
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(parent), str(int(number))]


def start(command: Command) -> "subprocess.Popen[bytes]":
    """Its process, the leader of a group and a session."""
    pipe = None if command.line_filter is None else subprocess.PIPE
    return subprocess.Popen(
        [*that_dies_with(os.getpid(), command.death_signal), *command.argv],
        env={**os.environ, **command.environment},
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[bytes]", options: int = 0) -> int:
    """The exit code of a command, as of a shell, once it has ended; 0 with WNOHANG if it runs.

    The command is left for `Popen.wait`: between the system's answer and Popen's own record of it, another thread would
    learn nothing.
    """
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | options)
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status


def crashed(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of a command that has ended by a signal which no other command's failure leads to; else 0."""
    crashes = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    code = ended(process, os.WNOHANG)
    return code if code - 128 in crashes else 0


def signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Send a signal to a command and to what it has started, so far as that has not left its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def end_sessions(leaders: Collection[proc.Name]) -> None:
    """Ends what a rank itself started and left behind, also what left its group, as mpirun's ranks and its ssh do."""

    def left() -> list[proc.Name]:
        found = proc.running()
        # One that got the number of a command which ended long ago may lead a session of its own.
        others = {seen.name.pid for seen in found if seen.name not in leaders}
        sessions = {leader.pid for leader in leaders} - others
        return [seen.name for seen in found if seen.session in sessions]

    for number in (signal.SIGTERM, signal.SIGKILL):
        told, give_up_at = set[proc.Name](), time.monotonic() + _LEFT_S
        while names := left():
            for name in names:
                if name not in told:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(name.pid, number)
            told.update(names)
            if time.monotonic() > give_up_at:
                break
            time.sleep(0.02)
