"""One rank fails, the job ends: hooks for uncaught exceptions."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from jaxdist import control

if TYPE_CHECKING:
    from jaxdist.context import Context

_PEERS_PRINT = 0.3  # seconds for the others to print the reason before the launcher kills them


def install(ctx: Context) -> None:
    """End the whole job when this process meets an uncaught exception, in any thread.

    The original traceback is printed, every line marked with the rank; the other ranks print one
    line that says which rank failed and why; all end with a non-zero code. A hook that was
    installed before (IPython, rich) still prints in its own way. A job of one process is left
    alone.

    Args:
      ctx: the context of the job.

    Example:
      >>> import jaxdist
      >>> ctx = jaxdist.init()  # installs it
    """
    if ctx.size == 1:
        return
    previous, previous_thread = sys.excepthook, threading.excepthook
    owner = os.getpid()

    def end(kind: type[BaseException], error: BaseException | None) -> None:
        what = "".join(traceback.format_exception_only(kind, error)).strip().splitlines()
        ctx.control.alarm(f"{ctx.control.who(ctx.rank)} failed: {what[-1] if what else kind}")
        time.sleep(_PEERS_PRINT)
        # 130 is what shells report for Ctrl-C
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        control.leave(code, "", ctx.connector.abort)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != owner:  # a forked data worker: its parent will hear of it
            previous(kind, error, trace)
            return
        if previous is sys.__excepthook__:
            _print_marked(ctx.rank, "".join(traceback.format_exception(kind, error, trace)))
        else:
            _print_marked(ctx.rank, "uncaught exception:")
            previous(kind, error, trace)
        end(kind, error)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != owner or issubclass(args.exc_type, SystemExit):
            previous_thread(args)
            return
        name = args.thread.name if args.thread else "a thread"
        _print_marked(ctx.rank, f"uncaught exception in thread {name}:")
        previous_thread(args)
        end(args.exc_type, args.exc_value)

    sys.excepthook = hook
    threading.excepthook = thread_hook


def _print_marked(rank: int, text: str) -> None:
    # One write: lines of several ranks failing together do not mix within a line.
    marked = "".join(f"[jaxdist rank {rank}] {line}\n" for line in text.rstrip().splitlines())
    try:
        sys.stdout.flush()
        sys.stderr.write(marked)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        os.write(2, marked.encode())
