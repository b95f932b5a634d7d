"""`examples/lm.py`: the losses of one device, on meshes, in 16 bits, and of a run that goes on elsewhere."""

import json
import re
import shutil
from pathlib import Path

import gallery
import numpy as np
import pytest

pytestmark = pytest.mark.slow  # together

SIZES = {"steps": 8, "every": 2, "context": 32, "layers": 2, "width": 32, "batch-size": 8, "sample": 3}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words = ["the", "of", "a", "ship", "sea", "wind", "sail", "night", "star", "shore"]
    paths = [tmp_path_factory.mktemp("corpus") / f"{i}.txt" for i in range(12)]
    for i, path in enumerate(paths):
        path.write_text(" ".join(np.random.default_rng(i).choice(words, 30 + 60 * (i % 4))))
    return [str(path) for path in paths]


def train(run: Path, corpus: list[str], *options: str) -> tuple[list[float], str]:
    """Losses of all steps and on what is held out, and the last line."""
    said, _ = gallery.script("lm", *SMALL, *options, "--run", run, "--text", *corpus)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == SIZES["steps"]
    return losses + [line["held_out"] for line in lines if "held_out" in line], said.splitlines()[-1]


def test_a_run_that_goes_on_elsewhere(corpus: list[str], tmp_path: Path) -> None:
    alone, first = train(tmp_path / "alone", corpus, "--single")
    run = tmp_path / "run"
    train(run, corpus, "--level", "3")
    shutil.rmtree(run / "checkpoints" / "8")  # as if it had been killed before
    resumed, second = train(run, corpus, "--level", "2", "--mesh", "data=4,model=2")
    np.testing.assert_allclose(resumed, alone, rtol=1e-4)
    final = re.compile(r"final held_out=(\S+) nats/byte steps=8 devices=8")
    (one,), (two,) = (final.fullmatch(said).groups() for said in (first, second))  # type: ignore[union-attr]
    assert float(one) == pytest.approx(float(two), rel=1e-2)
    tensors = pytest.importorskip("safetensors.numpy").load_file(run / "model.safetensors")
    assert tensors["blocks.0.qkv.kernel"].shape == (32, 96)
    assert len(tensors) == 2 + 1 + 2 * 6
