"""A loader with worker processes: `workers.py [fails|unguarded|dies]`."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import jax

import jaxdist


class Source:
    """Twelve examples, of which one is bad if it is to fail."""

    def __len__(self) -> int:
        return 12 if "dies" not in sys.argv else 1000  # more than workers read ahead

    def __getitem__(self, index: int) -> dict[str, float]:
        if index == 9 and "fails" in sys.argv:
            raise ValueError("a bad example")
        return {"x": float(index)}


def die() -> None:
    """The last rank, in the middle of an epoch."""
    ctx = jaxdist.get_context()
    if os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    batches = iter(jaxdist.loader(Source(), 4, workers=2))
    for _ in range(20):
        next(batches)
    time.sleep(1)  # until they wait for somebody to take what they have
    print(*re.findall(r"/dev/shm/(?:psm_|sem.mp)\S+", Path("/proc/self/maps").read_text()), flush=True)
    jaxdist.barrier()
    if ctx.rank == ctx.size - 1:
        os.killpg(0, signal.SIGKILL)  # as MPI's launchers do
    time.sleep(100)


if __name__ == "__main__" or "unguarded" in sys.argv:
    jaxdist.init()
    if "dies" in sys.argv:
        die()
    batches = jaxdist.loader(Source(), 4, shuffle=False, workers=1)
    kept = [jax.numpy.asarray(batch["x"]) for batch in batches]  # in use when the script ends
    jaxdist.barrier()
    print(sum(float(x.sum()) for x in kept))
