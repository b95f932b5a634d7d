"""Collectives between processes on both communicators: values, gradients, disagreements, missing ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jobs
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.mpi]  # together

EVERYTHING = "JAXDIST_FULL" in os.environ
WIRES = pytest.mark.parametrize("communicator", ["mpi", "xla"])


def run(ranks: int, communicator: str, folder: Path, *parts: Any, timeout: float = 540, **env: str) -> jobs.Result:
    """One job for all parts, of which each rank has to compare something in each."""
    words = [
        f"in_step:of_{part[0]}{json.dumps(part[1:])}" if part[0] in IN_STEP else f"eager:run{json.dumps(part)}"
        for part in ((part,) if isinstance(part, str) else part for part in parts)
    ]
    result, found = jobs.cases(ranks, communicator, folder, *words, env=env, timeout=timeout)
    assert all(count > 0 for counts in found.values() for count in counts), found
    return result


IN_STEP = ("lax", "nan", "jaxdist", "pieces", "scatter")


@WIRES
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_gradients_and_errors(ranks: int, communicator: str, tmp_path: Path) -> None:
    """In a step, of JAX and of jaxdist; and eager ones."""
    # Each new shape is a program to compile for "xla"; and here are few cores.
    calls = ("random_calls", (200 if communicator == "mpi" else 40) // (4 if ranks == 4 else 1))
    # It is gloo's own reduce-scatter that is wrong in a few of 200 (jax#40830).
    turns = 200 if EVERYTHING else 50 if communicator == "xla" else 10
    large = ("reduce_scatters", turns, 35.0 if ranks == 2 else 8.0)
    eager = ("acceptance", "details", "gradients", "mismatches", calls, large, ("skew", 2.0))
    in_step = {2: ("lax", "nan", "jaxdist", ("scatter", turns)), 3: ("lax", "pieces"), 4: ("jaxdist",)}[ranks]
    few = ("acceptance", calls, large, ("skew", 2.0)) if ranks == 4 and not EVERYTHING else eager
    run(ranks, communicator, tmp_path, *in_step, *few)


@WIRES
@pytest.mark.parametrize("how", ["late", "elsewhere"])
def test_a_missing_rank_is_named_and_one_in_another_call_found(how: str, communicator: str, tmp_path: Path) -> None:
    """The first after the timeout, the second before; who comes late is waited for."""
    run(3, communicator, tmp_path, ("missing", how), timeout=60)


def test_debug_prints_and_compares_each_call(tmp_path: Path) -> None:
    result = run(2, "mpi", tmp_path, "mismatches", ("skew", 1.0), JAXDIST_DEBUG="1")
    said = "[jaxdist rank 1] eager collective 1: allreduce(op='sum') of float32[2,3], 24 bytes, fingerprint "
    assert said in result.stderr, result.output


_AWAY = """
import pathlib, sys, time
import jax
import jaxdist

ctx = jaxdist.init(communicator="mpi", timeout=30)
x = jax.numpy.ones(1 << 24)
for i in range(40):
    done = pathlib.Path(sys.argv[1], str(i))
    jax.block_until_ready(jaxdist.reduce_scatter(x))
    if ctx.rank:
        done.touch()
    while not done.exists():  # away from MPI until the other rank is through as well
        time.sleep(0.001)
sys.stdout.write(f"through:{ctx.rank}\\n")  # one write: lines of ranks don't mix
"""


def test_a_rank_that_is_away_after_a_call_keeps_none_in_it(tmp_path: Path) -> None:
    # In most of such runs a rank waited for ever to hear that its last segments had arrived.
    result = jobs.mpirun(2, ["-c", _AWAY, str(tmp_path)], timeout=90)
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.split()) == ["through:0", "through:1"]
