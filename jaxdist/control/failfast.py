"""One rank fails, the job ends: hooks for uncaught exceptions, exit codes and Ctrl-C."""

import os
import pdb
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, NoReturn

import jax

from jaxdist import compat, streams
from jaxdist.control import debugger
from jaxdist.control.channel import Control
from jaxdist.control.process import SAY_SECONDS, within
from jaxdist.control.stacks import users_line
from jaxdist.errors import ControlError, in_words, leaves, message_of

# Errors that a rank meets because a peer is gone: the cause is known a moment later.
_AFTERMATH = (jax.errors.JaxRuntimeError, ControlError, ConnectionError)
_CAUSE_SECONDS = 1.0
_ALIKE_SECONDS = 3.0  # for the rank of `--debug` to meet an error that this one meets, too
_INTERRUPTED = 130  # what shells report for Ctrl-C


def install(control: Control) -> None:
    """End the whole job when this process meets an uncaught exception, in any thread."""
    # The traceback is printed, every line marked with the rank; the other ranks print one line that says which rank
    # failed and why; all end with a non-zero code. A hook that was installed before (IPython, rich) is called, too.
    # A SystemExit with a failing code on one rank ends the job too. A job of one process is left alone.
    debugger.install(control)
    if control.size == 1 and "JAXDIST_DEBUG" not in os.environ:
        return
    previous, of_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not control.is_owner():  # a forked data worker: its parent will hear of it
            previous(kind, error, trace)
            return
        control.hold()
        try:
            if not isinstance(error, KeyboardInterrupt):
                within(SAY_SECONDS, streams.flush)
                out = control.say("".join(traceback.format_exception(error)))
                if out and previous is not sys.__excepthook__:
                    previous(kind, error, trace)
                chosen = os.environ.get("JAXDIST_DEBUG")
                if chosen == str(control.rank):
                    pdb.post_mortem(trace)
                elif chosen and not control.told_to_end.wait(_ALIKE_SECONDS):
                    while control.stopped and not control.told_to_end.wait(0.1):
                        pass
        finally:  # the earlier hook may raise an error, too
            end(control, error)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or issubclass(args.exc_type, SystemExit):
            of_threads(args)
        else:
            hook(args.exc_type, args.exc_value, args.exc_traceback)

    def note(status: Any) -> None:
        # In other threads, Python handles only SystemExit itself.
        if threading.current_thread() is threading.main_thread():
            control.exit_said = status, control.calls

    sys.excepthook = hook
    threading.excepthook = thread_hook
    compat.watch_exits(note)  # Python calls neither excepthook nor atexit with the code that the script ends with


def end(control: Control, error: BaseException) -> NoReturn:
    """End the job for an error, with one line: its traceback is shown elsewhere."""
    interrupted = isinstance(error, KeyboardInterrupt)
    control.hold(quiet=interrupted)
    aftermath = all(issubclass(type(one), _AFTERMATH) or "/gloo/" in message_of(one) for one in leaves(error))
    aftermath |= getattr(error, "elsewhere", False)
    if aftermath and control.told_to_end.wait(_CAUSE_SECONDS):
        control.depart(control.code)
    line = users_line(error.__traceback__)
    # The first line of a message says most.
    what = "was interrupted" if interrupted else f"failed: {in_words(error).splitlines()[0]}"
    text = f"{control.who(control.rank)} {what}{line and f' ({line})'}"
    # A rank that did not come (to an exchange) shows where it was.
    code = _INTERRUPTED if interrupted else 1
    control.alarm(text, code=code, stacks=isinstance(error, ControlError))
    if not (interrupted and "JAXDIST_RESTARTS" in os.environ):  # `jaxdist run` has said it
        control.say(text)  # the others do not, if they fail at the same moment
    control.depart(code, first=True)


def end_if_failed(control: Control) -> None:
    """Called at exit: end the other ranks if an error, or `sys.exit` with a failing code, ended this script."""
    error, replaced = getattr(sys, "last_value", None), sys.excepthook.__module__ != __name__
    if error is not None and replaced and not hasattr(sys, "ps1"):  # a later hook has shown it, and did not call ours
        end(control, error)
    code, calls = control.exit_said
    number = 0 if code is None else code if isinstance(code, int) else 1  # as Python has it
    if number == 0 or control.ending or calls != control.calls:  # the script caught it and continued
        return
    ending = number & 0xFF or 1
    control.alarm(f"{control.who(control.rank)} ended its script with exit code {message_of(code, repr)}", code=ending)
    control.depart(ending, first=True)
