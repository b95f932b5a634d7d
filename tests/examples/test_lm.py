"""`examples/lm.py`: the losses of one device, on ranks that are killed and others that go on, and on a mesh."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import jobs, quick

pytestmark = pytest.mark.slow  # together

ROOT = Path(__file__).parents[2]
SCRIPT, DIES = str(ROOT / "examples" / "lm.py"), str(ROOT / "tests" / "harness" / "dies.py")
SIZES = {"steps": 8, "every": 2, "context": 32, "layers": 2, "width": 32, "batch-size": 8, "sample": 3}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
RUN = [sys.executable, "-m", "jaxdist", "run", "--launcher", "env", "-n"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words = ["the", "of", "a", "ship", "sea", "wind", "sail", "night", "star", "shore"]
    paths = [tmp_path_factory.mktemp("corpus") / f"{i}.txt" for i in range(12)]
    for i, path in enumerate(paths):
        path.write_text(" ".join(np.random.default_rng(i).choice(words, 30 + 60 * (i % 4))))
    return [str(path) for path in paths]


def train(command: list[str], folder: Path, corpus: list[str], *options: str, fails: bool = False) -> str:
    env = jobs.environment({"XLA_FLAGS": quick.XLA_FLAGS, "JAX_ENABLE_X64": None})
    args = [*command, *SMALL, *options, "--run", str(folder), "--text", *corpus]
    done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout


def curve(folder: Path) -> list[tuple[float, float | None]]:
    """Losses of all steps, and on what is held out."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    of_steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in of_steps] == list(range(len(of_steps)))
    return [(line["loss"], line.get("held_out")) for line in of_steps]


def same(found: Path, expected: Path, rtol: float) -> None:
    a, b = (np.array(list(itertools.chain(*curve(folder))), float) for folder in (found, expected))
    assert len(b) == 16
    np.testing.assert_allclose(a, b, rtol=rtol)


def test_killed_on_two_ranks_and_resumed_on_one(corpus: list[str], tmp_path: Path) -> None:
    alone = train([sys.executable, SCRIPT], tmp_path / "alone", corpus, "--single")
    ranks = tmp_path / "ranks"
    train([*RUN, "2", DIES, "4", SCRIPT], ranks, corpus, "--level", "3", fails=True)
    assert 2 <= len(curve(ranks)) <= 4
    resumed = train([*RUN, "1", SCRIPT], ranks, corpus, "--level", "2")
    same(ranks, tmp_path / "alone", 1e-4)
    final = re.compile(r"final held_out=(\S+) nats/byte steps=8 devices=(\d)\n$")
    (one, first), (two, second) = (final.search(said).groups() for said in (alone, resumed))  # type: ignore[union-attr]
    assert first == second == "1"
    assert float(one) == pytest.approx(float(two), rel=1e-2)
    tensors = pytest.importorskip("safetensors.numpy").load_file(ranks / "model.safetensors")
    assert tensors["blocks.0.qkv.kernel"].shape == (32, 96)
    assert len(tensors) == 2 + 1 + 2 * 6


def test_on_a_mesh_in_bf16(corpus: list[str], tmp_path: Path) -> None:
    train([sys.executable, SCRIPT], tmp_path / "alone", corpus, "--single", "--bf16")
    train([*RUN, "2", SCRIPT], tmp_path / "mesh", corpus, "--bf16", "--mesh", "data=1,model=2")
    same(tmp_path / "mesh", tmp_path / "alone", 2e-2)
    assert "two files or more" in _refused([sys.executable, SCRIPT, "--text", corpus[0]], tmp_path)


def _refused(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, env=jobs.environment(), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr
