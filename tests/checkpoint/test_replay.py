"""`jaxdist replay`: the hash of a step that a job in lanes has logged, again, on one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxdist.observe.metrics import read_metrics

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import jax, jax.numpy as jnp, jaxdist, numpy as np, optax

ctx = jaxdist.init()
tx = jaxdist.zero(optax.adam(0.01), level=3)

@jaxdist.data_parallel
def step(w, opt, x):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    updates, opt = tx.update(grads, opt, w)
    return optax.apply_updates(w, updates), opt, loss

w = np.random.default_rng(0).normal(size=(37, 23)).astype("f")
state, path = {"w": w, "opt": tx.init(w), "step": 0}, sys.argv[1] + "/checkpoints"
if jaxdist.latest_step(path) is not None:
    state = jaxdist.restore(path, state)
own, parts = ctx.parts()
with jaxdist.run_log(sys.argv[1], hash_every=3) as log:
    for k in range(state["step"], 10):
        x = np.split(np.random.default_rng(k).normal(size=(24, 37)).astype("f"), parts)
        w, opt, loss = step(state["w"], state["opt"], np.concatenate([x[i] for i in own]))
        state = {"w": w, "opt": opt, "step": k + 1}
        log(k, loss=loss, state=state)
        if k % 4 == 3:
            jaxdist.save(path, state, k + 1)
"""


def test_a_logged_step_again(jaxdist: Any, tmp_path: Path) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    done = jaxdist("run", "--lanes", 4, "-n", 3, "--launcher", "env", script, run, timeout=120)
    assert done.returncode == 0, done.stderr
    logged = read_metrics(run)
    assert [line["step"] for line in logged if "hash" in line] == [0, 3, 6, 9]
    options = ["--lanes", 4, "--step"]
    again = jaxdist("replay", *options, 6, run / "checkpoints" / "4", script, run, timeout=60)
    assert again.returncode == 0, again.stderr
    assert re.search(r"step 6 from .*: hash (\d+)", again.stdout).group(1) == str(logged[6]["hash"])  # type: ignore[union-attr]
    assert (read_metrics(run), sorted(p.name for p in (run / "checkpoints").glob("[0-9]*"))) == (logged, ["4", "8"])
    late = jaxdist("replay", *options, 2, run / "checkpoints" / "4", script, run, timeout=60)
    assert late.returncode == 1
    assert "the script went on from step 4 with step 4: there is no step 2" in late.stderr
    refused = jaxdist("replay", *options, 2, run, script, run, timeout=60)
    assert refused.returncode == 2
    assert "is not the checkpoint of one step" in refused.stderr
