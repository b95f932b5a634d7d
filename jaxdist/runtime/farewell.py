"""The end of a rank whose script is over: it leaves when every rank has come to the end of its own.

Ranks may end far apart: one evaluates for an hour after the last step. The others hear of its failure, should it fail.
"""

import atexit
import time

from jaxdist.control import failfast
from jaxdist.control.channel import Control
from jaxdist.control.watchdog import Watchdog

_OTHERS_SECONDS = 1.0  # for them to print why the job ends


def install(control: Control, watchdog: Watchdog, timeout: float) -> None:
    """Take part in the common end of the job; after ``import jax``, so that it comes before JAX's own shutdown."""
    if control.size == 1:
        return

    def end() -> None:
        if not control.is_owner():  # a forked data worker
            return
        failfast.end_if_failed(control)
        if control.rank == 0 and not (control.ending or control.position() or control.used):
            control.say(
                f"the {control.size} ranks have called no decorated step and no collective of jaxdist. If there were "
                "steps left to do, each rank has worked alone: decorate the step with jaxdist.data_parallel"
            )
        control.hold()  # the main thread ends this process
        control.close()
        # Until every rank has said goodbye, or the job has failed. It is said where those are that keep the others.
        start, turns = time.monotonic(), 0
        while not control.over.wait(timeout):
            turns += 1
            left = {control.rank, *control.left}
            where = watchdog.whereabouts([r for r in range(control.size) if r not in left])
            if min(left) == control.rank and turns.bit_count() == 1 and not control.over.is_set():  # 1, 2, 4, 8, ...
                waited = f"its script is over, and it has waited for {time.monotonic() - start:.0f} s for the others"
                control.say(f"{waited}: {where or 'they are in a step'}")
        if control.ending:
            time.sleep(_OTHERS_SECONDS)  # they may be in a collective with this one, and say more than that it broke
            control.depart(control.code)

    atexit.register(end)
