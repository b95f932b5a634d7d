"""A script that spawns functions of its own, as a notebook does: `spawning.py WHAT`."""

import contextlib
import io
import linecache
import os  # noqa: F401 (of the cell)
import sys
import threading  # noqa: F401
import time
from typing import Any

import jaxdist

WHAT = sys.argv[1]

CELL = """def fail(how):
    ctx = jaxdist.get_context()
    if ctx.rank != ctx.size - 1:
        ctx.barrier()  # which never ends
    if how == "raises":
        raise Mine("went", "wrong")
    if how == "exits":
        sys.exit(3)
    if how == "is killed":
        os.kill(os.getpid(), 9)
    if how == "leaves":
        os._exit(0)
    return threading.Lock()
"""


class Mine(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def wait():
    print("ready", flush=True)
    time.sleep(100)


def train():
    import jax
    import jax.numpy as jnp
    import optax

    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init()
    key, tx = jax.random.key(0), jaxdist.zero(optax.adam(0.1), 2)

    @jaxdist.data_parallel
    def step(state, batch):
        w, opt = state
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
        updates, opt = tx.update(grad, opt, w)
        return (optax.apply_updates(w, updates), opt), loss

    def loop(batch, steps) -> Any:
        w = jax.random.normal(key, (3,))
        state = w, tx.init(w)
        for i in range(steps):
            state, _ = step(state, batch)
            print("step", i, "on", jaxdist.get_context().rank, 10 * "#")
        return state[0]

    def of_a_rank(batch, *, steps):
        assert ctx is jaxdist.init()
        assert (ctx.size, ctx.num_devices) == (2, 4), "the context is the rank's own"
        w = loop(batch * (1 + ctx.rank), steps)
        return ctx.rank, w, key

    batch = jnp.arange(12.0).reshape(4, 3)
    with contextlib.redirect_stdout(io.StringIO()) as out:  # which has no bytes below it, as in a notebook
        results = jaxdist.spawn(of_a_rank, 2, (batch,), {"steps": 2}, devices=2, prefix=True)
    seen = sorted(out.getvalue().splitlines())
    assert seen == sorted(f"[{r}] step {i} on {r} {10 * '#'}" for r in range(2) for i in range(2)), seen
    assert [rank for rank, *_ in results] == [0, 1]
    with contextlib.redirect_stdout(io.StringIO()):
        want = loop(jnp.concatenate([batch, 2 * batch]), 2)
    for _, w, again in results:
        assert (type(w).__name__, w.dtype) == ("ndarray", jnp.float64)
        assert abs(w - want).max() < 1e-12, (w, want)
        assert (again == key).all()
    print("done")


def errors():
    cached: Any = (len(CELL), None, CELL.splitlines(True), "cell")
    linecache.cache["cell"] = cached
    exec(compile(CELL, "cell", "exec"), globals())
    for how, n in (("raises", 2), ("exits", 1), ("is killed", 2), ("leaves", 1), ("leaves", 2), ("returns a lock", 1)):
        try:
            jaxdist.spawn(globals()["fail"], n, [how])
        except Exception as error:
            print(type(error).__name__, error, *getattr(error, "__notes__", ()), "END")
    print(jaxdist.spawn(lambda: sys.exit(), 1))


if __name__ == "__main__":
    if WHAT == "trains":
        train()
    elif WHAT == "errors":
        errors()
    else:
        try:
            jaxdist.spawn(wait, 2)
        except KeyboardInterrupt:
            print("stopped", flush=True)
