"""Kills a job while it saves, again and again: `PYTHONPATH=tests python tests/mpi/kills.py COUNT SEED`.

Two ranks save all the time, every second time in the background, in shards and whole, and go on from the last
checkpoint when they are started again. Each start checks that what it restores is whole, and none may be lost of those
whose `save` had returned (one written in the background: when the next `save` had returned).
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from pathlib import Path

from harness import jobs

SAVER = """
import sys
import jaxdist, numpy as np
ctx = jaxdist.init()
path = sys.argv[1]
wide = jaxdist.shard({"even": np.zeros((64, 4096), np.float32), "padded": np.zeros((33, 4097), np.float32)})
state = {"wide": wide, "whole": np.zeros((256, 256)), "step": 0}
last = jaxdist.latest_step(path)
if last is not None:
    state = jaxdist.restore(path, state)
    whole = jaxdist.unshard(state["wide"]).values()
    values = {float(v.min()) for v in map(np.asarray, whole)} | {float(np.asarray(v).max()) for v in whole}
    assert values == {float(last)}, (values, last)
    assert state["step"] == last and (state["whole"] == last).all()
if ctx.is_root:
    print("RESTORED", last or 0, flush=True)
for step in range((last or 0) + 1, 100000):
    filled = jaxdist.shard({k: np.full(v.shape, step, np.float32) for k, v in wide.items()})
    state = {"wide": filled, "whole": np.full((256, 256), float(step)), "step": step}
    jaxdist.save(path, state, step, keep=3, wait=step % 2 == 0, overwrite=step % 3 == 0)
    if ctx.is_root:
        print("SAVED", step, flush=True)
"""


def run(count: int, seed: int, where: Path) -> list[int]:
    """The step from which each start but the first went on.

    Raises:
      AssertionError: a start could not restore, or went on from an earlier checkpoint than it should.
    """
    script = where / "saver.py"
    script.write_text(SAVER)
    rng = random.Random(seed)
    certain, found = 0, []
    for _ in range(count + 1):
        job = jobs.start_mpirun(2, [str(script), str(where / "run")], env={"JAXDIST_COMMUNICATOR": "mpi"})
        try:
            job.wait_for(lambda text: text.count("SAVED") > 1, timeout=120)
            time.sleep(rng.uniform(0, 0.5))  # among the saves, which follow each other without a pause
            job.kill()
            text, everything = job.text(), job.everything()
        finally:
            job.kill()
        restored = re.search(r"RESTORED (\d+)", text)
        assert restored, everything
        assert int(restored[1]) >= certain, f"restored {restored[1]}, but {certain} was saved\n{everything}"
        found.append(int(restored[1]))
        saved = [int(n) for n in re.findall(r"SAVED (\d+)$", text, re.MULTILINE)]
        certain = saved[-1] if saved[-1] % 2 == 0 else saved[-2]
    return found[1:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        steps = run(int(sys.argv[1]), int(sys.argv[2]), Path(scratch))
    print(f"{len(steps)} kills, nothing lost; restored {steps}")
