"""Each benchmark in a small form: that it runs, and what it writes. The numbers mean nothing here."""

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from harness import jobs, quick

pytestmark = pytest.mark.slow  # together

HERE = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(HERE))

import collectives  # noqa: E402
import gpu  # noqa: E402
import report  # noqa: E402
import rounds  # noqa: E402
import rules  # noqa: E402
import step_time  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _jobs_stay() -> Iterator[None]:
    """One benchmark after the other has those of the same model; with a user's settings, not those of the tests."""
    kept: dict[tuple[Any, ...], rounds.Job] = {}

    def job(side: Sequence[str], ranks: int, python: str = sys.executable) -> Any:
        jobs.mpirun_path()
        key = (*side, ranks, python)
        if key not in kept:
            kept[key] = rounds.Job(side, ranks, python)
        return contextlib.nullcontext(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", quick.XLA_FLAGS)
        patch.delenv("JAX_ENABLE_X64", raising=False)
        for module in (collectives, step_time):
            patch.setattr(module, "Job", job)
        yield
    for each in kept.values():
        each.end()


def call(main: Callable[[], Any], script: str, *args: str) -> str:
    """What `python benchmarks/SCRIPT ARGUMENT…` prints. It sets variables for JAX, and pins itself to a core."""
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(os, "sched_setaffinity"),
        mock.patch.object(sys, "argv", [str(HERE / script), *args]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        main()
    return said.getvalue()


def run(name: str, folder: Path, *args: str, timed: bool = True) -> Any:
    """What it has written; of this it has printed the tables, and there is a picture."""
    path = folder / f"{name}.json"
    args = (*args, *(["--rounds=2", "--seconds=0.02"] if timed else []))
    module = importlib.import_module(name)
    said = call(module.main, f"{name}.py", *args, f"--json={path}")
    found = json.loads(path.read_text())
    assert module.markdown(found) + "\n" == said
    if hasattr(module, "draw"):
        report.picture(found, module.draw, picture := folder / f"{name}.png")
        assert picture.stat().st_size > 1000
    assert found["command"].startswith(f"python benchmarks/{name}.py ")
    assert found["machine"]["cores"] >= 1
    return found


@pytest.mark.mpi
def test_steps_of_a_model(tmp_path: Path) -> None:
    variants = ["jaxdist mpi 3", "gloo flat", "1 rank x2: jit"]
    found = run("step_time", tmp_path, "--models", "MLP-tiny", "--variants", *variants)["models"]["MLP-tiny"]
    assert set(found["ms"]) == set(variants)
    assert all(len(times) == 2 and min(times) > 0 for times in found["ms"].values())
    assert found["largest_difference"] < 1e-4


@pytest.mark.mpi
def test_collectives(tmp_path: Path) -> None:
    args = ["--systems", "jaxdist mpi", "mpi4py", "--sizes", "4096", "--ops", "allreduce", "broadcast"]
    assert len(run("collectives", tmp_path, *args)["ms"]) == 2 * 2 + 3


def test_memory(tmp_path: Path) -> None:
    found = run("memory", tmp_path, "--model", "MLP-tiny", "--devices", "2", timed=False)
    state = {(r["kind"], r["level"], r["devices"]): r["state"] / found["parameters"] for r in found["rows"]}
    assert state["float32 Adam", 3, 2] == pytest.approx(6, rel=1e-2)


def test_overhead_and_the_page(tmp_path: Path) -> None:
    run("overhead", tmp_path, "--leaves", "10")
    make = lambda: runpy.run_path(str(HERE), run_name="__main__")
    call(make, "__main__.py", "--results", str(tmp_path), "--page", str(page := tmp_path / "performance.md"), "--only")
    assert "# Performance" in page.read_text()
    assert "| 10 |" in (tmp_path / "tables.md").read_text()


def test_a_part_of_the_gpus_on_a_cpu() -> None:
    found = json.loads(call(gpu.main, "gpu.py", "--part", "utilisation", "tiny", "1", "0.01").splitlines()[-1])
    assert found["tokens"] == 2 * 16


def test_placement_rules(tmp_path: Path) -> None:
    args = ["rules.py", "--group", "transpose", "--devices", "2", "3", f"--log={tmp_path / 'rules.jsonl'}"]
    said = call(rules.main, *args)
    assert all(f"| {n} | {gradients} | True | True | 1 |" in said for n in (2, 3) for gradients in (False, True))
    assert call(rules.main, *args) == said  # from the log
    xs = [np.random.default_rng(seed).normal(size=(4, 4)) for seed in range(4)]
    assert rules.halves(lambda x, w: x @ w, [xs[:2], xs[2:]], 0) == "operands along (0, None), results: dim 0"
    assert rules.halves(lambda x: x.sum(0), [xs[:1], xs[1:2]], 0) == "operands along (0,), results: sum"
    assert not rules.halves(lambda x: x - x.sum(0), [[np.zeros((4, 4))], xs[:1]], 0)  # for zeros halves suffice
