"""Run a script whose processes die when it has saved a step: ``python dies.py STEP SCRIPT [ARGUMENTS …]``."""

import os
import runpy
import signal
import sys
from typing import Any

import jaxdist

at, script = int(sys.argv[1]), sys.argv[2]
save = jaxdist.save


def save_and_die(path: Any, state: Any, step: int, **settings: Any) -> None:
    save(path, state, step, **settings | {"wait": True})
    if step == at:
        os.kill(os.getpid(), signal.SIGKILL)


jaxdist.save = save_and_die
sys.argv, sys.path[0] = sys.argv[2:], os.path.dirname(os.path.abspath(script))  # noqa: PTH100, PTH120
runpy.run_path(script, run_name="__main__")
