"""One rank fails, the job ends: hooks for uncaught exceptions, exit codes and Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import jax

from jaxdist.control import ControlError

if TYPE_CHECKING:
    from jaxdist.context import Context

# Errors that a rank meets because another one is gone: the cause is known a moment later.
_AFTERMATH = (jax.errors.JaxRuntimeError, ControlError, ConnectionError)
_CAUSE_SECONDS = 1.0
_STUCK_SECONDS = 3.0  # that Ctrl-C waits for the main thread to come back from native code


def install(ctx: Context) -> None:
    """End the whole job when this process meets an uncaught exception, in any thread.

    The original traceback is printed, every line marked with the rank; the other ranks print one
    line that says which rank failed and why; all end with a non-zero code. A hook that was
    installed before (IPython, rich) still prints in its own way. `sys.exit` with a failing code
    on one rank ends the job too, and so does Ctrl-C while the main thread is stuck in a
    collective. A job of one process is left alone.

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

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != owner:  # a forked data worker: its parent will hear of it
            previous(kind, error, trace)
            return
        ctx.control.hold()
        if previous is sys.__excepthook__:
            _print_marked(ctx.rank, "".join(traceback.format_exception(kind, error, trace)))
        else:
            _print_marked(ctx.rank, "uncaught exception:")
            previous(kind, error, trace)
        _end(ctx, kind, error)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != owner or issubclass(args.exc_type, SystemExit):
            previous_thread(args)
            return
        ctx.control.hold()
        name = args.thread.name if args.thread else "a thread"
        _print_marked(ctx.rank, f"uncaught exception in thread {name}:")
        previous_thread(args)
        _end(ctx, args.exc_type, args.exc_value)

    sys.excepthook = hook
    threading.excepthook = thread_hook
    _watch_exit(ctx)
    _watch_interrupt(ctx)


def _end(ctx: Context, kind: type[BaseException], error: BaseException | None) -> None:
    if issubclass(kind, _AFTERMATH) and ctx.control.told_to_end(_CAUSE_SECONDS):
        ctx.control.depart(1)
    lines = "".join(traceback.format_exception_only(kind, error)).strip().splitlines()
    # The first line of a message says most; notes and chained text follow.
    text = f"{ctx.control.who(ctx.rank)} failed: {lines[0] if lines else kind}"
    # A rank that did not come (to an exchange) shows where it was.
    ctx.control.alarm(text, stacks=issubclass(kind, ControlError))
    # 130 is what shells report for Ctrl-C
    ctx.control.depart(130 if issubclass(kind, KeyboardInterrupt) else 1, abort=True)


def end_if_exiting(ctx: Context) -> None:
    """At exit: if the script ends by `sys.exit(code)` with a failing code, end the others too.

    Without this the orderly shutdown would wait for ranks that wait for this one.

    Args:
      ctx: the context of the job.
    """
    code = ctx.exit_code
    if code is None or code == 0 or ctx.control.ending:
        return
    number = code if isinstance(code, int) else 1
    ctx.control.alarm(f"{ctx.control.who(ctx.rank)} called sys.exit({code!r})")
    ctx.control.depart(number & 0xFF or 1, abort=True)


def fail_at_exit(ctx: Context, message: str) -> None:
    """From an exit handler: end the job with a failing code, whatever the script's own is.

    Args:
      ctx: the context of the job.
      message: why.
    """
    _print_marked(ctx.rank, message)
    if ctx.size > 1:
        ctx.control.alarm(f"{ctx.control.who(ctx.rank)}: {message}")
        ctx.control.depart(1, abort=True)
    os._exit(1)


def _watch_exit(ctx: Context) -> None:
    class Exit(SystemExit):
        """Tells, when Python lets go of it, whether it ended the program or was caught."""

        def __del__(self) -> None:
            # No frame of the script is left only after it ran through all of them. (Python hands
            # neither excepthook nor atexit the exit code.)
            if sys._getframe().f_back is None:
                ctx.exit_code = self.code

    def leave(status: Any = None, /) -> None:
        if threading.current_thread() is threading.main_thread():
            raise Exit(status)
        original(status)

    original = sys.exit
    sys.exit = leave  # type: ignore[assignment]


def _watch_interrupt(ctx: Context) -> None:
    """Python runs its SIGINT handler in the main thread, which may be stuck in a collective."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # the script has its own
    heard, ours = socket.socketpair()
    ours.setblocking(False)
    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return  # an event loop has its own
    arrived = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        arrived.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        with ours:  # keeps it open
            while numbers := heard.recv(64):
                if signal.SIGINT in numbers and not arrived.wait(_STUCK_SECONDS):
                    ctx.control.hold()
                    _print_marked(ctx.rank, "interrupted inside a collective or native code")
                    ctx.control.alarm(f"{ctx.control.who(ctx.rank)} was interrupted")
                    ctx.control.depart(130, abort=True)
                arrived.clear()

    signal.signal(signal.SIGINT, handler)
    threading.Thread(target=watch, name="jaxdist-interrupt", daemon=True).start()


def _print_marked(rank: int, text: str) -> None:
    # One write: lines of several ranks failing together do not mix within a line.
    marked = "".join(f"[jaxdist rank {rank}] {line}\n" for line in text.rstrip().splitlines())
    try:
        sys.stdout.flush()
        sys.stderr.write(marked)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        os.write(2, marked.encode())
