"""A job whose ranks train by themselves, because a decorator was forgotten, hears of it."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = """
import sys
import jax, jax.numpy as jnp, jaxdist, numpy as np, optax

ctx = jaxdist.init()
tx = jaxdist.zero(optax.sgd(0.1)) if "zero" in sys.argv else optax.sgd(0.1)
decorate = jaxdist.data_parallel if "decorated" in sys.argv else jax.jit

@decorate
def step(w, opt_state, x):
    updates, opt_state = tx.update(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), opt_state, w)
    return optax.apply_updates(w, updates), opt_state

w, x = jnp.ones(3), np.full((4, 3), 1.0 + ctx.rank)
state = tx.init(w)
for _ in range(2):
    w, state = step(w, state, x)
if "evaluates" in sys.argv:
    jaxdist.data_parallel(lambda w, x: jnp.mean(x @ w))(w, x)
"""
OUTSIDE = "jaxdist.zero's update was called outside a step that jaxdist.data_parallel decorates"
NOTHING = "the 2 ranks have called no decorated step and no collective of jaxdist: each has worked by itself"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [  # an error may come twice on a rank: as what the other failed with, and as its own
        ([], 0, {NOTHING: 1, OUTSIDE: 0}),
        (["zero"], 0, {NOTHING: 1, OUTSIDE: 1}),
        (["zero", "decorated"], 0, {NOTHING: 0, OUTSIDE: 0}),
        (["evaluates"], 1, {"ValueError: step '<lambda>': state leaf w is not the same on rank 0 and rank 1": None}),
    ],
)
def test_a_forgotten_decorator(tmp_path: Path, arguments: list[str], code: int, said: dict[str, int | None]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    results = jobs.spawn_env(2, [str(script), *arguments])
    assert {bool(result.returncode) for result in results} == {bool(code)}, results
    everything = "".join(result.stderr for result in results)
    for text, times in said.items():
        assert (everything.count(text) == times) if times is not None else (text in everything), everything


THREADS = """
import sys
import mpi4py
mpi4py.rc.thread_level = "funneled"
import jaxdist
print("COMMUNICATOR", jaxdist.init(communicator=sys.argv[1]).communicator, flush=True)
jaxdist.barrier()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("communicator", "code", "there"), [("auto", 0, 2), ("mpi", 1, 0)])
def test_mpi_for_one_thread_at_a_time_is_not_used(tmp_path: Path, communicator: str, code: int, there: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(THREADS)
    done = jobs.mpirun(2, [str(script), communicator])
    assert bool(done.returncode) == bool(code), done.output
    assert done.stdout.count("COMMUNICATOR xla") == there, done.output
    assert "MPI was initialised to be called by one thread at a time" in done.output
