"""Ranks whose programs differ end before one of these runs, under each launcher, over each wire; nothing is saved.

Each way to differ over one of the wires, the next over the other; with JAXDIST_FULL set, over both.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import channels, jobs, parity
from jax import lax

import jaxdist
from jaxdist.agreement.programs import Programs, Traced, difference, explained
from jaxdist.control.progress import ActiveCall, Progress
from jaxdist.ir.dataflow import Operation

# --- what is said of a difference, by ranks that are threads

ADAM = optax.adam(0.1)


def loss_fn(w: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)


NONE = "no operation that the other does not have, too"
PER: dict[str, Any] = {"in_specs": jax.P("data"), "out_specs": jax.P()}
# An operation is where its line of this table is.
SAID: dict[str, tuple[Callable[[int, Any, Any], Any], str, str]] = {
    "inside": (
        lambda rank, w, b: w - jax.grad(loss_fn)(jnp.tanh(w) if rank else jnp.sin(w), b),
        "sin float64[4]", "tanh float64[4]",
    ),
    "a constant": (
        lambda rank, w, b: w - jnp.mean(b[0], 0) * np.full(4, float(rank)),
        "mul float64[4], float64[4] with the checksum", "mul float64[4], float64[4] with the checksum",
    ),
    "in a library": (
        lambda rank, w, b: optax.scale(0.1 + rank).update(jax.grad(loss_fn)(w, b), optax.ScaleState())[0],
        "mul 0.1", "mul 1.1",
    ),
    "in JAX": (
        lambda rank, w, b: w - jax.grad(loss_fn)(jnp.roll(w, 1 + rank), b),
        "slice float64[4] limit_indices=(4) start_indices=(3)", "slice float64[4] limit_indices=(4) start_indices=(2)",
    ),
    "on each device": (
        lambda rank, w, b: w - jaxdist.per_device(lambda x: (lax.psum, lax.pmax)[rank](x.sum(), "data"), **PER)(b[0]),
        "psum", "pmax",
    ),
    "microbatches": (
        lambda rank, w, b: w - jaxdist.grad(loss_fn, microbatches=2 + 2 * rank)(w, b),
        "jaxdist.value_and_grad(microbatches=2)", "jaxdist.value_and_grad(microbatches=4)",
    ),
    "level": (
        lambda rank, w, b: jaxdist.zero(ADAM, (1, 3)[rank]).update(jax.grad(loss_fn)(w, b), ADAM.init(w), w)[0],  # type: ignore[arg-type]
        "jaxdist.zero(level=1)", "jaxdist.zero(level=3)",
    ),
    "order of collectives": (
        lambda rank, w, b: w - (s := {i: jnp.sum(b[i] * 2 if i else b[0]) for i in ([0, 1], [1, 0])[rank]})[0] + s[1],
        "reduce_sum float64[", "mul float64[",
    ),
}  # fmt: skip
"""Steps of a rank, and what is said of each."""


def traced(step: Callable[..., Any]) -> Traced:
    found: list[Traced] = []
    decorated: Any = jaxdist.data_parallel(step, mesh=parity.mesh(2), bucket_bytes=0)
    decorated._traced = lambda made, program, _: found.append(
        Traced("step", made.kind, program, made.source, made.arguments())
    )
    decorated.lower(jnp.ones(4), (np.ones((32, 4)), np.ones(32)))
    return found[-1]


def told(programs: Sequence[Traced]) -> list[str]:
    """What ends the job whose ranks have these programs of a step."""
    met, given, ended = threading.Barrier(len(programs), timeout=20), [None] * len(programs), list[str]()

    def rank(me: int) -> None:
        def exchange(tag: str, value: Any, *_: Any) -> list[Any]:
            given[me] = value
            met.wait()
            everyone = list(given)
            met.wait()
            return everyone

        control: Any = SimpleNamespace(
            rank=me, exchange=exchange, listen=lambda *_: None, fail=lambda text, brief: ended.append(text),
            process=SimpleNamespace(stay=lambda: None),
        )  # fmt: skip
        Programs(control, {"step": Progress(1, ActiveCall(1, 0.0))}, 20).traced(programs[me])

    channels.everywhere([lambda me=me: rank(me) for me in range(len(programs))])
    return ended


@pytest.mark.parametrize("name", SAID)
def test_the_first_operation_that_differs_is_named_and_where_it_is(name: str) -> None:
    step, *expected = SAID[name]
    (text,) = told([traced(functools.partial(step, rank)) for rank in (0, 1)])
    assert text.startswith("step 'step', call 1: the ranks have different programs, and none has run.")
    for rank, what in enumerate(expected):
        (said,) = re.findall(rf"^  rank {rank}: (.*)$", text, re.MULTILINE)
        assert said.startswith(what)
        assert said.endswith(what if what is NONE else f"{__file__}:{step.__code__.co_firstlineno}")


def test_the_same_programs_end_nothing() -> None:
    assert told([traced(functools.partial(SAID["level"][0], 1)) for _ in range(2)]) == []


def test_the_first_difference() -> None:
    a, b, c, d = (Operation(text.encode(), text, f"{text}.py:1") for text in "abcd")
    assert difference([a, b, c], [a, d, c]) == (b, d)
    assert difference([a, b], [a]) == (b, None)
    assert difference([a, b, c], [b, a, c]) == (a, b)
    assert difference([a, b], [a, b]) is None
    assert explained((b, None), [[0, 2], [1], [3]]) == (
        f"The first operation that differs:\n  rank 0, 2: b, at b.py:1\n  rank 1: {NONE}"
        "\n  rank 3: other programs again"
    )
    assert explained(None, [[0], [1, 2]]).endswith(": one on rank 0; another on rank 1, 2.")


# --- jobs

SCRIPT = Path(__file__).with_name("differing.py")
ENV = {"JAX_ENABLE_X64": "0"}
LINES = SCRIPT.read_text().splitlines()
OPERATIONS = {"later": (NONE, "exp float32[]"), "several": ("add float32[], 0.0", "add float32[], 1.0")}
OTHERS = {
    "retraced": "rank 0 has traced another program than before, and rank 1 has not",
    "retraced alone": "rank 1 has traced another program than before, and rank 0 has not",
    # Where the one that asks comes first, an error on every rank; else the end of the job.
    "settings": "setting jax_default_matmul_precision is|came with step 'scaled'",
    "kept": "leaf w is|came with step 'scaled'",
    "types": "leaf w is float32.* on rank 0; bfloat16.* on rank 1|state of another origin: w \\(no recent call of",
}
CALLS = {"later": 2, "several": 2, "retraced": 4, "retraced alone": 4, "types": 2, "settings": 4, "kept": 6}
"""That return on each rank: those before the difference."""
ERRORS = {
    "donation": "option donate is True on rank 0; False on rank 1",
    "option": "option bucket_bytes is 0 on rank 0; 1000 on rank 1",
    "eager": "the ranks make different calls: allreduce",
    "raises": "its trace is complete on rank 0; ValueError: of one rank on rank 1",
    "types on both": "leaf w is float16.* on rank 0; bfloat16.* on rank 1",
}
"""On every rank."""


def check(result: jobs.Result, mode: str, folder: Path, ranks: int) -> None:
    """It ended, said so in a few lines, and neither ran nor saved anything more."""
    output = result.output
    assert result.returncode != 0, output
    assert "SAVED" not in output, output
    assert not folder.exists(), output
    assert output.count(" returned ") == CALLS[mode] * ranks, output
    if mode in OTHERS:
        assert re.search(OTHERS[mode], output), output
        return
    at = next(i for i, line in enumerate(LINES, 1) if line.endswith(f"# LINE {mode}"))
    for rank, what in enumerate(OPERATIONS[mode]):
        said = re.search(rf"^\[jaxdist rank 0\]   rank {rank}.*: (.*)$", output, re.MULTILINE)
        assert said, output
        assert said[1].startswith(what), output
        assert said[1].endswith(what if what is NONE else f"{SCRIPT}:{at}"), output
    said_in_all = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(said_in_all) < 15, output
    assert "Traceback" not in output, output
    assert output.count("have different programs") == 1, output


def mpirun(modes: Sequence[str], communicator: str, folder: Path) -> jobs.Result:
    return jobs.mpirun(2, [str(SCRIPT), str(folder), *modes], {**ENV, "JAXDIST_COMMUNICATOR": communicator})


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "communicator"),
    [
        (mode, wire)
        for i, mode in enumerate(OTHERS)
        for k, wire in enumerate(("xla", "mpi"))
        if k == i % 2 or "JAXDIST_FULL" in os.environ
    ],
)
def test_ranks_that_differ_end_before_they_run(mode: str, communicator: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    check(mpirun([mode], communicator, folder), mode, folder, 2)


@pytest.mark.slow
@pytest.mark.mpi
def test_differences_that_are_an_error_on_every_rank(tmp_path: Path) -> None:
    result = mpirun(list(ERRORS), "mpi", tmp_path)
    assert result.output.count(" returned ") == 2 * 2, "before the types differ"
    for mode, text in ERRORS.items():
        for rank in (0, 1):
            assert re.search(rf"^rank {rank} {mode}: .*{text}", result.stdout, re.MULTILINE), result.output


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [(["--launcher", "env"], 2), ([], 3)])
def test_under_jaxdist_run(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    if not launcher:
        jobs.mpirun_path()
    job, folder = jobs.Job(), tmp_path / "saved"
    command = ["run", "-n", str(ranks), *launcher, sys.executable, str(SCRIPT), str(folder), "later"]
    job.start([sys.executable, "-m", "jaxdist", *command], ENV)
    result = job.finish()[0]
    check(result, "later", folder, ranks)
    if ranks == 3:
        assert re.search(r"rank 0, 2: no operation", result.output), result.output


@pytest.mark.slow
def test_processes_started_by_hand_all_end_and_one_says_why(tmp_path: Path) -> None:
    """Also where the step is not the first one."""
    folder = tmp_path / "saved"
    results = jobs.spawn_env(3, [str(SCRIPT), str(folder), "several"], ENV)
    assert all(result.returncode == 1 for result in results), [result.output for result in results]
    assert [bool(result.stderr) for result in results] == [True, False, False], [r.output for r in results]
    assert "rank 2: other programs again" in results[0].output, results[0].output
    everything = "".join(result.stdout for result in results)
    check(results[0]._replace(stdout=everything), "several", folder, 3)
