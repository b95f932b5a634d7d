"""The end of a rank whose script is over: it leaves when every rank has come to the end of its own.

Ranks may end far apart: one evaluates or uploads for an hour after the last step. Those that are done wait for it, and
hear of its failure, should it fail. What is no end in order, an error, a signal, an exit code of `sys.exit`, is the
business of `jaxdist.failfast`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from jaxdist import failfast
from jaxdist.stacks import main_thread_stack
from jaxdist.step.tracebacks import of_a_step

if TYPE_CHECKING:
    from jaxdist.context import Context

_OTHERS_SECONDS = 1.0  # for them to print why the job ends
_PACKAGE = __name__.partition(".")[0]


def install(ctx: Context) -> None:
    """Take part in the common end of the job, when this process's script ends.

    Called after ``import jax``, so that it happens before JAX's own shutdown.

    Args:
      ctx: of the job; one of a single process is left alone.
    """
    if ctx.size > 1:
        owner, failures, over = os.getpid(), _watch_exit_handlers(), _see_to_the_end(ctx)
        atexit.register(lambda: os.getpid() == owner and _end(ctx, failures, over))  # not in a forked data worker


def _end(ctx: Context, failures: list[str], over: threading.Event) -> None:
    control = ctx.control
    failfast.end_if_exiting(ctx)
    if failures and not control.ending:
        failfast.fail_at_exit(ctx, f"a function that runs at exit failed: {failures[0]}")
    control.hold()  # the main thread ends this process
    control.close()
    _wait_for_all(ctx)
    if control.ending:
        time.sleep(
            _OTHERS_SECONDS
        )  # they may be in a collective with this one, and have more to say than that it broke
        control.depart(1)
    over.set()


def _wait_for_all(ctx: Context) -> None:
    """Until every rank has said goodbye, or the job has failed. Who hangs at the end of its script is named."""
    control = ctx.control
    start, turns = time.monotonic(), 0
    while not control.all_left(ctx.timeout):
        turns += 1
        left = {ctx.rank, *control.notices.get("bye", {})}
        hanging, working = ctx.watchdog.at_the_end([r for r in range(ctx.size) if r not in left])
        waited = f"its script is over, and it has waited for {time.monotonic() - start:.0f} s for the others"
        if control.all_left(0):
            return
        if hanging:
            control.fail(f"rank {ctx.rank}: {waited}: {'; '.join(hanging)}")
            return
        if min(left) == ctx.rank and turns.bit_count() == 1:  # 1, 2, 4, 8, ...
            control.say(f"{waited}: {'; '.join(working)}")


def _see_to_the_end(ctx: Context) -> threading.Event:
    """What still runs in this process at exit must not keep the job: nobody waits for it any more.

    Returns:
      To be set when the job is over. (The thread runs from the start: Python 3.12.1 starts none at exit.)
    """
    over = threading.Event()

    def watch() -> None:
        over.wait()
        time.sleep(ctx.timeout)
        who = ctx.control.who(ctx.rank)
        ctx.control.say(f"{who} does not end, though its script did {ctx.timeout:g} s ago: {main_thread_stack()}")
        ctx.control.depart(1)

    threading.Thread(target=watch, name="jaxdist-exit", daemon=True).start()
    return over


def _watch_exit_handlers() -> list[str]:
    """What the functions registered with atexit fail with from now on, in calls of ours: Python only prints it."""
    failures: list[str] = []
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        ours = of_a_step(unraisable.exc_value)
        while trace is not None:
            ours = ours or trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE
            trace = trace.tb_next
        if ours and "atexit" in (unraisable.err_msg or ""):
            failures.append(f"{unraisable.exc_type.__name__}: {unraisable.exc_value}".splitlines()[0])
        previous(unraisable)

    sys.unraisablehook = hook
    return failures
