"""A rank ends when the MPI launcher is gone that started it, from the import of jaxdist on.

mpirun, or its daemon on another host, ends the ranks when it ends, and can't when it is killed. A rank that imports or
computes does not notice; MPI_Init fails, but on a busy machine that is many seconds later.
"""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

from jaxdist.control import proc

_NAMES = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte", "mpiexec.hydra", "hydra_pmi_proxy"}
_GRACE_SECONDS = 2.0  # for a launcher that ends in order, or what has started it, to end this process in its own way
_PRINT_SECONDS = 1.0


def watch() -> None:
    """End this process when the launcher is gone of which it is a rank; in a second call, or without one, nothing.

    What a rank has started in a session of its own is meant to stay, and is no rank.
    """
    launcher = of(os.getpid())
    if launcher is None or any(t.name == "jaxdist-launcher" for t in threading.enumerate()):
        return
    try:
        end = os.pidfd_open(launcher.pid)
    except (OSError, AttributeError):  # a system that is too old to tell of its end
        return

    def wait() -> None:
        waiting = select.poll()
        waiting.register(end, select.POLLIN)
        waiting.poll()
        time.sleep(_GRACE_SECONDS)
        threading.Thread(target=say, daemon=True).start()
        time.sleep(_PRINT_SECONDS)
        os._exit(1)

    def say() -> None:
        text = f"[jaxdist] the MPI launcher (pid {launcher.pid}) has ended, and its rank (pid {os.getpid()}) does\n"
        os.write(2, text.encode())

    if of(os.getpid()) == launcher:  # its number is still its own
        threading.Thread(target=wait, name="jaxdist-launcher", daemon=True).start()
    else:
        os.close(end)


def of(pid: int) -> proc.Name | None:
    """The MPI launcher above a process, which belongs to the session that this has started; None: there is none."""
    first = seen = proc.look(pid)
    while seen is not None and first is not None and seen.parent > 1:
        above = proc.look(seen.parent)
        if above is None:
            return None
        try:
            name = Path(f"/proc/{above.name.pid}/comm").read_text().strip()
        except OSError:
            return None
        if name in _NAMES:
            return above.name
        if above.session != first.session:
            return None
        seen = above
    return None
