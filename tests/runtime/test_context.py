"""init and Context: one process, several by hand, several under mpirun; and what init refuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
from harness import jobs

from jaxdist.runtime.coordinator import await_listener

_ALONE = """
import importlib.util, os, sys
from types import SimpleNamespace
import jax, jax.numpy as jnp, numpy as np
import jaxdist
from jaxdist.runtime import start
from jaxdist.runtime.context import get_context, init
from jaxdist import compat
assert "mpi4py" not in sys.modules and not compat.backend_started(), "import does too much"

def refused(kind, words, *args, **kw):
    try:
        init(*args, **kw)
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {args}")

def refused_as_one_of_two(kind, words, wanted):
    control = SimpleNamespace(rank=0, size=2, who=str, exchange=lambda tag, own, timeout: [own, own])
    try:
        start.jax_started(SimpleNamespace(name="env", local_rank=0), control, None, wanted, 1.0)
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError("not refused")

find = importlib.util.find_spec
if find("mpi4py"):
    importlib.util.find_spec = lambda name, *a: None if name == "mpi4jax" else find(name, *a)
    refused_as_one_of_two(ImportError, "mpi4jax is not installed. Install: pip install", "mpi")
    importlib.util.find_spec = find
    refused_as_one_of_two(ValueError, "MPI's world has 1 processes, the job has 2", "mpi")

refused(ValueError, "unknown communicator 'nccl'; valid: auto, xla, mpi", communicator="nccl")
refused(ValueError, "unknown connector 'carrier pigeon'; valid: auto, mpi", "carrier pigeon")
refused(ValueError, "8 devices", communicator="mpi")
os.environ["JAXDIST_COMMUNICATOR"] = "nope"
refused(ValueError, "JAXDIST_COMMUNICATOR='nope'")
os.environ["JAXDIST_COMMUNICATOR"] = "xla"
os.environ["RANK"] = "0"
refused(ValueError, "missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT")
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
refused(TimeoutError, "missing: rank 1", timeout=0.3)
del os.environ["RANK"], os.environ["WORLD_SIZE"]
jnp.ones(2)  # a started backend is no harm to one process
refused_as_one_of_two(RuntimeError, "a JAX backend was already in use when jaxdist.init was called", "auto")
ctx = get_context()
assert init() is ctx and init("local") is ctx and init("local", "xla") is ctx
assert (ctx.rank, ctx.size, ctx.local_rank, ctx.local_size) == (0, 1, 0, 1)
assert ctx.is_root and ctx.root_rank == 0
assert ctx.num_devices == 8 == len(ctx.devices) == ctx.mesh.shape["data"]
assert ctx.mesh.axis_names == ("data",)
assert ctx.mesh.axis_types == (jax.sharding.AxisType.Auto,)
assert (ctx.communicator, ctx.connector.name, ctx.control.size) == ("xla", "local", 1)
refused(RuntimeError, "communicator='mpi'", communicator="mpi")
refused(RuntimeError, "connector='mpi'", "mpi")
ctx.barrier()
assert ctx.broadcast("x") == "x"
try:
    ctx.broadcast(1, root=1)
except ValueError as error:
    assert "valid: 0..0" in str(error)
print("fine")
"""

# One launch checks all that needs several processes: starting them is what takes the time.
_SEVERAL = """
import collections, contextlib, os, sys, threading, time
from typing import NamedTuple
from harness.listening import listening
me = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={8 + int(me)}"  # changes no program: may differ
if "OMPI_COMM_WORLD_RANK" in os.environ:
    from jaxdist.connectors.mpi import load
    load()
before = listening()  # Open MPI's own, on all interfaces
ports, started = set(), threading.Event()
def watch():
    while not started.wait(0.01):
        ports.update(listening())
threading.Thread(target=watch).start()
if me != "0":
    time.sleep(0.3)  # the root listens meanwhile
if sys.argv[2] == "no policies":
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")
    os.sched_setscheduler = refuse
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxdist
from jaxdist.runtime.context import init
from jaxdist.connectors.tcp import from_env
from jaxdist.control.channel import ControlError

class Mine:
    "A connector of the user's own."
    name = "mine"
    def __init__(self):
        inner = from_env(30)
        for name in ("rank", "size", "local_rank", "local_size", "barrier", "broadcast", "abort"):
            setattr(self, name, getattr(inner, name))

try:
    ctx = init(Mine() if sys.argv[1] == "mine" else sys.argv[1], timeout=60)
    rank, size = ctx.rank, ctx.size
    assert jaxdist.allreduce(np.ones(2), groups=[[0], [*range(1, size)]])[0] == (size - 1 if rank else 1)
finally:
    started.set()
assert ports - before, "not even gloo was seen"
assert {address for address, _ in ports - before} == {"127.0.0.1"}, ports
assert init() is ctx and init(communicator=ctx.communicator) is ctx
try:
    init(communicator="mpi" if ctx.communicator == "xla" else "xla")
except RuntimeError as error:
    assert "already called init" in str(error)
else:
    raise AssertionError("a conflicting init went through")
c = ctx.connector
assert c.broadcast({"from": rank}, root=size - 1) == {"from": size - 1}
c.barrier()

# Gloo's thread waits for its turn, if it may, and no other does.
mine = []
thread = threading.Thread(target=lambda: mine.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
policies = collections.Counter()
for task in os.listdir("/proc/self/task"):
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        policies[os.sched_getscheduler(int(task))] += 1
assert policies[os.SCHED_BATCH] == (sys.argv[2] != "no policies"), policies
assert mine == [os.sched_getscheduler(0)] == [os.SCHED_OTHER]
# Under PYTHONUNBUFFERED, as tests run: a line is written whole.
assert (sys.stdout.line_buffering, sys.stdout.write_through) == (True, False)

# XLA_FLAGS asks for more devices; several processes have one each
assert jax.local_device_count() == 1 and ctx.num_devices == size == len(jax.devices())
assert [d.process_index for d in ctx.devices] == list(range(size))
x = jax.make_array_from_process_local_data(
    NamedSharding(ctx.mesh, P("data")), np.full((2, 3), rank, np.float32))
assert float(jax.jit(lambda x: x.sum())(x)) == 6 * sum(range(size))

# one thread each: they share the cores
cores = len(os.sched_getaffinity(0))
wanted = max(1, cores // size)
jax.jit(lambda a: a @ a)(jnp.ones((500, 500))).block_until_ready()
names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
assert names.count("tf_XLAEigen") <= wanted, names

class Pair(NamedTuple):
    w: object
    f: object

root = size - 1
tree = {
    "bf16": jnp.full((3, 2), rank, jnp.bfloat16), "f64": jnp.full((), rank, jnp.float64),
    "int": np.arange(4) * rank, "big": np.full(5_000_000, rank, np.float32),  # 20 MB: several chunks
    "empty": jnp.zeros((0, 3)), "key": jax.random.key(rank), "pair": Pair(rank, "text"),
    "strided": np.arange(12.0).reshape(3, 4).T * rank, "nothing": None,
}
got = ctx.broadcast(tree, root=root)
assert got["bf16"].dtype == jnp.bfloat16 and isinstance(got["bf16"], jax.Array)
assert (np.asarray(got["bf16"], np.float32) == root).all() and got["bf16"].shape == (3, 2)
assert got["f64"].dtype == jnp.float64 and float(got["f64"]) == root and got["f64"].shape == ()
assert isinstance(got["int"], np.ndarray) and (got["int"] == np.arange(4) * root).all()
assert got["big"].shape == (5_000_000,) and (got["big"] == root).all()
assert got["empty"].shape == (0, 3)
assert (jax.random.key_data(got["key"]) == jax.random.key_data(jax.random.key(root))).all()
assert got["pair"] == Pair(root, "text")
assert (got["strided"] == np.arange(12.0).reshape(3, 4).T * root).all()
got["big"][0] = 5  # the receiver's own memory
jnp.add(got["bf16"], 1).block_until_ready()

# not picklable as a whole: leaves go, structure is mine
mine = jax.tree_util.Partial(lambda w: w * 2, jnp.full((2,), float(rank)))
assert (ctx.broadcast(mine).args[0] == 0).all()
# a replicated global array
everywhere = jax.device_put(np.arange(3.0), NamedSharding(ctx.mesh, P()))
assert (np.asarray(ctx.broadcast(everywhere)) == np.arange(3.0)).all()
for bad in (x, threading.Lock()):  # a sharded array, an object that nothing can send
    try:
        ctx.broadcast(bad)
    except (TypeError, ValueError) as error:
        assert f"rank {rank}" in str(error), str(error)
    else:
        raise AssertionError("sent what can't be sent")
# ranks in different calls: every rank hears where the others are
try:
    ctx.broadcast(1) if rank == 0 else ctx.barrier()
except ControlError as error:
    assert "rank 0 at 'broadcast'" in str(error) and "'barrier'" in str(error), str(error)
else:
    raise AssertionError("a broadcast met a barrier")
assert ctx.broadcast([rank, None], root=1) == [1, None]
ctx.barrier(timeout=60)
print("fine", rank, size, ctx.local_rank, ctx.local_size, c.name, ctx.communicator)
"""


def test_one_process():
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(jobs.free_port())],
        env=jobs.environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stdout + done.stderr


def _all_fine(results: list[jobs.Result], lines: list[str]) -> None:
    """And there is nothing in the output but the script's own."""
    output = "\n".join(r.output for r in results)
    assert all(r.returncode == 0 for r in results), output
    assert sorted(line for r in results for line in r.stdout.splitlines()) == lines, output
    assert "[Gloo]" not in output


def _environment(**more: str | None) -> dict[str, str | None]:
    return {"JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.mark.slow
def test_several_processes_by_hand_with_a_connector_of_the_users_own():
    # gRPC must not take the coordinator for an address behind the proxy
    env = _environment(http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9", no_proxy=None)
    results = jobs.spawn_env(3, ["-c", _SEVERAL, "mine", "policies"], env)
    _all_fine(results, [f"fine {r} 3 {r} 3 mine xla" for r in range(3)])


@pytest.mark.mpi
@pytest.mark.slow
def test_several_processes_under_mpirun():
    result = jobs.mpirun(2, ["-c", _SEVERAL, "auto", "no policies"], _environment())
    _all_fine([result], [f"fine {r} 2 {r} 2 mpi mpi" for r in range(2)])


def test_ranks_connect_once_the_root_listens(tmp_path):
    """gRPC, refused once, tries again after a second or two."""
    path = tmp_path / "socket"
    await_listener(path, 0.05)  # nobody listens: the next attempt tells of it
    waiting = threading.Thread(target=await_listener, args=(path, 60))
    waiting.start()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        connection, _ = server.accept()
        connection.close()
        waiting.join(30)
        assert not waiting.is_alive()
