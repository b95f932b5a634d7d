"""Steps as they are called elsewhere, on several ranks (run_calls.py)."""

from __future__ import annotations

import re
from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "run_calls.py")


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "communicator", "levels"), [(2, "xla", "0,1,2,3"), (3, "mpi", "1")])
def test_calls_mean_on_several_ranks_what_they_mean_on_one_device(ranks: int, communicator: str, levels: str) -> None:
    result = jobs.mpirun(ranks, [SCRIPT, communicator, levels], timeout=500)
    assert result.returncode == 0, result.output
    assert result.stdout.count("END") == ranks, result.output


COPIES = str(Path(__file__).parent / "run_copies.py")


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "communicator"), [(2, "xla"), (3, "mpi")])
def test_state_from_outside_of_steps_is_compared(ranks: int, communicator: str, tmp_path: Path) -> None:
    result = jobs.mpirun(ranks, [COPIES, communicator, str(tmp_path)], timeout=500)
    assert result.returncode == 0, result.output
    assert result.stdout.count("END") == ranks, result.output


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("communicator", "leaf"), [("xla", "w"), ("mpi", "key"), ("mpi", "exchange")])
def test_state_that_one_rank_changes_between_calls_ends_the_job(communicator: str, leaf: str, tmp_path: Path) -> None:
    result = jobs.mpirun(2, [COPIES, communicator, str(tmp_path), leaf], timeout=240)
    assert result.returncode != 0, result.output
    assert "TRAINED" not in result.stdout, result.output
    # Rank 0 may be in the call already, or learn of it before.
    origin = "leaf 1 of what step 'exchange' returned" if leaf == "exchange" else "no recent call of a decorated step"
    met = re.search(rf"the origin of \w+ is what the call before returned on rank 0; {origin}", result.output)
    assert met or f"({origin})" in result.output, result.output


THREADS = """
import threading
import jax, jax.numpy as jnp, numpy as np
import jaxdist
ctx = jaxdist.init()
descend = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))(w)
step = jaxdist.data_parallel(descend)
X = np.random.default_rng(0).normal(size=(30, 12, 300))
own = lambda i: X[i][ctx.rank :: ctx.size]
ws = [jnp.full(300, 0.01), jnp.full(300, -0.01)]
want, turns = list(ws), [threading.Semaphore(1), threading.Semaphore(0)]
for i in range(30):
    want = [descend(w, X[i]) for w in want]
def train(k):
    for i in range(30):
        turns[k].acquire()
        ws[k] = step(ws[k], own(i))
        if i % 7 == 3:
            jaxdist.allreduce(np.ones(3))
        turns[1 - k].release()
threads = [threading.Thread(target=train, args=(k,)) for k in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
jaxdist.check_sync(ws)
print("GAP", max(float(jnp.max(jnp.abs(np.asarray(a) - b))) for a, b in zip(ws, want)) < 1e-10, flush=True)
"""

AVERAGE = """
import jax, jax.numpy as jnp, numpy as np
import jaxdist
ctx = jaxdist.init()
def step(p, e, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - 1) ** 2))(p)
    p = jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)
    return p, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, e, p), loss
x = np.random.default_rng(0).normal(size=(24, 5))
p = want = {"in": jnp.ones((5, 7)), "out": jnp.ones(7)}
decorated, e, average = jaxdist.data_parallel(step), jaxdist.shard(jax.tree.map(jnp.copy, p)), p
for i in range(3):
    p, e, _ = decorated(p, e, x[ctx.rank * 12 :][:12])
    want, average, _ = step(want, average, x)
gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), jaxdist.unshard(e), average)
print("GAP", max(jax.tree.leaves(gaps)) < 1e-10, flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["mpi", "xla"])
@pytest.mark.parametrize("script", [THREADS, AVERAGE], ids=["threads that take turns", "an average in shards"])
def test_as_on_one_device(script: str, communicator: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    result = jobs.mpirun(2, [str(path)], {"JAXDIST_COMMUNICATOR": communicator, "JAX_ENABLE_X64": "1"}, timeout=120)
    assert result.returncode == 0, result.output
    assert result.stdout.count("GAP True") == 2, result.output


WEAK = """
import jax.numpy as jnp, numpy as np
import jaxdist
ctx = jaxdist.init()
step = jaxdist.data_parallel(lambda w, x: (w * 2 + x.sum() * 0, x.sum()))
w = jnp.broadcast_to(jnp.asarray(1.0), (6,))
assert w.weak_type
for i in range(2):
    w, _ = step(w, np.full((4, 2), ctx.rank, np.float32))
print("LAST", ctx.rank, float(w[0]), flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["mpi", "xla"])
def test_an_array_that_is_typed_as_a_number(communicator: str, tmp_path: Path) -> None:
    """It travels as an array of NumPy, which has no such type."""
    script = tmp_path / "weak.py"
    script.write_text(WEAK)
    done = jobs.mpirun(2, [str(script)], env={"JAXDIST_COMMUNICATOR": communicator}, timeout=120)
    assert done.returncode == 0, done.output
    assert {line for line in done.stdout.splitlines() if "LAST" in line} == {"LAST 0 4.0", "LAST 1 4.0"}
