"""Saves without a pause, in shards and whole, every second time in the background; goes on from the last one if it is
started again: `saver.py FOLDER`."""

import sys
from typing import Any

import numpy as np

import jaxdist

ctx, path = jaxdist.init(), sys.argv[1]
wide = jaxdist.shard({"even": np.zeros((64, 4096), np.float32), "padded": np.zeros((33, 4097), np.float32)})
like: dict[str, Any] = {"wide": wide, "whole": np.zeros((256, 256)), "count": 0}
last = 0
if jaxdist.latest_step(path) is not None:
    state = jaxdist.restore(path, like)
    last = state["count"]
    whole = [np.asarray(x) for x in jaxdist.unshard(state["wide"]).values()]
    values = {float(f(x)) for x in [*whole, state["whole"]] for f in (np.min, np.max)}
    assert values == {float(last)}, (values, last)
if ctx.is_root:
    print("RESTORED", last, flush=True)
for n in range(last + 1, 100_000):
    filled = jaxdist.shard({k: np.full(v.shape, n, np.float32) for k, v in wide.items()})
    state = {"wide": filled, "whole": np.full((256, 256), float(n)), "count": n}
    jaxdist.save(path, state, n, keep=3, wait=n % 2 == 0)
    if ctx.is_root:
        print("SAVED", n, flush=True)
