"""One rank of several does something else: `python faults.py NAME [CULPRIT [ARGUMENT]]`, by default rank 1.

Whoever gets to the end of a fault that should have ended the job prints THROUGH.
"""

import atexit
import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist

NAME, CULPRIT, ARGUMENT = (*sys.argv[1:], *("1", "")[len(sys.argv) - 2 :])
ctx = jaxdist.init()
ODD = ctx.rank == int(CULPRIT)
SCALE = 1.0


def descend(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(lambda w: jnp.mean((x @ w["w"] + w["b"]) ** 2))(w))


@jaxdist.data_parallel
def step(w: Any, x: Any) -> Any:
    return descend(w, x), jnp.mean(x) * SCALE


@jaxdist.data_parallel
def another(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda a: a * 0.9, w), jnp.max(x)


def state(width: int = 2) -> Any:
    return {"w": jnp.ones((3, width), jnp.float32), "b": jnp.zeros(width, jnp.float32)}


def batch(rows: int = 4) -> Any:
    return np.random.default_rng(ctx.rank).normal(size=(rows, 3)).astype(np.float32)


def train(calls: int, w: Any = None) -> Any:
    w = state() if w is None else w
    for _ in range(calls):
        w, _ = jax.block_until_ready(step(w, batch()))
    return w


# --- a rank that ends


def raises() -> None:
    train(3)
    if ODD:
        sys.excepthook = sys.__excepthook__ if ARGUMENT else sys.excepthook  # as one that replaces ours
        raise ValueError("boom on purpose")
    time.sleep(100)


def raises_in_a_thread() -> None:
    if ODD:
        threading.Thread(target=lambda: [][1]).start()
    time.sleep(100)


def raises_in_a_callback() -> None:
    """It runs on rank 0, and the others must not go on with what it did not return, though this one is ready to."""

    def host(v: Any) -> Any:
        raise ValueError("boom on purpose")

    called = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), x.dtype), x.sum())
    with contextlib.suppress(RuntimeError):
        jax.block_until_ready(jaxdist.data_parallel(called)(np.ones(3)))
    time.sleep(100)


def runs_out_of_memory() -> None:
    sorts = jaxdist.data_parallel(lambda w, x: w + jnp.sort(jnp.sin(x.sum() + jnp.arange(1e7)))[:3])
    for call in range(5):
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20 if ODD and call == 2 else limits[0], limits[1]))
        with contextlib.suppress(RuntimeError):  # the script skips the batch
            jax.block_until_ready(sorts(np.ones(3), batch()))
        resource.setrlimit(resource.RLIMIT_AS, limits)


def exits() -> None:
    w = train(2)
    if ODD:
        sys.exit(3)
    train(1000, w)


def raises_system_exit() -> None:
    """As `exit(4)` does, and `raise SystemExit(main())` at the end of a script."""
    w = train(2)
    with contextlib.suppress(SystemExit):
        raise SystemExit(5)
    if ODD:
        raise SystemExit(4)
    train(1000, w)


def catches_an_exit() -> None:
    """As its last act, where click or argparse calls `sys.exit`."""
    train(2)
    if ODD:
        with contextlib.suppress(SystemExit):
            sys.exit(4)


def dies() -> None:
    """By a signal, in the middle of training."""
    w = train(2)
    if ODD:
        os.kill(os.getpid(), getattr(signal, ARGUMENT or "SIGKILL"))
    train(1000, w)


def dies_below_one_that_is_stopped() -> None:
    if ctx.is_root:  # mpirun is stopped
        above = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(above), signal.SIGSTOP)
    ctx.barrier()
    dies()


def trains() -> None:
    """Until something from outside ends it."""
    w = train(2)
    print("READY", flush=True)
    for _ in range(1000):
        w = train(1, w)
        time.sleep(0.1)


def leaves_early() -> None:
    train(2 if ODD else 5)


def leaves_unseen() -> None:
    """Between the look whether all are here and the call."""
    from jaxdist.agreement.ledger import Ledger  # private: nothing else makes a rank come so late

    w = train(2)
    if not ODD:
        time.sleep(1)  # until the other one has left
        Ledger.check_all_here = lambda *args: None  # type: ignore[method-assign]
        train(1, w)


def leaves_a_receiver() -> None:
    if not ODD:
        jaxdist.recv(np.zeros(2, np.float32), 1)


# --- a rank that does not come


def stuck() -> None:
    w = train(2)
    if ODD:
        stuck_in_the_loader()
    train(1, w)


def stuck_in_the_loader() -> None:
    if ARGUMENT == "stops":  # the others ask it, and wait for an answer
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)  # here


def stuck_at_first() -> None:
    if ODD:
        stuck_in_the_loader()
    train(1)


def stuck_eagerly() -> None:
    jaxdist.allreduce(1.0)
    if ODD:
        stuck_in_the_loader()
    jaxdist.allreduce(np.ones(3))


def fails_eagerly() -> None:
    """In a collective that the others are in; the script goes on, to a step that every rank expects."""
    put = jax.device_put

    def fails(*args: Any) -> Any:
        raise RuntimeError("no memory on purpose")

    w, length = train(1), 300_000
    for call in range(6):
        jax.device_put = fails if ODD and call == 3 else put  # before a call of a step that compares nothing
        with contextlib.suppress(RuntimeError):
            jaxdist.allreduce(np.ones(length, np.float32))
        jax.device_put = put
        w = train(1, w)


def calls_in_a_handler() -> None:
    """Of a signal that comes while a call waits for the other rank."""
    if ODD:
        time.sleep(3)
    else:
        signal.signal(signal.SIGALRM, lambda *_: jaxdist.allreduce(1) if ARGUMENT else ctx.barrier())
        signal.alarm(1)
    jaxdist.allreduce(2)
    jaxdist.barrier()


def two_threads() -> None:
    """Each trains, and nothing says whose call is first."""
    running = [threading.Thread(target=train, args=(100,)) for _ in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def slow() -> None:
    """No fault: no rank is missing, and it takes its time."""

    def slowly(value: Any) -> Any:  # on the root
        time.sleep(2.5)
        return np.asarray(value)

    waits = jaxdist.data_parallel(
        lambda w, x: (descend(w, x), jax.pure_callback(slowly, jax.ShapeDtypeStruct((), x.dtype), x.mean()))
    )
    jax.block_until_ready(waits(train(1), batch()))


# --- ranks whose programs, or whose order of calls, are not the same


def constant() -> None:
    given = jnp.asarray(np.full((3, 2), 1.0 + ODD, np.float32))
    jaxdist.data_parallel(lambda w, x: (w - jnp.mean(x @ given), x.sum()))(np.ones(3), batch())


def operation() -> None:
    jaxdist.data_parallel(lambda w, x: (jnp.tanh(w) if ODD else jnp.sin(w), x.sum()))(np.ones(3), batch())


def order_of_collectives() -> None:
    def on_each(x: Any) -> Any:
        found = {f: f(x.sum(), "data") for f in ((jax.lax.pmax, jax.lax.psum)[:: -1 if ODD else 1])}
        return found[jax.lax.psum] + found[jax.lax.pmax]

    summed = jaxdist.per_device(on_each, in_specs=jax.P("data"), out_specs=jax.P())
    jaxdist.data_parallel(lambda w, x: (w - summed(x), x.sum()))(np.ones(3), batch())


def retraced() -> None:
    """A global has changed on both ranks, to other values."""
    global SCALE
    w = train(2)
    SCALE = 2.0 + ODD
    step.clear_cache()  # type: ignore[attr-defined]
    train(2, w)


def settings() -> None:
    w = train(2)
    with jax.default_matmul_precision("highest" if ODD else None):  # type: ignore[arg-type]
        train(1, w)


def rows() -> None:
    """Of a length that every rank knows, in another call than on the others."""
    w = state()
    for i in range(8):
        w, _ = jax.block_until_ready(step(w, batch(3 if (i % 2 == 0) != (ODD and i == 6) else 4)))


def order() -> None:
    """Two steps of the same types."""
    w = state()
    for i in range(8):
        for one in (another, step) if ODD and i == 6 else (step, another):
            w, _ = jax.block_until_ready(one(w, batch()))


def order_of_twins() -> None:
    """Two decorations of one function."""
    w, twin = state(), jaxdist.data_parallel(step.__wrapped__)  # type: ignore[attr-defined]
    for i in range(6):
        for one in (twin, step) if ODD and i == 4 else (step, twin):
            w, _ = jax.block_until_ready(one(w, batch()))


def eager_between() -> None:
    """A sum comes before the step, on the others after it."""
    w = train(2)
    if ODD:
        jaxdist.allreduce(jnp.ones(2))
    train(1, w)
    jaxdist.allreduce(jnp.ones(2))


def changed_copy() -> None:
    w = train(3)
    train(2, jax.tree.map(lambda x: x * 3, w) if ODD else w)


# --- the end of a script


def ends_late() -> None:
    """No fault: it takes longer than the timeout to end."""
    train(2)
    if ODD:
        time.sleep(4)
        print("LATE", flush=True)


def raises_in_a_child() -> None:
    """No fault of the job: an error of a forked child."""
    w = train(2)
    if ODD:
        child = multiprocessing.get_context("fork").Process(target=lambda: 1 / 0)
        child.start()
        child.join()
        print("child", child.exitcode, flush=True)
    train(1, w)


def error_at_exit() -> None:
    """No fault of the job: an error of the script's own at exit, an exit that was caught, steps of all until then."""
    w = train(2)

    def last() -> None:
        print(f"WEIGHTS {float(step(w, batch())[0]['b'][0]):.6f}", flush=True)
        if ODD:
            raise ValueError("no business of the job")

    atexit.register(last)
    try:
        sys.exit(4)
    except SystemExit:
        print("caught", flush=True)


def dies_at_the_end() -> None:
    """While it waits for the others."""
    if ODD:
        threading.Thread(target=lambda: (time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
        sys.exit()
    time.sleep(60)


# --- what is no error


def undecorated() -> None:
    """Each rank trains by itself."""
    w = state()
    for _ in range(2):
        w = jax.jit(descend)(w, batch())


def sends() -> None:
    if ODD:
        jaxdist.send(np.ones(2, np.float32), 0)
    else:
        jaxdist.recv(np.zeros(2, np.float32), 1)


# --- calls under a condition


def unshards_on_the_root() -> None:
    @jaxdist.data_parallel
    def inner(w: Any, x: Any) -> Any:
        return descend(w, x)

    w = jaxdist.shard(state())
    jaxdist.unshard(w) if ctx.is_root else inner(w, batch())


def stops_without_a_terminal() -> None:
    breakpoint() if ODD else train(1)


globals()[NAME]()
if NAME not in ("slow", "ends_late", "error_at_exit", "undecorated", "sends"):
    print("THROUGH", flush=True)
