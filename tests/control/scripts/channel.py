"""A rank of a job at whose ports others knock: `python channel.py NAME [ARGUMENTS]`."""

import os
import sys
import time
from pathlib import Path

import numpy as np

import jaxdist

NAME, ARGUMENTS = sys.argv[1], sys.argv[2:]
RANK = int(os.environ.get("RANK", "0"))


def rounds() -> None:
    """Each is a little training, and messages of many lengths from either rank; until a file is there."""
    import hashlib

    import jax
    import jax.numpy as jnp

    ctx = jaxdist.init(timeout=60)
    step = jaxdist.data_parallel(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w))
    x, done = np.sin(np.arange(4 * 8, dtype=np.float32) + ctx.rank).reshape(4, 8), False
    while not done:
        w = jnp.linspace(-1, 1, 64).reshape(8, 8)
        for k in range(20):
            w = step(w, x)
            size = [0, 1, 1000, 1 << 20][k % 4]
            number, content = ctx.broadcast((k, np.full(size, k)), root=k % 2)
            assert number == k
            assert content.shape == (size,)
            assert (content == k).all()
        print("ROUND", hashlib.sha256(np.asarray(w.addressable_data(0)).tobytes()).hexdigest(), flush=True)
        done = ctx.broadcast(Path(ARGUMENTS[0]).exists())


def mixes() -> None:
    """Rank 0 makes another call than rank 1; rank 2 comes when both know, and all go on with the next call."""
    ctx, told = jaxdist.init(timeout=60), Path(ARGUMENTS[0])
    while ctx.rank == 2 and len(list(told.iterdir())) < 2:
        time.sleep(0.01)
    try:
        ctx.broadcast(None) if ctx.rank == 0 else ctx.barrier()
    except jaxdist.ControlError as error:
        (told / str(ctx.rank)).touch()
        print("TOLD", str(error).replace("\n", " "), flush=True)
    ctx.barrier()
    print("MET", flush=True)


def joins() -> None:
    """As the rank and of the size that are given, at an address."""
    url, rank, size = ARGUMENTS
    try:
        ctx = jaxdist.init(url, rank=int(rank), size=int(size))
    except (TimeoutError, ValueError) as error:
        print(f"REFUSED {type(error).__name__}: {error}", flush=True)
        os._exit(1)
    ctx.barrier()
    print("IN", ctx.rank, flush=True)


def homes() -> None:
    """What a home directory that can keep no secret leads to."""
    folder = Path(os.environ["HOME"], ".jaxdist")
    for name in ("read by others", "short", "no folder"):
        if name == "no folder":
            (folder / "secret").unlink()
            folder.rmdir()
            folder.write_text("")
        else:
            folder.mkdir(exist_ok=True)
            (folder / "secret").write_text("x" * (64 if name == "read by others" else 1))
            (folder / "secret").chmod(0o644 if name == "read by others" else 0o600)
        try:
            jaxdist.init("tcp://node1.invalid:1", rank=0, size=2, timeout=1)
        except ValueError as error:
            print(f"REFUSED {name}: {error}", flush=True)


globals()[NAME]()
