"""One rank fails, the job ends: hooks for uncaught exceptions, exit codes and Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax

from jaxdist import compat, streams
from jaxdist.control.channel import Control
from jaxdist.control.process import within
from jaxdist.control.stacks import users_line
from jaxdist.errors import ControlError, in_words, leaves, message_of, printed

# Errors that a rank meets because another one is gone: the cause is known a moment later.
_AFTERMATH = (jax.errors.JaxRuntimeError, ControlError, ConnectionError)
_CAUSE_SECONDS = 1.0
_INTERRUPTED = 130  # what shells report for Ctrl-C
_STUCK_SECONDS = 3.0  # that Ctrl-C waits for the main thread to come back from native code
_PRINT_SECONDS = 2.0  # for a traceback to be read
_EVERYONE_SECONDS = 0.3  # within which Ctrl-C comes to all ranks, by their launcher or their terminal


@dataclass
class ScriptExit:
    """The end of the script."""

    code: Any = None  # that it gave to `sys.exit`
    # what it ended with that another `sys.excepthook` was given, which was installed over ours
    error: Callable[[], BaseException | None] = lambda: None


def one_line_for_interrupts() -> None:
    """Print one line for Ctrl-C, and no traceback; another hook than Python's own stays."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _interrupt_hook


def _interrupt_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif not _run_has_said_it():
        print(f"[jaxdist] interrupted{_place(trace)}", file=sys.stderr)


def _run_has_said_it() -> bool:
    return "JAXDIST_RESTARTS" in os.environ  # set by `jaxdist run`


def _place(trace: TracebackType | None) -> str:
    return f" at {line}" if (line := users_line(trace)) else ""


def install(control: Control, script: ScriptExit) -> None:
    """End the whole job when this process meets an uncaught exception, in any thread.

    The original traceback is printed, every line marked with the rank; the other ranks print one line that says which
    rank failed and why; all end with a non-zero code. A hook that was installed before (IPython, rich) still prints in
    its own way. `sys.exit` with a failing code on one rank ends the job too, and so does Ctrl-C while the main thread
    is stuck in a collective. A job of one process is left alone.
    """
    if control.size == 1:
        return
    previous, previous_thread = sys.excepthook, threading.excepthook
    ours = previous in (sys.__excepthook__, _interrupt_hook)
    owner = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != owner:  # a forked data worker: its parent will hear of it
            previous(kind, error, trace)
            return
        if ours and issubclass(kind, KeyboardInterrupt):
            _end_interrupted(control, _place(trace))
        control.process.hold()
        try:
            if ours:
                _print_marked(control.rank, printed(error, trace))
            elif _print_marked(control.rank, "uncaught exception:"):
                previous(kind, error, trace)
        finally:  # the hook that was there may fail of the error, too
            _end(control, kind, error)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != owner or issubclass(args.exc_type, SystemExit):
            previous_thread(args)
            return
        control.process.hold()
        name = args.thread.name if args.thread else "a thread"
        try:
            if _print_marked(control.rank, f"uncaught exception in thread {name}:"):
                previous_thread(args)
        finally:
            _end(control, args.exc_type, args.exc_value)

    handled = _last_uncaught()

    def unheard() -> BaseException | None:
        last = _last_uncaught()
        return last if sys.excepthook is not hook and last is not handled else None

    sys.excepthook = hook
    threading.excepthook = thread_hook
    script.error = unheard
    _watch_exit(script)
    _watch_interrupt(control)


def end(control: Control, error: BaseException) -> NoReturn:
    """End the job for an error that is shown elsewhere: this rank prints nothing, the others say which one failed."""
    control.process.hold()
    _end(control, type(error), error)


def may_be_aftermath(error: BaseException | None) -> bool:
    """Whether it may be an error that a rank meets only because another one is gone."""
    return error is not None and all(
        issubclass(type(one), _AFTERMATH) or "/gloo/" in message_of(one) for one in leaves(error)
    )


def _end(control: Control, kind: type[BaseException], error: BaseException | None) -> NoReturn:
    if may_be_aftermath(error) and control.process.told_to_end(_CAUSE_SECONDS):
        control.process.depart(control.process.code)
    words = kind.__name__ if error is None else in_words(error)
    # The first line of a message says most.
    line = users_line(error.__traceback__) if error is not None else ""
    text = f"{control.who(control.rank)} failed: {words.splitlines()[0]}{line and f' ({line})'}"
    # A rank that did not come (to an exchange) shows where it was.
    code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
    control.alarm(text, code=code, stacks=issubclass(kind, ControlError))
    control.process.depart(code, abort=True)


def _end_interrupted(control: Control, place: str) -> NoReturn:
    """End the job, with one line in all: the root's where it was interrupted too, else this rank's own."""
    control.process.hold(quiet=True)
    if control.rank == 0:
        time.sleep(_EVERYONE_SECONDS)
    elif control.process.told_to_end(_CAUSE_SECONDS):
        control.process.depart(_INTERRUPTED)
    if not (control.rank == 0 and _run_has_said_it()):
        _print_marked(control.rank, f"interrupted{place}")
    control.alarm(f"{control.who(control.rank)} was interrupted", code=_INTERRUPTED)
    control.process.depart(_INTERRUPTED, abort=True)


def _last_uncaught() -> BaseException | None:
    return getattr(sys, "last_value", None)  # set before the hook is called


def end_if_failed(control: Control, script: ScriptExit) -> None:
    """At exit: if the script ends by `sys.exit` with a failing code, or has failed unheard, end the others too.

    Without this the orderly shutdown would wait for ranks that wait for this one.
    """
    if (error := script.error()) is not None and not control.ending:
        end(control, error)
    code = script.code
    number = 0 if code is None else code if isinstance(code, int) else 1  # as Python has it
    if number == 0 or control.ending:
        return
    ending = number & 0xFF or 1
    control.alarm(f"{control.who(control.rank)} ended its script with exit code {message_of(code, repr)}", code=ending)
    control.process.depart(ending, abort=True)


def fail_at_exit(control: Control, message: str) -> None:
    """From an exit handler: end the job with a failing code, whatever the script's own is."""
    _print_marked(control.rank, message)
    if control.size > 1:
        control.alarm(f"{control.who(control.rank)}: {message}")
        control.process.depart(1, abort=True)
    os._exit(1)


def _watch_exit(script: ScriptExit) -> None:
    def note(code: Any) -> None:
        script.code = code

    def leave(status: Any = None, /) -> None:
        raise SystemExit(status)  # Python's own leaves making it to the interpreter, which then asks it nothing

    compat.on_exit_code(note)
    sys.exit = leave  # type: ignore[assignment]


def _watch_interrupt(control: Control) -> None:
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
                    _end_interrupted(control, " inside a collective or native code")
                arrived.clear()

    signal.signal(signal.SIGINT, handler)
    threading.Thread(target=watch, name="jaxdist-interrupt", daemon=True).start()


def _print_marked(rank: int, text: str) -> bool:
    """Whether it is out; it isn't if nobody reads any more."""
    # One write: lines of several ranks failing together do not mix within a line.
    marked = "".join(f"[jaxdist rank {rank}] {line}\n" for line in text.rstrip().splitlines())

    def write() -> None:
        try:
            sys.stdout.flush()
            sys.stderr.write(marked)
            sys.stderr.flush()
        except Exception:  # closed, or of the user's own
            streams.write(marked)

    return within(_PRINT_SECONDS, write)
