"""pdb on any rank: it gets the terminal, in turn with other ranks that stop, and no rank counts as late meanwhile."""

import os
import pdb
import sys
import threading
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from jaxdist.control.channel import Control
from jaxdist.control.stacks import users_line

_LINE = "a line for a debugger"


def install(control: Control) -> None:
    """Let `breakpoint()`, `pdb.set_trace()` and `pdb.post_mortem()` work on this rank."""
    original = pdb.Pdb.interaction
    answer = lambda rank: control.put(_LINE, _read(control), to=rank)
    control.listen(_LINE, lambda rank, _: threading.Thread(target=answer, args=[rank], daemon=True).start())

    def readline() -> str:
        print(flush=True)  # mpirun does not pass a prompt on before its line ends
        control.post(_LINE, None, to=0)  # launchers pass their input to rank 0, and to the others none
        return control.take(_LINE, 0, None) if control.size > 1 and control.is_owner() else _read(control)

    lines: Any = SimpleNamespace(readline=readline)  # all that input() needs

    def interaction(self: pdb.Pdb, frame: FrameType | None, traceback: TracebackType | None) -> None:
        raised_at = users_line(getattr(traceback, "__traceback__", traceback))
        at = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else raised_at
        if "(Pdb)" in self.prompt:  # a new one
            control.say(f"in a debugger at {at}" + ": the other ranks wait" * (control.size > 1))
            self.prompt = f"(Pdb, rank {control.rank}) "
        setattr(self, "nosigint", True)  # noqa: B010  # after `continue`, Ctrl-C is the job's
        control.stop(at)
        stdin, sys.stdin = sys.stdin, lines
        try:
            original(self, frame, traceback)
        finally:
            sys.stdin = stdin
            control.stop("")

    pdb.Pdb.interaction = interaction
    pdb.Pdb._cmdloop = pdb.Pdb.cmdloop  # without a loop around it that Ctrl-C does not leave


def _read(control: Control) -> str:
    """A line from the terminal of `jaxdist run`, or from standard input; "" at its end."""
    path = os.environ.get("JAXDIST_TERMINAL")
    with os.fdopen(os.open(path, os.O_NOCTTY) if path else os.dup(0), "rb", 0) as lines:  # not a byte more
        line = lines.readline().decode(errors="replace")
    if not line:
        control.say("nobody answers a debugger: the standard input of rank 0 has ended")
    return line
