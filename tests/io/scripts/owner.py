"""Saves into a folder and lives on: `owner.py FOLDER [forks|ends]`. With `forks`, a child tries to save there, and it
ends; with `ends`, at once, while it saves in the background."""

import os
import sys
import time

import numpy as np

import jaxdist

if "ends" in sys.argv:
    jaxdist.save(sys.argv[1], {f"w{i}": np.full(200_000, i) for i in range(20)}, 2, wait=False)
    print("the end", flush=True)
    sys.exit()
jaxdist.save(sys.argv[1], {"w": 1}, 1)
print("SAVED", flush=True)


def child() -> None:
    """Tries to save beside its parent."""
    try:
        jaxdist.save(sys.argv[1], {"w": 1}, 2)
    except jaxdist.CheckpointError as error:
        print("CHILD", error, flush=True)


if "forks" in sys.argv:
    if os.fork() == 0:
        child()
        sys.stdout.flush()
        os._exit(0)  # as multiprocessing ends a child: tensorstore's own end does not survive a fork
    assert os.wait()[1] == 0
    jaxdist.save(sys.argv[1], {"w": 1}, 3)
else:
    time.sleep(300)
