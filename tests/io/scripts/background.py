"""A save in the background is under way at the end of a script: `background.py FOLDER`."""

import sys

import numpy as np

import jaxdist

jaxdist.save(sys.argv[1], {f"w{i}": np.full(200_000, i) for i in range(20)}, 2, wait=False)
print("the end", flush=True)
