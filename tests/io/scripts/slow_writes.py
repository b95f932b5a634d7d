"""Writing takes longer than the timeout, on one rank, then on the other; and a last save, in the background, fails."""

import resource
import sys
import time
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

import jaxdist

ctx = jaxdist.init()
slow, write = 0, ocp.PyTreeCheckpointHandler.save


def slowly(*args: Any, **settings: Any) -> Any:
    """As on a disk that is far away."""
    time.sleep(3.5 * (ctx.rank == slow))
    return write(*args, **settings)


ocp.PyTreeCheckpointHandler.save = slowly
state = {"whole": np.ones(3), "wide": jaxdist.shard(np.random.default_rng(0).normal(size=1 << 18))}
for slow in (0, 1):
    jaxdist.save(sys.argv[1], state, slow, wait=slow == 0).wait()
    print("LATEST", jaxdist.latest_step(sys.argv[1]), flush=True)
jaxdist.data.tokenize(["a"], lambda text: (time.sleep(3.5), text.encode())[1], f"{sys.argv[1]}-tokens")
slow = 2
if ctx.rank == 1:  # for this one the disk is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
jaxdist.save(sys.argv[1], state, 2, wait=False)
