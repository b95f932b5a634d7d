"""The end of a rank whose script is over: it leaves when every rank has come to the end of its own.

Ranks may end far apart: one evaluates or uploads for an hour after the last step. Those that are done wait for it, and
hear of its failure, should it fail. What is no end in order, an error, a signal, an exit code of `sys.exit`, is the
business of `jaxdist.control.failfast`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

from jaxdist.control import failfast
from jaxdist.control.channel import Control
from jaxdist.control.stacks import main_thread_stack
from jaxdist.control.watchdog import Watchdog
from jaxdist.errors import in_words
from jaxdist.tracebacks import of_a_step

_OTHERS_SECONDS = 1.0  # for them to print why the job ends
_PACKAGE = __name__.partition(".")[0]


def install(control: Control, watchdog: Watchdog, script: failfast.ScriptExit, timeout: float) -> None:
    """Take part in the common end of the job, when this process's script ends.

    Called after ``import jax``, so that it happens before JAX's own shutdown.
    """
    if control.size == 1:
        return
    owner, failures, over = os.getpid(), _watch_exit_handlers(), _see_to_the_end(control, timeout)

    def end() -> None:
        if os.getpid() != owner:  # a forked data worker
            return
        failfast.end_if_failed(control, script)
        if failures and not control.ending:
            failfast.fail_at_exit(control, f"a function that runs at exit failed: {failures[0]}")
        if control.rank == 0 and not control.ending and not control.position():
            control.say(
                f"the {control.size} ranks have called no decorated step and no collective of jaxdist. If there were "
                "steps left to do, each rank has worked by itself: decorate the step with jaxdist.data_parallel"
            )
        control.process.hold()  # the main thread ends this process
        control.close()
        _wait_for_all(control, watchdog, timeout)
        if control.ending:
            time.sleep(_OTHERS_SECONDS)  # they may be in a collective with this one, and say more than that it broke
            control.process.depart(control.process.code)
        over.set()

    atexit.register(end)


def _wait_for_all(control: Control, watchdog: Watchdog, timeout: float) -> None:
    """Until every rank has said goodbye, or the job has failed. Who hangs at the end of its script is named: it does so
    at two looks, a timeout apart, for at the first it may just have come there."""
    start, turns, suspected = time.monotonic(), 0, set[int]()
    while not control.all_left(timeout):
        turns += 1
        left = {control.rank, *control.notices.get("bye", {})}
        hanging, working = watchdog.at_the_end([r for r in range(control.size) if r not in left])
        waited = f"its script is over, and it has waited for {time.monotonic() - start:.0f} s for the others"
        if control.all_left(0):
            return
        if found := suspected & hanging.keys():
            control.fail(f"rank {control.rank}: {waited}: {'; '.join(hanging[rank] for rank in sorted(found))}")
            return
        suspected = set(hanging)
        if working and min(left) == control.rank and turns.bit_count() == 1:  # 1, 2, 4, 8, ...
            control.say(f"{waited}: {'; '.join(working)}")


def _see_to_the_end(control: Control, timeout: float) -> threading.Event:
    """What still runs in this process at exit must not keep the job: nobody waits for it any more."""
    over = threading.Event()

    def watch() -> None:
        over.wait()
        time.sleep(timeout)
        who = control.who(control.rank)
        control.say(f"{who} does not end, though its script did {timeout:g} s ago: {main_thread_stack()}")
        control.process.depart(1)

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
            failures.append(in_words(unraisable.exc_value).splitlines()[0])
        previous(unraisable)

    sys.unraisablehook = hook
    return failures
