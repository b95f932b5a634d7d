"""init and Context: one process, several by hand, several under mpirun; and what init refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import jobs
import pytest

from jaxdist.runtime.coordinator import await_listener

_ALONE = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
import jaxdist
from jaxdist.runtime import context
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

refused(ValueError, "unknown communicator 'nccl'; valid: auto, xla, mpi", communicator="nccl")
refused(ValueError, "unknown connector 'carrier pigeon'; valid: auto, mpi", "carrier pigeon")
refused(ValueError, "1 devices".replace("1", "8"), communicator="mpi")
os.environ["JAXDIST_COMMUNICATOR"] = "nope"
refused(ValueError, "JAXDIST_COMMUNICATOR='nope'")
os.environ["JAXDIST_COMMUNICATOR"] = "xla"
os.environ["RANK"] = "0"
refused(ValueError, "missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT")
del os.environ["RANK"]
jnp.ones(2)  # a started backend is no harm to one process
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
import os, sys, threading
from typing import NamedTuple
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxdist.runtime.context import init
from jaxdist.control.channel import ControlError

ctx = init(communicator=sys.argv[1], timeout=60)
rank, size = ctx.rank, ctx.size
assert init() is ctx and init(communicator=sys.argv[1]) is ctx
try:
    init(communicator="mpi" if ctx.communicator == "xla" else "xla")
except RuntimeError as error:
    assert "already called init" in str(error)
else:
    raise AssertionError("a conflicting init went through")

# XLA_FLAGS asks for 8 devices; several processes have one each
assert "device_count=8" in os.environ["XLA_FLAGS"] or ctx.connector.name == "mpi"
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
    "int": np.arange(4) * rank, "big": np.full(25_000_000, rank, np.float32),  # 100 MB
    "empty": jnp.zeros((0, 3)), "key": jax.random.key(rank), "pair": Pair(rank, "text"),
    "strided": np.arange(12.0).reshape(3, 4).T * rank, "global": x if False else None,
}
got = ctx.broadcast(tree, root=root)
assert got["bf16"].dtype == jnp.bfloat16 and isinstance(got["bf16"], jax.Array)
assert (np.asarray(got["bf16"], np.float32) == root).all() and got["bf16"].shape == (3, 2)
assert got["f64"].dtype == jnp.float64 and float(got["f64"]) == root and got["f64"].shape == ()
assert isinstance(got["int"], np.ndarray) and (got["int"] == np.arange(4) * root).all()
assert got["big"].shape == (25_000_000,) and (got["big"] == root).all()
assert got["empty"].shape == (0, 3)
assert (jax.random.key_data(got["key"]) == jax.random.key_data(jax.random.key(root))).all()
assert got["pair"] == Pair(root, "text")
assert (got["strided"] == np.arange(12.0).reshape(3, 4).T * root).all()
got["big"][0] = 5  # the receiver's own memory
jnp.add(got["bf16"], 1).block_until_ready()

# not picklable as a whole: leaves go, structure is mine
mine = jax.tree_util.Partial(lambda w: w * 2, jnp.full((2,), float(rank)))
assert (ctx.broadcast(mine)(1.0) if False else ctx.broadcast(mine).args[0] == 0).all()
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
print("fine", rank, ctx.connector.name, ctx.communicator)
"""


def test_one_process():
    done = subprocess.run(
        [sys.executable, "-c", _ALONE],
        env=jobs.environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stdout + done.stderr


def _fine(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("fine"))


@pytest.mark.slow
def test_several_processes_by_hand():
    env = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        # gRPC must not take the coordinator for an address behind the proxy
        "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": None,
        "JAX_ENABLE_X64": "1",
    }  # fmt: skip
    results = jobs.spawn_env(2, ["-c", _SEVERAL, "auto"], env)
    output = "\n".join(r.output for r in results)
    assert all(r.returncode == 0 for r in results), output
    assert _fine(output) == ["fine 0 env xla", "fine 1 env xla"], output


@pytest.mark.mpi
@pytest.mark.slow
def test_several_processes_under_mpirun():
    result = jobs.mpirun(3, ["-c", _SEVERAL, "auto"], {"JAX_ENABLE_X64": "1"})
    assert result.returncode == 0, result.output
    assert _fine(result.output) == [f"fine {r} mpi mpi" for r in range(3)], result.output


_REFUSED = """
import os, sys, importlib.util
from jaxdist.runtime.context import init
if sys.argv[1] == "started":
    import jax.numpy as jnp
    jnp.ones(2)
if sys.argv[1] == "absent":
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "mpi4jax" else find(name, *a)
class Mine:
    "A connector of the user's own."
    def __init__(self):
        from jaxdist.connectors.tcp import from_env
        inner = from_env(30)
        self.name, self.rank, self.size = "mine", inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.barrier, self.broadcast, self.abort = inner.barrier, inner.broadcast, inner.abort
ctx = init(Mine() if sys.argv[1] == "mine" else "auto", os.environ.get("COMM", "auto"), timeout=30)
print("fine", ctx.connector.name, ctx.communicator, ctx.broadcast(ctx.rank, root=1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "communicator", "words"),
    [
        ("started", "auto", "a JAX backend was already in use when jaxdist.init was called"),
        ("absent", "mpi", "mpi4jax is not installed. Install: pip install"),
        ("world", "mpi", "MPI's world has 1 processes, the job has 2"),
    ],
)
def test_what_several_processes_refuse(what, communicator, words):
    if communicator == "mpi":
        pytest.importorskip("mpi4py")
    results = jobs.spawn_env(2, ["-c", _REFUSED, what], {"COMM": communicator}, timeout=60)
    assert all(r.returncode != 0 for r in results)
    assert all(words in r.stderr for r in results), "\n".join(r.output for r in results)


@pytest.mark.slow
def test_a_connector_of_the_users_own():
    for result in jobs.spawn_env(2, ["-c", _REFUSED, "mine"], timeout=60):
        assert result.returncode == 0, result.output
        assert "fine mine xla 1" in result.stdout


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
