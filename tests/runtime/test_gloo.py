"""Gloo's thread does not interrupt others; its word that it has connected is not in a script's output, all else is."""

from __future__ import annotations

import os
import sys

import jobs
import pytest

from jaxdist.runtime import gloo

_SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jaxdist
ctx = jaxdist.init(timeout=60)
# Under PYTHONUNBUFFERED, as tests run: a line is written whole.
assert (sys.stdout.line_buffering, sys.stdout.write_through) == (True, False)
print("one", jaxdist.allreduce(np.ones(2), groups=[[0], [1, 2]])[0])
x = jax.make_array_from_process_local_data(
    jax.sharding.NamedSharding(ctx.mesh, jax.sharding.PartitionSpec("data")), np.ones(1, np.float32))
print("two", jnp.sum(x))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("mpirun", marks=pytest.mark.mpi), "env"])
def test_a_jobs_output_is_the_scripts_own(how: str) -> None:
    job = (jobs.start_mpirun if how == "mpirun" else jobs.start_env)(3, ["-c", _SCRIPT])
    results = job.finish(120)
    assert all(result.returncode == 0 for result in results), job
    lines = sorted(line for result in results for line in result.stdout.splitlines() if line)
    assert lines == ["one 1.0", "one 2.0", "one 2.0", "two 3.0", "two 3.0", "two 3.0"]
    assert "[Gloo]" not in "".join(result.stderr for result in results)


_POLICIES = """
import collections, contextlib, os, sys, threading
import numpy as np
import jaxdist
if sys.argv[1] == "refused":
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")
    os.sched_setscheduler = refuse
jaxdist.init(communicator="xla", timeout=60)
assert jaxdist.allreduce(np.ones(2))[0] == 2
mine = []
thread = threading.Thread(target=lambda: mine.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
found = collections.Counter()
for tid in os.listdir("/proc/self/task"):
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        found[os.sched_getscheduler(int(tid))] += 1
print(found[os.SCHED_BATCH], mine == [os.sched_getscheduler(0)] == [os.SCHED_OTHER])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduling policies")
@pytest.mark.parametrize(("how", "batch"), [("allowed", 1), ("refused", 0)])
def test_gloos_thread_and_no_other_waits_for_its_turn(how: str, batch: int) -> None:
    results = jobs.start_env(2, ["-c", _POLICIES, how]).finish(120)
    assert [result.stdout for result in results] == [f"{batch} True\n"] * 2, results


def test_only_the_one_line_is_dropped_and_only_at_first(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n")
        os.write(1, b"[Gloo] Rank 0 is NOT connected to: [1]\n")
        os.write(1, b"from a thread of the user's\n")
        return 3

    assert gloo.quietly((901, 902), run) == 3
    assert capfd.readouterr().out == "[Gloo] Rank 0 is NOT connected to: [1]\nfrom a thread of the user's\n"
    gloo.quietly((901, 902), run)
    assert "is connected to 1 peer ranks" in capfd.readouterr().out


def test_what_was_held_comes_out_when_the_program_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        os.write(1, b"before\n")
        raise RuntimeError("on purpose")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            gloo.quietly((903,), run)
    assert capfd.readouterr().out == "before\n" * 2
