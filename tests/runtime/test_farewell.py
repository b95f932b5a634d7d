"""The end of a job: ranks wait for each other, however far apart they end, and who hangs at its end is named."""

from __future__ import annotations

import itertools
import os
import re
import signal
import types
from typing import Any, cast

import pytest
from harness import jobs

from jaxdist.runtime import farewell

pytestmark = pytest.mark.slow  # together

_SCRIPT = """
import atexit, os, sys, threading, time
what, culprit = sys.argv[1], int(sys.argv[2])
import jax, jax.numpy as jnp, jaxdist
ctx = jaxdist.init()
me = ctx.rank
step = jaxdist.data_parallel(lambda w, x: w - 0.1 * jnp.mean(x) * w)
w, x = jnp.ones(3), jnp.ones(4)
for _ in range(3 if "step" in what else 0):
    w = step(w, x)
jax.block_until_ready(w)

def at_exit():
    if what == "step of all":
        print("WEIGHTS", float(step(w, x)[0]), flush=True)
    if me == culprit:
        if what == "step of one":
            step(w, x)
        if what == "hang":
            time.sleep(100)
        if what == "step of all":
            raise ValueError("no business of the job")

atexit.register(at_exit)
if what == "killed":
    if me == culprit:
        atexit.register(lambda: print("OVER", os.getpid(), flush=True))
    else:
        time.sleep(60)
if what == "step of all":
    try:
        sys.exit(4)
    except SystemExit:
        print("caught")
if what == "uploads" and me == culprit:
    threading.Thread(target=lambda: (time.sleep(float(sys.argv[3])), print("LATE", flush=True))).start()
if what == "late" and me == culprit:
    time.sleep(float(sys.argv[3]))
    print("LATE", flush=True)
"""


def _run(what: str, culprit: int, *args: str, timeout: str = "60") -> list[jobs.Result]:
    return jobs.spawn_env(2, ["-c", _SCRIPT, what, str(culprit), *args], {"JAXDIST_TIMEOUT": timeout}, timeout=60)


@pytest.mark.parametrize(("what", "culprit"), [("late", 1), ("uploads", 0)])
def test_who_ends_later_than_the_timeout_is_waited_for(what: str, culprit: int) -> None:
    results = _run(what, culprit, "3", timeout="1.5")
    assert [r.returncode for r in results] == [0, 0], results
    assert "LATE" in results[culprit].stdout
    assert f"for the others: rank {culprit} (" in results[1 - culprit].stderr
    assert "Traceback" not in results[culprit].stderr


@pytest.mark.parametrize(("looks", "said"), [([{1}, set()], []), ([{1}, {1}], ["rank 1"]), ([{1}, {2}, set()], [])])
def test_who_has_just_come_to_its_end_does_not_hang_there(looks: list[set[int]], said: list[str]) -> None:
    """Until it says goodbye it is at its end for a moment: who is seen there twice in a row hangs."""
    failed: list[str] = []
    seen = iter(looks)

    def at_the_end(ranks: Any) -> tuple[dict[int, str], list[str]]:
        return {rank: f"rank {rank}" for rank in next(seen)}, ["another one at work"]

    turns = itertools.count()
    control: Any = types.SimpleNamespace(rank=0, size=3, notices={}, fail=failed.append, say=lambda text: None)
    control.all_left = lambda timeout: timeout > 0 and next(turns) >= len(looks)
    farewell._wait_for_all(control, cast(Any, types.SimpleNamespace(at_the_end=at_the_end)), 1.0)
    assert [text.rpartition(": ")[2] for text in failed] == said


def test_who_hangs_at_its_end_is_named() -> None:
    results = _run("hang", 1, timeout="2")
    assert all(r.returncode != 0 for r in results)
    assert any("its script is over" in r.stderr and "for the others: rank 1 (" in r.stderr for r in results), results
    assert any("in at_exit" in r.stderr for r in results), results


def test_a_step_that_fails_in_a_function_of_atexit_fails_the_job() -> None:
    results = _run("step of one", 1)
    assert all(r.returncode != 0 for r in results), results
    # The other one has left by then, or leaves while this one is in the call.
    told = "rank 1 .*: a function that runs at exit failed|rank 0 has finished after 3 calls"
    assert re.search(told, results[0].stderr + results[1].stderr), results


def test_what_is_no_business_of_the_job_does_not_fail_it() -> None:
    """An error of the script's own at exit, an exit that was caught before; and steps of all go on until then."""
    results = _run("step of all", 1)
    assert [r.returncode for r in results] == [0, 0], results
    assert "no business" in results[1].stderr
    assert len({r.stdout.split("WEIGHTS")[1] for r in results}) == 1


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_killed_while_it_waits_for_the_others_is_missed(culprit: int) -> None:
    job = jobs.start_env(2, ["-c", _SCRIPT, "killed", str(culprit)])
    text = job.wait_for(lambda text: "OVER" in text)
    os.kill(int(text.split("OVER")[1].split()[0]), signal.SIGKILL)
    results = job.finish(60)
    assert results[1 - culprit].returncode == 1, results
    assert re.search(rf"rank {culprit} \(\S+, pid \d+\) died without a goodbye", results[1 - culprit].stderr), results
