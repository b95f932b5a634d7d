"""This process as one rank of a job: its messages, from any thread, and its end when the job has failed."""

import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from jaxdist import streams
from jaxdist.control.hub import PRINT_SECONDS
from jaxdist.control.stacks import main_thread_line

_OTHERS_SECONDS = 1.0  # for the other ranks to print where they are: launchers kill them when one ends
SAY_SECONDS = 1.0  # for a message to be read: it may be a pipe that nobody reads any more
_LEAVE_SECONDS = 2.0  # that rank 0 gives the others to end by themselves


class Process:
    """The process of one rank."""

    def __init__(self, rank: int):
        self.alarmed = False
        self.code = 1
        self.over = threading.Event()  # every rank has said goodbye, or the job is known to have failed
        self.wait_gone: Callable[[float], bool] | None = None
        self.rank = rank
        self._pid = os.getpid()
        self._held = self._quiet = False  # the main thread is about to end this process itself
        self.told_to_end = threading.Event()  # by the others, who say that the job failed

    def is_owner(self) -> bool:
        """Check whether the code runs in this process, and not in a forked child."""
        return os.getpid() == self._pid

    def say(self, message: str) -> bool:
        """Print a message on stderr, each line marked with the rank; whether it is out: somebody may have to read."""

        # Not through sys.stderr: the main thread may hold its lock, stuck on a full pipe. A line at a time: the system
        # keeps a short write in one piece, and ranks may share the pipe.
        def write() -> None:
            for line in message.splitlines():
                streams.write(f"[jaxdist rank {self.rank}] {line}\n")

        return within(SAY_SECONDS, write)

    @property
    def ending(self) -> bool:
        """Check whether the job is known to have failed."""
        return self.alarmed or self.told_to_end.is_set()

    def hold(self, *, quiet: bool = False) -> None:
        """Leave the end of this process to the caller, who has something to print first."""
        self._held, self._quiet = True, quiet

    def end_because_of(self, message: str, pause: float, stacks: bool = False, code: int = 1) -> None:
        """Print why, and end this process soon; unless its main thread already does."""
        if self.ending or not self.is_owner():
            return
        self.code = code
        if message and not self._quiet:
            self.say(message)
        self.told_to_end.set()
        self.over.set()
        if self._held:
            return

        # Not on rank 0's watcher itself, which continues to watch the others leave.
        def end() -> None:
            if stacks:
                self.say(f"its main thread is at {main_thread_line()}")
            time.sleep(max(pause, _OTHERS_SECONDS) if stacks else pause)
            self.depart(code)

        threading.Thread(target=end, daemon=True).start()

    def stay_if_ending(self) -> None:
        """Do not return if a different thread is about to end this process."""
        while self.told_to_end.is_set() and not self._held and self.is_owner():
            time.sleep(3600)

    def depart(self, code: int, *, first: bool = False) -> NoReturn:
        """End this process now, even if its main thread hangs: the first to end when the others had time to print why,
        and rank 0 last: it hosts JAX's coordinator, whose loss makes JAX abort the others before they can."""
        if self.wait_gone is not None:
            self.wait_gone(_LEAVE_SECONDS)
        elif first:
            time.sleep(PRINT_SECONDS)
        within(SAY_SECONDS, streams.flush)
        os._exit(code)


def within(seconds: float, act: Callable[[], object]) -> bool:
    """Do something that may block forever, but wait only `seconds`. Returns whether it was done."""
    helper = threading.Thread(target=act, name="jaxdist-within", daemon=True)
    try:
        helper.start()
    except RuntimeError:  # Python 3.12.1 starts no thread at exit
        act()
        return True
    helper.join(seconds)
    return not helper.is_alive()
