"""Several ranks evaluate and log: sums of all ranks on each, and sinks of which some fail or hang on the root."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.observe import sinking

X = np.random.default_rng(0).normal(size=(53, 4))
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)))


def sums_of(w: Any, x: Any) -> Any:
    return {"sum": jnp.sum((x @ w) ** 2), "count": len(x), "columns": jnp.sum(x @ w, 0)}


def said(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def evaluations() -> Any:
    ctx = jaxdist.get_context()
    step = jaxdist.data_parallel(sums_of)
    expected = sums_of(np.asarray(W), X)
    for w in (W, jaxdist.shard(W)):
        sums = jaxdist.evaluate(step, w, jaxdist.loader(X, 5, tail="keep"))
        assert sums["count"] == 53
        assert np.allclose(sums["sum"], expected["sum"], rtol=1e-12)
        assert np.allclose(sums["columns"], expected["columns"], rtol=1e-12)

    @jaxdist.data_parallel
    def weighted(w: Any, batch: Any) -> Any:
        x, weight = batch
        return {"sum": jnp.sum(jnp.sum((x @ w) ** 2, 1) * weight), "count": jnp.sum(weight)}

    padded = jaxdist.loader(X, 5, tail="pad")
    again = jaxdist.evaluate(weighted, W, padded)
    assert again["count"] == 53
    assert np.allclose(again["sum"], expected["sum"], rtol=1e-12)

    @jaxdist.data_parallel
    def mean(w: Any, batch: Any) -> Any:
        x, weight = batch
        return jnp.sum(jnp.sum((x @ w) ** 2, 1) * weight) / jnp.sum(weight)

    def local(x: Any) -> Any:
        return jnp.sum(x)

    part = X[2 * ctx.rank : 2 * ctx.rank + 2]
    refused = [
        said(lambda: jaxdist.evaluate(mean, W, padded)),
        said(lambda: jaxdist.evaluate(jax.jit(local), [part])),
        said(lambda: jaxdist.evaluate(jaxdist.data_parallel(lambda w, x: x @ w), W, [part])),
        said(lambda: jaxdist.evaluate(step, W, [])),
    ]
    dropped = jaxdist.evaluate(step, W, jaxdist.loader(X, 5))["count"]
    return {"sum": sums["sum"], "columns": sums["columns"].tolist(), "refused": refused, "dropped": dropped}


class Recording:
    """What it was given; fails, hangs, or is refused, as it is told."""

    def __init__(self, path: Path, what: str = ""):
        self.path, self.what = path, what

    def note(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")

    def open(self, path: Path) -> None:
        if self.what == "refused":
            raise ConnectionError("no such server")
        self.note("open")

    def drop(self, step: int) -> None:
        self.note(f"drop {step}")

    def write(self, step: int, time: float, metrics: Any) -> None:
        if self.what == "hangs":
            threading.Event().wait()
        if self.what == "fails" and step == 1:
            raise ConnectionError("the server is gone")
        self.note(f"{step} {metrics['loss']}")

    def close(self, failed: bool) -> None:
        self.note(f"close {failed}")


def sinks(path: str) -> Any:
    ctx, folder = jaxdist.get_context(), Path(path)
    sinking._END = 1.0
    step = jaxdist.data_parallel(lambda w, x: (w - 0.0, jnp.mean(x * w)))

    def train(first: int, last: int, *made: Recording) -> None:
        w = jnp.ones(())
        with jaxdist.run_log(folder / "run", sinks=made) as log:
            for i in range(first, last):
                w, loss = step(w, np.full(4, i, float))
                log(i, loss=loss)

    def sink(name: str, what: str = "") -> Recording:
        return Recording(folder / f"{name}{ctx.rank}", what)

    train(0, 4, sink("good"), sink("fails", "fails"), sink("hangs", "hangs"))
    train(2, 5, sink("good"))
    return [said(lambda: train(5, 6, sink("other"), sink("refused", "refused")))]
