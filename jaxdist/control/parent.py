"""A rank that mpirun has started ends with it, from the import of jaxdist on.

mpirun, or its daemon on another host, ends its ranks when it ends, and can't when it is killed. A rank that imports or
computes does not notice. (Not a rank behind a shell of its own: the kernel looks at the parent alone.)
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_LAUNCHERS = {
    "mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte", "mpiexec.hydra", "hydra_pmi_proxy",
}  # fmt: skip
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_mpirun() -> None:
    """Ask the kernel to kill this process when its parent dies, if that is an mpirun."""
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:  # it has just ended, or there is no /proc
        return
    if name in _LAUNCHERS:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)
