"""One command of a job: started so that it can't outlive the job, sent signals, and how it has ended.

It leads its own session, so that processes it started end with it, and asks the kernel for a signal when this process
dies, so that even SIGKILL here leaves no orphans.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import psutil

from jaxdist.launch.output import LineFilter, Pump

# Time for processes that a rank left behind to end by SIGTERM (some clean up shared things), then by SIGKILL.
_LEFT_S = 1.0
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

# How both programs below become a command that gets a signal when its parent dies (PR_SET_PDEATHSIG, linux/prctl.h).
_DYING_WITH_PARENT = """
import ctypes, os, signal, sys, time
prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)  # absent off Linux: only the SIGKILL case is lost
def become(command, number, parent):
    prctl(1, number)
    if parent != os.getppid():  # it died before the call
        sys.exit(1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so would the command
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"jaxdist: {command[0]}: {error.strerror}")
"""

# A program of its own, and no function between fork and exec: this process may have JAX's threads, and warns of forks.
_BECOME = f"""{_DYING_WITH_PARENT}
become(sys.argv[3:], int(sys.argv[2]), int(sys.argv[1]))
"""

# Starts a rank of mpirun and stays above it. Open MPI ends all ranks half a second after a SIGTERM or a SIGINT, and as
# soon as one exits with a code: both take from a rank the time to save. So the launcher sends mpirun a signal that it
# only passes on, the rank gets the other one for it, and mpirun sees no code of a rank that ends after that.
_UNDER_MPIRUN = f"""{_DYING_WITH_PARENT}
asked, means = set(), {{signal.SIGUSR1: signal.SIGTERM, signal.SIGUSR2: signal.SIGINT}}
def pass_on(number, frame):
    asked.add(number)
    os.kill(rank, means.get(number, number))
prctl(1, signal.SIGKILL)
passed = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, passed)
above, rank = os.getpid(), os.fork()
if rank == 0:
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    become(sys.argv[1:], signal.SIGKILL, above)
for number in passed:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
try:  # mpirun waits for all that can still write to the rank's output
    os.killpg(rank, signal.SIGTERM)
    for _ in range(50):
        time.sleep(0.02)
        os.killpg(rank, 0)
    os.killpg(rank, signal.SIGKILL)
except OSError:  # nothing is left
    pass
if asked & means.keys():
    os._exit(0)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_ASK_TO_END = signal.SIGUSR1  # what mpirun forwards, and `_UNDER_MPIRUN` makes a SIGTERM of
_INTERRUPT = signal.SIGUSR2  # and a SIGINT


@dataclass(frozen=True)
class Command:
    """One process of a job."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    line_filter: LineFilter
    death_signal: signal.Signals = signal.SIGKILL
    is_mpirun: bool = False


# The beginning of the command line of a rank that mpirun starts.
UNDER_MPIRUN = (sys.executable, "-I", "-S", "-c", _UNDER_MPIRUN)


class Child:
    """A command that runs, the leader of a group and a session."""

    def __init__(self, command: Command, note: LineFilter):
        self._is_mpirun = command.is_mpirun
        become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(int(command.death_signal))]
        self.process = subprocess.Popen(
            [*become, *command.argv],
            env={**os.environ, **command.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        pipes = (self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)
        self.pumps = [Pump(source, target, command.line_filter, note) for source, target in pipes if source]

    def exit_code(self) -> int | None:
        """Return its exit code as a shell would, or None while it runs."""
        # It stays a zombie until the end of the job, so that no other process gets the number of its session. mpirun
        # is resumed if somebody stops it, since it watches the ranks.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT | (os.WSTOPPED if self._is_mpirun else 0)
        found = os.waitid(os.P_PID, self.process.pid, options)
        if found is not None and found.si_code == os.CLD_STOPPED:
            os.kill(self.process.pid, signal.SIGCONT)
        elif found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
        return None

    def is_stuck(self) -> bool:
        """Check whether it is an mpirun that missed the end of all its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children() if self._is_mpirun else []
            return bool(children) and all(child.status() in _GONE for child in children)
        return False

    def ask_to_end(self, number: signal.Signals) -> None:
        """Ask it and the processes it started, by a signal, to end in their own time."""
        interrupts = number == signal.SIGINT
        if self._is_mpirun:
            os.kill(self.process.pid, _INTERRUPT if interrupts else _ASK_TO_END)  # its group may have no handler for it
        else:
            self.send(number if interrupts else signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and to the processes it started that are still in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def end_sessions(leaders: Collection[Child]) -> None:
    """End processes that a rank left behind, even outside its group, where mpirun's ranks and its ssh are."""
    sessions = {child.process.pid for child in leaders}

    def left() -> set[int]:
        found = set[int]()
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(pid) in sessions and psutil.Process(pid).status() not in _GONE:
                    found.add(pid)
        return found

    for number in (signal.SIGTERM, signal.SIGKILL):
        told, give_up_at = set[int](), time.monotonic() + _LEFT_S
        while (pids := left()) and time.monotonic() < give_up_at:
            for pid in pids - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told |= pids
            time.sleep(0.02)
