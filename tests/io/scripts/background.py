"""A save in the background fails: `background.py FOLDER [seen]`; if that was seen, another one is still under way."""

import resource
import sys

import numpy as np

import jaxdist

path, large = sys.argv[1], {"w": np.random.default_rng(0).normal(size=1 << 17)}
jaxdist.save(path, {"w": np.ones(3)}, 1)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, most))
saving = jaxdist.save(path, large, 2, wait=False)
if "seen" in sys.argv:
    try:
        saving.wait()
    except jaxdist.CheckpointError:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        jaxdist.save(path, {f"w{i}": np.full(200_000, i) for i in range(20)}, 2, wait=False)
print("the end", flush=True)
