"""Some ranks stop in pdb, or all fail: `debugging.py RANKS [fails]`."""

import sys

import numpy as np

import jaxdist

ctx = jaxdist.init()
total = 0.0
for turn in range(2):
    if turn == 1 and str(ctx.rank) in sys.argv[1]:
        breakpoint()
    total += float(jaxdist.allreduce(np.ones(1))[0])
if "fails" in sys.argv:
    raise ValueError(f"boom on rank {ctx.rank}")
print("TOTAL", total, flush=True)
