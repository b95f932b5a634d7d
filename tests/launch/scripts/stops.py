"""Two ranks: one stops the mpirun above them, and the other one is killed."""

import os
import signal
from pathlib import Path

import jaxdist

ctx = jaxdist.init(timeout=30)
if ctx.is_root:
    above = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(above), signal.SIGSTOP)
ctx.barrier()
if not ctx.is_root:
    os.kill(os.getpid(), signal.SIGKILL)
ctx.barrier()
