"""`examples/gpt.py` in a small form: in one process, in two, interrupted, at other levels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import quick

pytestmark = pytest.mark.slow  # together

SCRIPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
SMALL = [
    "--layers=2", "--heads=2", "--width=32", "--context=32", "--batch-size=6", "--steps=12", "--every=4",
    "--eval-batches=3", "--sample=5", "--lr=1e-2", "--dropout=0.2",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(Path(subprocess.__file__).read_bytes())
    return str(path)


def alone(run: Path, text: str, *more: str, **env: str) -> jobs.Result:
    command = [sys.executable, SCRIPT, "--run", str(run), "--text", text, *SMALL, *more]
    done = subprocess.run(command, env=jobs.environment(env), capture_output=True, text=True, timeout=240, check=False)
    return jobs.Result(done.returncode, done.stdout, done.stderr, 0)


@pytest.fixture(scope="module")
def single(text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[jobs.Result, list[float]]:
    """A run on one device."""
    path = tmp_path_factory.mktemp("single")
    done = alone(path, text, "--single", XLA_FLAGS=quick.XLA_FLAGS)
    return done, losses(path)


def held_out(result: jobs.Result) -> float:
    assert result.returncode == 0, result.output
    found = re.search(r"final held_out=(\S+) nats/byte", result.stdout)
    assert found, result.output
    return float(found[1])


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


@pytest.mark.mpi
def test_the_same_on_two_ranks(text: str, single: Any, tmp_path: Path) -> None:
    one, curve = single
    assert len(curve) == 12
    assert curve[-1] < curve[0] - 0.5
    args = [SCRIPT, "--run", str(tmp_path / "two"), "--text", text, *SMALL, "--level=3"]
    two = jobs.mpirun(2, args, timeout=240)
    assert abs(held_out(two) - held_out(one)) < 2e-3
    assert max(abs(a - b) for a, b in zip(curve, losses(tmp_path / "two"), strict=True)) < 2e-3


def test_on_a_mesh(text: str, single: Any, tmp_path: Path) -> None:
    """Weights, windows and the batch divided; and on from a checkpoint, on another mesh."""
    one, curve = single
    flags = f"{quick.XLA_FLAGS} --xla_force_host_platform_device_count=8"
    for mesh, level in [("data=2,model=2,sequence=2", 1), ("model=2,data=-1", 3)]:
        eight = alone(tmp_path / "eight", text, f"--mesh={mesh}", f"--level={level}", XLA_FLAGS=flags)
        assert "devices=8" in eight.stdout
        assert abs(held_out(eight) - held_out(one)) < 2e-3
        assert max(abs(a - b) for a, b in zip(curve, losses(tmp_path / "eight"), strict=True)) < 2e-3
        shutil.rmtree(tmp_path / "eight" / "checkpoints" / "12")


@pytest.mark.mpi
def test_on_a_mesh_of_two_ranks(text: str, single: Any, tmp_path: Path) -> None:
    one, curve = single
    args = [SCRIPT, "--run", str(tmp_path / "two"), "--text", text, *SMALL, "--mesh=sequence=2"]
    two = jobs.mpirun(2, args, timeout=240)
    assert abs(held_out(two) - held_out(one)) < 2e-3
    assert max(abs(a - b) for a, b in zip(curve, losses(tmp_path / "two"), strict=True)) < 2e-3


def test_interrupted(text: str, single: Any, tmp_path: Path) -> None:
    straight, curve = single
    killer = (
        "import os, runpy, signal, sys\nimport jaxdist\nrestore = jaxdist.save\n"
        "def save(path, state, step, **kw):\n    restore(path, state, step, **{**kw, 'wait': True})\n"
        "    if step == 8: os.kill(os.getpid(), signal.SIGKILL)\n"
        "jaxdist.save = save\nsys.argv = sys.argv[1:]\nsys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", killer, SCRIPT, "--run", str(tmp_path / "cut"), "--text", text, *SMALL]
    env = jobs.environment({"XLA_FLAGS": quick.XLA_FLAGS})
    cut = subprocess.run([*command, "--single"], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert cut.returncode == -9, cut.stderr
    resumed = alone(tmp_path / "cut", text, "--single", XLA_FLAGS=quick.XLA_FLAGS)
    assert held_out(resumed) == held_out(straight)
    assert losses(tmp_path / "cut") == curve


def test_in_16_bits(text: str, tmp_path: Path) -> None:
    done = alone(tmp_path / "run", text, "--bf16", "--level=2", "--microbatches=2")
    assert 0 < held_out(done) < 5.0


def test_bad_arguments(text: str, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert "too few for a window" in alone(tmp_path / "run", str(short)).stderr
