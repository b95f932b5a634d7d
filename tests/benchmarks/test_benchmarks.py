"""Each benchmark in a small form: that it runs, and what it writes. The numbers mean nothing here."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import quick

pytestmark = pytest.mark.slow  # together

HERE = Path(__file__).parents[2] / "benchmarks"
QUICK = ["--rounds=2", "--seconds=0.02"]
ENV = jobs.environment({"XLA_FLAGS": quick.XLA_FLAGS, "JAX_ENABLE_X64": None})


def start(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *args]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200, check=False)


def run(script: str, folder: Path, *args: str) -> dict[str, Any]:
    """What it found; and it has drawn a picture and printed the table it has written."""
    out = {kind: folder / f"{script}.{kind}" for kind in ("json", "markdown", "png")}
    done = start(script, *args, *(f"--{kind}={path}" for kind, path in out.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert out["markdown"].read_text() == done.stdout
    assert out["png"].stat().st_size > 1000
    found = json.loads(out["json"].read_text())
    assert found["command"].startswith(f"python benchmarks/{script} ")
    assert found["machine"]["cores"] >= 1
    return found


@pytest.fixture(scope="module")
def torch() -> list[str]:
    if not list(importlib.metadata.distributions(name="torch")):  # not find_spec: test_compatibility.py has stand-ins
        pytest.skip("no torch (uv sync --group bench): the benchmarks beside torch were not run")
    return ["--torch", sys.executable]


@pytest.mark.mpi
def test_step_time(tmp_path: Path) -> None:
    jobs.mpirun_path()
    args = ["--models", "MLP-tiny", "--variants", "jaxdist mpi 3", "gloo flat", "raw*", "1 rank x2: jit"]
    found = run("step_time.py", tmp_path, *args, *QUICK)["models"]["MLP-tiny"]
    assert set(found["ms"]) == {"jaxdist mpi 3", "gloo flat", "raw allreduce", "1 rank x2: jit"}
    assert all(len(times) == 2 and min(times) > 0 for times in found["ms"].values())
    assert set(found["losses"]) == set(found["ms"]) - {"raw allreduce"}
    assert found["largest_difference"] < 1e-4
    assert "| jaxdist mpi 3 | " in (tmp_path / "step_time.py.markdown").read_text()


@pytest.mark.mpi
def test_step_time_beside_torch(tmp_path: Path, torch: list[str]) -> None:
    jobs.mpirun_path()
    args = ["--models", "GPT-tiny", "LeNet", "--variants", "torch *", "1 rank x2: *", *torch, *QUICK]
    for found in run("step_time.py", tmp_path, *args)["models"].values():
        assert {"torch DDP", "torch FSDP2", "1 rank x2: jit"} < set(found["losses"])
        assert found["largest_difference"] < 1e-4


@pytest.mark.mpi
def test_one_example(tmp_path: Path) -> None:
    jobs.mpirun_path()
    args = ["--model", "GPT-tiny-16", "--variants", "jaxdist *", "constraints *", "1 rank: jit", *QUICK]
    found = run("one_example.py", tmp_path, *args)["found"]
    ways = [f"jaxdist {wire}" for wire in ("mpi", "xla")] + ["constraints"]
    assert set(found["losses"]) == {"1 rank: jit", *(f"{way} {axis}" for way in ways for axis in ("sequence", "model"))}
    assert found["largest_difference"] < 1e-4
    table = (tmp_path / "one_example.py.markdown").read_text()
    assert "| jaxdist mpi model / constraints model | " in table
    assert "torch" not in table


@pytest.mark.mpi
def test_one_example_beside_torch(tmp_path: Path, torch: list[str]) -> None:
    jobs.mpirun_path()
    args = ["--model", "GPT-tiny-16", "--variants", "torch *", "1 rank: *", *torch, *QUICK]
    found = run("one_example.py", tmp_path, *args)["found"]
    assert set(found["losses"]) == {"torch parallelize_module", "1 rank: jit", "1 rank: torch"}
    assert found["largest_difference"] < 1e-4


FAKE = """
from worker import Variant

def steps(model):
    def build(name):
        if name == "fails":
            raise ValueError("this one fails")
        return Variant(lambda: {"right": 2.0, "also right": 2.0001, "wrong": 2.1, "none": None}[name])
    return build
"""


@pytest.mark.mpi
def test_a_wrong_loss_and_a_rank_that_fails_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.mpirun_path()
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(HERE)
    step_time = importlib.import_module("step_time")
    monkeypatch.setitem(step_time.JOBS, "jax 2", ("fake:steps", 2))

    def measure(*names: str) -> Any:
        return step_time.measure("MLP-tiny", {name: ("jax 2", name) for name in names}, rounds=2, seconds=0.001)

    found = measure("right", "also right", "none")
    assert found["losses"] == {"right": [2.0] * 3, "also right": [2.0001] * 3}
    assert found["largest_difference"] == pytest.approx(0.00005)
    with pytest.raises(SystemExit, match=r"^wrong does not compute what right does: losses \[2.1, 2.1, 2.1\]"):
        measure("right", "wrong")
    with pytest.raises(SystemExit, match=r"the job 'fake:steps MLP-tiny' failed.\nrank [01](.|\n)*this one fails"):
        measure("right", "fails")


def test_what_trains_on_other_examples_is_compared_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    check = importlib.import_module("step_time").check_losses
    losses = {"a": [2.0], "1 rank: a": [9.0], "1 rank x2: a": [2.0], "1 rank: b": [9.0]}
    assert check(losses) == 0
    with pytest.raises(SystemExit, match="1 rank: c does not compute what 1 rank: a does"):
        check(losses | {"1 rank: c": [2.0]})
    with pytest.raises(SystemExit, match="c does not compute what a does"):
        check(losses | {"c": [float("nan")]})


@pytest.mark.mpi
def test_buckets(tmp_path: Path) -> None:
    jobs.mpirun_path()
    args = ["--models", "MLP-tiny", "--communicator", "mpi", "--kib", "0", "1", "--compress", "bf16", *QUICK]
    found = run("buckets.py", tmp_path, *args)
    assert set(found["models"]["MLP-tiny"]["ms"]) == {"mpi bucket=0", "mpi bucket=1024", "mpi compress=bf16"}


@pytest.mark.mpi
def test_where(tmp_path: Path) -> None:
    jobs.mpirun_path()
    found = run("where.py", tmp_path, "--models", "MLP-tiny", *QUICK)["models"]["MLP-tiny"]
    assert set(found["ms"]) == {"mpi", "xla", "raw", "compute"}
    assert all(0 < share < 1 for share in found["share"].values())


@pytest.mark.mpi
def test_collectives(tmp_path: Path) -> None:
    jobs.mpirun_path()
    args = ["--systems", "jaxdist mpi", "mpi4py", "--sizes", "4096", "--ops", "allreduce", "broadcast", *QUICK]
    found = run("collectives.py", tmp_path, *args)
    assert len(found["ms"]) == 2 * 2


def test_memory(tmp_path: Path) -> None:
    found = run("memory.py", tmp_path, "--model", "MLP-tiny", "--devices", "2")
    state = {(r["kind"], r["level"], r["devices"]): r["state"] / found["parameters"] for r in found["rows"]}
    assert state["float32 Adam", 0, 2] == pytest.approx(12, rel=1e-2)
    assert state["float32 Adam", 3, 2] == pytest.approx(6, rel=1e-2)
    assert state["bfloat16 with a float32 copy", 1, 2] == pytest.approx(8, rel=1e-2)


def test_overhead_and_the_page(tmp_path: Path) -> None:
    args = ["--leaves", "10", "--depths", "1", "--devices", "2", *QUICK]
    found = run("overhead.py", tmp_path, *args)
    assert set(found["calls"]["10"]) > {"plain jit", "decorated"}
    assert set(found["compilations"]["1"]) == {"plain jit", *(f"level {n}" for n in range(4))}

    (tmp_path / "overhead.py.json").rename(tmp_path / "overhead.json")
    done = start("", "--results", str(tmp_path), "--page", str(tmp_path / "performance.md"), "--only")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "performance.md").read_text()
    assert "## What the host pays" in page
    assert found["command"] in page
    assert (tmp_path / "img" / "overhead.png").exists()
    assert str(tmp_path) not in page


def test_a_part_of_the_gpus_on_a_cpu() -> None:
    done = start("gpu.py", "--part", "utilisation", "tiny", "1", "0.01")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 2 * 16
    assert 0 < found["rates"]["model"][0] < found["rates"]["product"][0]


def test_what_is_said_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    size = {
        "steps": {"ms": {"jit": [2.0, 4.0], "level 0": [1.0, 2.0]}},
        "memory": {"level 0": {"measured": 2 << 30, "planned": 1 << 30}},
        "utilisation": {"parameters": 124e6, "rates": {"model": [3e12], "product": [4e12]}},
    }
    core = {"cases": 3, "largest_gap": 1e-15, "failed": {"a case": "differs by 0.1"}}
    said = importlib.import_module("gpu").markdown({"device": "GPU", "core": core, "sizes": {"124M": size}})
    assert "2 of 3 cases agree; largest difference 1.0e-15.\n\n- **a case**: differs by 0.1" in said
    assert "| 124M | level 0 | 1.50 (1.00–2.00) | 0.50 (0.50–0.50) | 2.000 | 1.000 | 0.500 |" in said
    assert "| 124M | 124M | 3 | 4 | 0.75 (0.75–0.75) |" in said
