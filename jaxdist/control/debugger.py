"""pdb on any rank: it gets the terminal, in turn with other ranks that stop, and no rank counts as late meanwhile."""

import os
import pdb
import sys
import threading
import time
from types import FrameType, TracebackType

from jaxdist.control.channel import Control
from jaxdist.control.stacks import users_line

_LINE = "a line for a debugger"
_ALIKE_SECONDS = 3.0  # between ranks that meet the same exception


def install(control: Control) -> None:
    """Let `breakpoint()`, `pdb.set_trace()` and `pdb.post_mortem()` work on this rank."""
    lines, original = _Lines(control), pdb.Pdb.interaction

    def interaction(self: pdb.Pdb, frame: FrameType | None, traceback: TracebackType | None) -> None:
        at = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else users_line(traceback)
        if "(Pdb)" in self.prompt:  # a new one
            control.say(f"in a debugger at {at}" + ": the other ranks wait" * (control.size > 1))
            self.prompt = f"(Pdb, rank {control.rank}) "
        setattr(self, "nosigint", True)  # noqa: B010  # after `continue`, Ctrl-C is the job's
        control.stop(at)
        stdin, sys.stdin = sys.stdin, lines  # type: ignore[assignment]  # input() takes whatever has a `readline`
        try:
            original(self, frame, traceback)
        finally:
            sys.stdin = stdin
            control.stop("")

    pdb.Pdb.interaction = interaction
    setattr(pdb.Pdb, "_cmdloop", pdb.Pdb.cmdloop)  # noqa: B010  # without a loop around it that Ctrl-C does not leave


def post_mortem(control: Control, trace: TracebackType | None) -> None:
    """pdb at an uncaught exception, on the rank that `jaxdist run --debug` names; others that fail wait for it."""
    chosen, give_up_at = os.environ.get("JAXDIST_DEBUG", ""), time.monotonic() + _ALIKE_SECONDS
    if chosen == str(control.rank):
        pdb.post_mortem(trace)
    elif chosen:
        while not control.ending and (control.stopped or time.monotonic() < give_up_at):
            time.sleep(0.05)


class _Lines:
    """What debuggers read: the terminal of `jaxdist run`, or rank 0's standard input; launchers give others none."""

    def __init__(self, control: Control):
        self._control = control
        answer = lambda rank: control.put(_LINE, self._read(), to=rank)
        control.listen(_LINE, lambda rank, _: threading.Thread(target=answer, args=[rank], daemon=True).start())

    def readline(self) -> str:
        print(flush=True)  # mpirun does not pass a prompt on before its line ends
        if self._control.rank == 0:
            return self._read()
        self._control.post(_LINE, None, to=0)
        return self._control.take(_LINE, 0, None)

    def _read(self) -> str:
        path = os.environ.get("JAXDIST_TERMINAL")
        with os.fdopen(os.open(path, os.O_NOCTTY) if path else os.dup(0), "rb", 0) as lines:  # not a byte more
            line = lines.readline().decode(errors="replace")
        if not line:
            self._control.say("nobody answers a debugger: the standard input of rank 0 has ended")
        return line
