"""Several ranks evaluate, log and profile: sums of all ranks on each; sinks of which one fails."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness.check import close
from harness.errors import raises

import jaxdist

ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size
X = np.random.default_rng(0).normal(size=(53, 4))
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)))


def evaluations() -> list[float]:
    """The same on every rank, to the bit."""

    def sums(w: Any, x: Any) -> Any:
        return {"sum": jnp.sum((x @ w) ** 2), "count": len(x), "columns": jnp.sum(x @ w, 0)}

    step, found = jaxdist.data_parallel(sums), {}
    for w in (W, jaxdist.shard(W)):
        found = jaxdist.evaluate(step, w, jaxdist.loader(X, 5, tail="keep"))
        close(found, sums(np.asarray(W), X), 1e-12)
    assert jaxdist.evaluate(step, W, jaxdist.loader(X, 5))["count"] == 50  # without the tail
    with raises(ValueError, "evaluate", f"{N} ranks"):
        jaxdist.evaluate(jax.jit(lambda x: jnp.sum(x)), [X[:3]])
    return [float(found["sum"]), *map(float, found["columns"])]


def seen(folder: str) -> None:
    """`run_log` waits for no step, `profile` is of each rank, and what can't be written is an error on all."""

    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2))(w)
        return [a - 0.1 * g for a, g in zip(w, grads, strict=True)], {"loss": value}

    w = [jnp.ones((64, 64), jnp.float32) / 64, jnp.ones((64, 8), jnp.float32) / 64]
    # No other batch of this job has as many rows on some rank: a call that may be of another size is compared.
    batch, path = jnp.ones((33, 64), jnp.float32) * (R + 1), Path(folder, "seen")
    if ctx.is_root:
        path.mkdir()
        (path / "metrics.jsonl").write_bytes(b"\0" * 9)
    ctx.barrier()
    with jaxdist.run_log(path, total=5, examples_per_step=8) as log:
        for i in range(3):
            # The root's third call can't end before rank 1 makes its own (the first two wait for each other), which it
            # does when the root is done with logging it: if `log` waited for the loss, this would be a deadlock.
            while i == 2 and not ctx.is_root and not Path(folder, "logged").exists():
                time.sleep(0.01)
            w, aux = step(w, batch)
            log(i, **aux)
            if i == 2 and ctx.is_root:
                Path(folder, "logged").touch()
        with jaxdist.profile(Path(folder, "trace")):
            for i in (3, 4):
                w, aux = step(w, batch)
                log(i, **aux)
    jaxdist.allreduce(jnp.ones(10, jnp.float32))
    Path(folder, "file").touch()
    for what in (jaxdist.run_log, jaxdist.profile):
        with raises(OSError, "file"), what(Path(folder, "file", "run")):
            pass
