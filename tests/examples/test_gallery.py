"""The gallery of examples: the losses of each script are, on several devices, those under `--single`."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import gallery
import numpy as np
import pytest
from harness import jobs, quick

import jaxdist

pytestmark = pytest.mark.slow  # together


@pytest.mark.parametrize("script", ["cnn", "contrastive", "vae", "dpsgd", "experts", "experts --dropless", "ppo"])
def test_the_script(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery.digits, "_load_scans", gallery.few_scans)
    name, *given = script.split()
    if name == "ppo":
        monkeypatch.setattr("ppo.STEPS", 6)
    several = ["--level=2", *(["--model=4"] if name == "experts" else [])]
    found = []
    for options, devices in ((["--single"], 1), (several, 8)):
        said, log = gallery.script(name, "--epochs=1", *given, *options)
        final = re.fullmatch(rf"final (.*) devices={devices}\n", said)
        (loss,) = re.findall(r"epoch 1 loss (\S+)", log)
        assert final, said
        found.append((float(loss), [float(x) for x in re.findall(r"=([\d.]+)", final[1])]))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-4)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-2)  # few scans: one more or less that is right


GPT = [
    "--text", subprocess.__file__, "--layers=2", "--heads=2", "--width=32", "--context=32", "--batch-size=6",
    "--steps=12", "--every=4", "--eval-batches=3", "--sample=0", "--lr=1e-2", "--dropout=0.2",
]  # fmt: skip


def trained(run: Path, said: str) -> list[float]:
    """The losses of a GPT's steps, and that on held-out text."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(12))
    (held_out,) = re.findall(r"final held_out=(\S+) nats/byte", said)
    return [*(line["loss"] for line in lines), float(held_out)]


def gpt(run: Path, *more: str) -> list[float]:
    return trained(run, gallery.script("gpt", *GPT, f"--run={run}", *more)[0])


def forget_the_end(run: Path) -> None:
    """As if the run had been interrupted after its checkpoint of step 8."""
    assert jaxdist.latest_step(run / "checkpoints") == 12
    shutil.rmtree(run / "checkpoints" / "12")


@pytest.fixture(scope="module")
def gpt_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a run on one device, that goes on from its checkpoint to the same end."""
    run = tmp_path_factory.mktemp("gpt")
    with quick.compilation():
        losses = gpt(run, "--single")
        forget_the_end(run)
        assert gpt(run, "--single", "--sample=5") == losses
    assert losses[11] < losses[0] - 0.5
    return losses


def test_gpt_on_meshes(gpt_alone: list[float], tmp_path: Path) -> None:
    """Weights, windows and the batch divided; and on from a checkpoint, on another mesh."""
    np.testing.assert_allclose(gpt(tmp_path, "--mesh=data=2,model=2,sequence=2"), gpt_alone, rtol=0, atol=2e-3)
    forget_the_end(tmp_path)
    np.testing.assert_allclose(gpt(tmp_path, "--mesh=model=2,data=-1", "--level=3"), gpt_alone, rtol=0, atol=2e-3)


@pytest.mark.mpi
def test_gpt_on_two_ranks(gpt_alone: list[float], tmp_path: Path) -> None:
    two = jobs.run("mpirun", 2, [str(gallery.EXAMPLES / "gpt.py"), *GPT, f"--run={tmp_path}", "--mesh=sequence=2"])
    np.testing.assert_allclose(trained(tmp_path, two.stdout), gpt_alone, rtol=0, atol=2e-3)
