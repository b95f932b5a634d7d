"""How a process comes into a job, or does not: `python starts.py NAME [ARGUMENTS]`. Prints FINE at its end."""

import os
import sys
from pathlib import Path
from typing import Any

NAME, ARGUMENTS = sys.argv[1], sys.argv[2:]


def streams() -> list[str]:
    """What the standard streams are."""
    paths = [Path(f"/proc/self/fd/{k}") for k in range(3)]
    return [str(path.readlink()) if path.is_symlink() else "" for path in paths]


def in_a_job() -> None:
    """Without some streams."""
    import numpy as np

    import jaxdist

    ctx = jaxdist.init(timeout=30)
    os.write(2, b"a line of a library's\n")
    for _ in range(5):
        jaxdist.allreduce(np.ones(8))
    Path(ARGUMENTS[0], f"seen{ctx.rank}").write_text(repr(streams()))


def alone() -> None:
    """A process by itself: what `init` refuses, with what, and what it makes."""
    import jax
    import jax.numpy as jnp

    import jaxdist

    assert "mpi4py" not in sys.modules
    from harness.errors import raises

    def refused(kind: type[Exception], *tokens: str, env: dict[str, str] | None = None, **given: Any) -> None:
        os.environ.update(env or {})
        try:
            with raises(kind, *tokens):
                jaxdist.init(**given)
        finally:
            for name in env or {}:
                del os.environ[name]

    refused(ValueError, "nccl", "auto, xla, mpi", communicator="nccl")
    refused(ValueError, "carrier pigeon", "mpi", connector="carrier pigeon")
    refused(ValueError, "'sum'", "all_reduce", communicator={"sum": sum})
    refused(ValueError, "all_reduce", "function", communicator={"all_reduce": 1})
    refused(ValueError, "8 devices", communicator="mpi")
    refused(ValueError, "JAXDIST_COMMUNICATOR", "nope", env={"JAXDIST_COMMUNICATOR": "nope"})
    refused(ValueError, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", env={"RANK": "0"})
    for seconds in ("-1", "inf", "soon"):
        refused(ValueError, "JAXDIST_TIMEOUT", seconds, "seconds", env={"JAXDIST_TIMEOUT": seconds})
    refused(ValueError, "timeout", "-3", timeout=-3)
    for lanes in ("many", "1025"):
        refused(ValueError, "JAXDIST_LANES", lanes, env={"JAXDIST_LANES": lanes})
    refused(ValueError, "lanes=True", lanes=True)
    refused(ValueError, "mpi", "xla", communicator="mpi", lanes=4)
    for word in ("h1000", "cpu,memory=1", "cpu,latency=nan"):
        refused(ValueError, "JAXDIST_MACHINE", word, env={"JAXDIST_MACHINE": word})
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ARGUMENTS[0]}
    refused(TimeoutError, "rank 1", env=there, timeout=0.3)
    jnp.ones(2)  # a started backend is no harm to one process
    ctx = jaxdist.get_context()
    assert jaxdist.init() is ctx is jaxdist.init("local", "xla")
    assert (ctx.rank, ctx.size, ctx.local_rank, ctx.local_size, ctx.is_root) == (0, 1, 0, 1, True)
    assert ctx.num_devices == len(ctx.devices) == ctx.mesh.shape["data"] == 8
    assert (ctx.communicator, ctx.mesh.axis_types) == ("xla", (jax.sharding.AxisType.Auto,))
    refused(RuntimeError, "communicator", "mpi", communicator="mpi")
    refused(RuntimeError, "connector", "mpi", connector="mpi")
    refused(RuntimeError, "timeout", "77", timeout=77)
    ctx.barrier()
    assert ctx.broadcast("x") == "x"
    with raises(ValueError, "root=1"):
        ctx.broadcast(1, root=1)


def initialized() -> None:
    """`jax.distributed` is already, of two processes; with an argument `init` is told to be alone."""
    import jax

    rank = int(os.environ["RANK"])
    jax.distributed.initialize(f"127.0.0.1:{ARGUMENTS[0]}", 2, rank)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    import jax.numpy as jnp
    import numpy as np

    import jaxdist

    ctx = jaxdist.init(*ARGUMENTS[1:])
    step = jaxdist.data_parallel(lambda w, x: (w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.mean(x)))
    _, mean = step(jnp.ones(3), np.repeat(np.array([1, 2], np.float32), 12).reshape(8, 3)[ctx.rows(8)])
    print(f"rank {ctx.rank} of {ctx.size}, {ctx.num_devices} devices, mean {float(mean)}", flush=True)


def late() -> None:
    """A backend has started before `init`, in one of several processes."""
    import jax

    import jaxdist

    if os.environ["RANK"] == "1":
        jax.devices()
    jaxdist.init(timeout=30)


def joins() -> None:
    """By `init` with what the rank of each is given: ``JOINS`` or flags of XLA."""
    mine = ARGUMENTS[int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)]
    given: dict[str, Any] = {}
    if mine.startswith("--"):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" {mine}"
    else:
        name, _, value = mine.partition("=")
        given = {name: int(value) if value.isdigit() else value}
    import jaxdist

    ctx = jaxdist.init(timeout=30, **given)
    print(f"{ctx.num_devices} devices", flush=True)


def funneled() -> None:
    """MPI was initialised to be called by one thread at a time."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    import jaxdist

    print("COMMUNICATOR", jaxdist.init(communicator=ARGUMENTS[0]).communicator, flush=True)  # type: ignore[arg-type]
    jaxdist.barrier()


def connects() -> None:
    """By a connector of the user's own; and nothing of the job listens to the network."""
    import threading

    import numpy as np
    from harness.listening import listening

    import jaxdist
    from jaxdist.connectors.tcp import connect  # private: to make one of the user's own of it

    class Mine:
        name = "mine"

        def __init__(self) -> None:
            inner = connect("env://", 30)
            for name in ("rank", "size", "local_rank", "local_size", "broadcast"):
                setattr(self, name, getattr(inner, name))

    ports, started = set(), threading.Event()

    def watch() -> None:
        while not started.wait(0.01):
            ports.update(listening())

    threading.Thread(target=watch).start()
    ctx = jaxdist.init(Mine(), timeout=60)  # type: ignore[arg-type]
    assert jaxdist.allreduce(np.ones(2), groups=[[0], [*range(1, ctx.size)]])[0] == (ctx.size - 1 if ctx.rank else 1)
    started.set()
    assert {address.removeprefix("::ffff:") for address, _ in ports} == {"127.0.0.1"}, ports
    assert ctx.connector.broadcast({"from": ctx.rank}, root=1) == {"from": 1}


def listens() -> None:
    """Under mpirun: a rank listens on the loopback address alone; a kill will leave no shared memory."""
    import numpy as np
    from harness.listening import listening

    import jaxdist

    assert jaxdist.init().connector.name == "mpi"
    assert jaxdist.allreduce(np.ones(2))[0] == 2
    assert {address.removeprefix("::ffff:") for address, _ in listening()} == {"127.0.0.1"}, listening()
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "sm_segment" in line]
    assert all(line.endswith("(deleted)") for line in shared), shared


def other_processors() -> None:
    """One rank's processor is another; here by name."""
    import jaxdist
    from jaxdist.runtime import compiler  # private: there is one processor here

    name = "Mine" if os.environ["RANK"] == "0" else "Yours"
    compiler.processor = lambda: f"model name\t: {name}".encode()
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *ARGUMENTS])
    jaxdist.init(communicator="xla", timeout=60)


def shares_some_examples() -> None:
    """Two processes have half of the examples in common."""
    import jaxdist

    jaxdist.init().rows(6, {"data": 3, "model": 2})


def sums_in_groups() -> None:
    """Of devices of several processes, by ``within=``; gloo connects them before the step."""

    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxdist

    ctx, tx = jaxdist.init(timeout=30), jaxdist.zero(optax.adam(0.1), 1, within=2)

    @jaxdist.data_parallel
    def step(w: Any, opt: Any, x: Any) -> Any:
        updates, opt = tx.update(w - x.mean(0), opt, w)
        return w + updates, opt

    w = jnp.ones(12)
    step(w, tx.init(w), np.ones((12, 12))[ctx.rows(12)])


def threads() -> None:
    """Ranks are started with other numbers of threads, and take the smallest."""
    import jaxdist

    os.environ["PJRT_NPROC"] = ARGUMENTS[int(os.environ["RANK"])]
    jaxdist.init(communicator="xla", timeout=60)
    assert os.environ["PJRT_NPROC"] == "2"


def spawns_workers() -> None:
    """A script without ``if __name__ == "__main__"`` whose workers import it again."""
    import multiprocessing

    import jaxdist

    jaxdist.init()
    worker = multiprocessing.get_context("spawn").Process(target=print, args=("THE WORKER",))
    worker.start()
    worker.join()


sys.path.insert(1, str(Path(__file__).parents[2]))
globals()[NAME]()
os.write(1, b"FINE\n")
