"""Ranks whose programs differ end before one of these runs, under each launcher, over each wire; nothing is saved.

Each way to differ over one of the wires, the next over the other; with JAXDIST_FULL set, over both.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import jobs
import pytest

from jaxdist.agreement.programs import difference, explained
from jaxdist.ir.dataflow import Operation

SCRIPT = Path(__file__).with_name("differing.py")
ENV = {"JAX_ENABLE_X64": "0"}
LINES = SCRIPT.read_text().splitlines()

# What is said of each rank; `*`: where the operation stands.
OPERATIONS = {
    "loss": ("add float32[], 0.0*", "add float32[], 1.0*"),
    "inside": ("sin float32[4]*", "tanh float32[4]*"),
    "after": ("no operation that the other does not have, too", "cos float32[4]*"),
    "constant": ("mul float32[4], float32[4] with the checksum", "mul float32[4], float32[4] with the checksum"),
    "later": ("no operation that the other does not have, too", "exp float32[]*"),
    "several": ("add float32[], 0.0*", "add float32[], 1.0*"),
    "library": ("mul 0.1", "mul 1.1"),
    "on_each": ("psum", "pmax"),
    "in_a_library": (
        "slice float32[4] limit_indices=(4) start_indices=(3)*",
        "slice float32[4] limit_indices=(4) start_indices=(2)*",
    ),
    "microbatches": ("jaxdist.value_and_grad(microbatches=2)*", "jaxdist.value_and_grad(microbatches=4)*"),
    "level": ("jaxdist.zero(level=1)*", "jaxdist.zero(level=3)*"),
    "order": ("reduce_sum float32[", "mul float32["),
}
OTHERS = {
    "retraced": "rank 0 has traced another program than before, and rank 1 has not",
    "retraced alone": "rank 1 has traced another program than before, and rank 0 has not",
    "donation": "option donate is True on rank 0; False on rank 1",
    "option": "option bucket_bytes is 0 on rank 0; 1000 on rank 1",
    # Where the one that asks comes first, an error on every rank; else the end of the job.
    "settings": "setting jax_default_matmul_precision is|came with step 'scaled'",
    "kept": "leaf w is|came with step 'scaled'",
    "types": "leaf w is float32.* on rank 0; bfloat16.* on rank 1|state of another origin: w \\(no recent call of",
    "types on both": "leaf w is float16.* on rank 0; bfloat16.* on rank 1",
    "eager": "the ranks make different calls: allreduce",
    "raises": "its trace is complete on rank 0; ValueError: of one rank on rank 1",
}
LAST = {  # calls that return on each rank: those before the difference
    "later": 2, "several": 2, "retraced": 4, "retraced alone": 4, "types": 2, "types on both": 2, "settings": 4,
    "kept": 6,
}  # fmt: skip


def check(result: jobs.Result, mode: str, folder: Path, ranks: int) -> None:
    """It ended, said so in a few lines, and neither ran nor saved anything more."""
    output = result.output
    assert result.returncode != 0, output
    assert "SAVED" not in output, output
    assert not folder.exists(), output
    assert output.count(" returned ") == LAST.get(mode, 0) * ranks, output
    if mode in OTHERS:
        assert re.search(OTHERS[mode], output), output
        return
    at = next(i for i, line in enumerate(LINES, 1) if line.endswith(f"# LINE {'loss' if mode == 'several' else mode}"))
    for rank, what in enumerate(OPERATIONS[mode]):
        said = re.search(rf"^\[jaxdist rank 0\]   rank {rank}.*: (.*)$", output, re.MULTILINE)
        assert said, output
        assert said[1].startswith(what.rstrip("*")), output
        if not what.startswith("no "):
            assert said[1].endswith(f"{SCRIPT}:{at}"), output
    said_in_all = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(said_in_all) < 15, output
    assert "Traceback" not in output, output
    assert output.count("have different programs") == 1, output


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "communicator"),
    [
        (mode, wire)
        for i, mode in enumerate([*OPERATIONS, *OTHERS])
        for k, wire in enumerate(("xla", "mpi"))
        if k == i % 2 or "JAXDIST_FULL" in os.environ
    ],
)
def test_ranks_that_differ_end_before_they_run(mode: str, communicator: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    result = jobs.mpirun(2, [str(SCRIPT), mode, str(folder)], {**ENV, "JAXDIST_COMMUNICATOR": communicator})
    check(result, mode, folder, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [(["--launcher", "env"], 2), ([], 3)])
def test_under_jaxdist_run(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    if not launcher:
        jobs.mpirun_path()
    job, folder = jobs.Job(), tmp_path / "saved"
    command = ["run", "-n", str(ranks), *launcher, sys.executable, str(SCRIPT), "later", str(folder)]
    job.start([sys.executable, "-m", "jaxdist", *command], ENV)
    result = job.finish()[0]
    check(result, "later", folder, ranks)
    if ranks == 3:
        assert re.search(r"rank 0, 2: no operation", result.output), result.output


@pytest.mark.slow
def test_processes_started_by_hand_all_end_and_one_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    results = jobs.spawn_env(3, [str(SCRIPT), "loss", str(folder)], ENV)
    assert all(result.returncode == 1 for result in results), [result.output for result in results]
    assert [bool(result.stderr) for result in results] == [True, False, False], [r.output for r in results]
    assert "rank 2: other programs again" in results[0].output, results[0].output
    assert not folder.exists()


def test_the_first_operation_that_differs() -> None:
    a, b, c, d = (Operation(text.encode(), text, f"{text}.py:1") for text in "abcd")
    assert difference([a, b, c], [a, d, c]) == (b, d)
    assert difference([a, b], [a]) == (b, None)
    assert difference([a, b, c], [b, a, c]) == (a, b)
    assert difference([a, b], [a, b]) is None
    assert explained((b, None), [[0, 2], [1], [3]]) == (
        "The first operation that differs:\n  rank 0, 2: b, at b.py:1\n  rank 1: no operation that the other does not "
        "have, too\n  rank 3: other programs again"
    )
    assert explained(None, [[0], [1, 2]]).endswith(": one on rank 0; another on rank 1, 2.")
