"""The end of a rank whose script is over: it leaves when every rank has come to the end of its own.

Ranks may end far apart: one evaluates or uploads for an hour after the last step. Those that are done wait for it, and
hear of its failure, should it fail. What is no end in order, an error, a signal, an exit code of `sys.exit`, is the
business of `jaxdist.control.failfast`.
"""

from __future__ import annotations

import atexit
import os
import time

from jaxdist.control import failfast
from jaxdist.control.channel import Control
from jaxdist.control.watchdog import Watchdog

_OTHERS_SECONDS = 1.0  # for them to print why the job ends


def install(control: Control, watchdog: Watchdog, timeout: float) -> None:
    """Take part in the common end of the job, when this process's script ends.

    Called after ``import jax``, so that it happens before JAX's own shutdown.
    """
    if control.size == 1:
        return
    owner = os.getpid()

    def end() -> None:
        if os.getpid() != owner:  # a forked data worker
            return
        failfast.end_if_failed(control)
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
