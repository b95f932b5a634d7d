"""Calls of a step, loaders, `check_sync` and state from outside of steps, on several ranks and both communicators."""

from __future__ import annotations

import json
import re
from pathlib import Path

import data
import pytest
from harness import jobs

pytestmark = pytest.mark.slow  # together

SAID = {
    "same": r"passed",
    "bits": r"SyncError: check_sync: tree\['w'\]\[1\] \(float32\[2,3\] on \d devices\) has other bits on rank 1 "
    r"than on rank 0(, 2)?\. Something",
    "tree": r"SyncError: check_sync: tree\['extra'\] is absent on rank 0(, 2)?; float32\[2,3\] on the host on rank 1\.",
    "donated": r"SyncError: check_sync, on rank 1: check_sync: tree can't be compared: ValueError: \[0\] was donated",
    "call 1": "passed",
    "call 2": "passed",
    "call 3": r"SyncError: step 'checked', call 3: result\[0\]\['frozen'\] \(float32\[2,3\] on \d devices\) has other "
    r"bits on rank 1 than on rank 0(, 2)?\.",
    "call 6": "passed",
    "gradients": r"FloatingPointError: step 'finite', call 2: grads\['a'\] is not finite: 3 NaN on every device\.",
    "loss": r"FloatingPointError: step 'each_loss', call 1: each\['losses'\] is not finite: 1 NaN on rank 1\.",
    "kept": "passed",
    "in shards": r"FloatingPointError: step 'in_shards', call 2: result\[0\]\['a'\] is not finite: [13] NaN on "
    r"(every device|rank 0, 1)",
    "in shards, kept": "passed",
    "another call": r"ControlError: rank \d: the ranks are in different calls\. .*at 'check_sync'; rank 1 at 'barrier'",
}
"""What `check_sync`, `check_every` and `check_finite` tell every rank; the job goes on."""


CALLS = {
    "xla": ["arguments", "state_of_its_own_later", "leaves", "forgotten_split", "modules[3]", "debugging",
            "threads_that_take_turns"],
    "mpi": ["arguments", "graphs_of_the_page", "modules[1]", "keys_of_their_own", "threads_that_take_turns",
            "an_average_in_shards", "an_array_that_is_typed_as_a_number"],
}  # fmt: skip


@pytest.mark.mpi
def test_calls_and_loaders_mean_on_several_ranks_what_they_mean_on_one_device(tmp_path: Path) -> None:
    """Errors are told on all, and what a loader has handed out goes on from 2 ranks to 3 to one."""
    state = tmp_path / "state.json"
    for ranks, communicator in [(2, "xla"), (3, "mpi")]:
        words = [f"calls:{name}" for name in CALLS[communicator]]
        words += [f'copies:main["{tmp_path / communicator}"]', f'data:main["{state}"]', "sync:main"]
        _, found = jobs.cases(ranks, communicator, tmp_path, *words)
        for told in found["sync:main"]:
            assert told.keys() == SAID.keys()
            assert {name: told[name] for name, said in SAID.items() if not re.match(said, told[name])} == {}
    data.some_steps(str(state), 100)
    saved = json.loads(state.read_text())  # 3 steps of 10, 3 of 15, 5 of 5
    assert sorted(saved["seen"]) == list(range(100))
    assert saved["state"] == {"epoch": 1, "position": 0, "length": 100, "seed": 0, "shuffle": True}


UNDECORATED = """
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
NOTHING = "the 2 ranks have called no decorated step and no collective of jaxdist. If there were steps left to do"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [  # an error may come twice on a rank: as what the other failed with, and as its own
        (["zero"], 0, {NOTHING: 1, OUTSIDE: 1}),
        (["zero", "decorated"], 0, {NOTHING: 0, OUTSIDE: 0}),
        (["evaluates"], 1, {"ValueError: step '<lambda>': state leaf w is not the same on rank 0 and rank 1": None}),
    ],
)
def test_a_forgotten_decorator(tmp_path: Path, arguments: list[str], code: int, said: dict[str, int | None]) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDECORATED)
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
