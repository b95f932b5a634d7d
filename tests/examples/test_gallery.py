"""The gallery of examples: each is, on several devices, what its step is under its own library's decorator on one.

On virtual devices, and on two ranks; with JAXDIST_FULL set, in every way. So are the scripts, by their losses.
"""

import functools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gallery
import jax
import numpy as np
import pytest
from harness import check, jobs, quick
from jax.sharding import Mesh

import jaxdist

pytestmark = pytest.mark.slow  # together

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = list(gallery.CASES)
EVERYTHING = "JAXDIST_FULL" in os.environ


@pytest.fixture(autouse=True, scope="module")
def _few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery.ppo, "STEPS", 6)
        patch.setattr(gallery.digits, "_load_scans", gallery.few_scans)
        yield


# --- steps, in float64


@pytest.mark.parametrize("name", NAMES)
def test_as_on_one_device(name: str) -> None:
    expected = gallery.on_one_device(name)
    for devices, level in [(1, 0), (2, 0), (4, 3)] if EVERYTHING else [(4, 3)]:
        decorate = functools.partial(decorated, check.mesh(devices))
        found = gallery.CASES[name](decorate, lambda batch: batch, level)
        gallery.compare(found, expected, f"{name} on {devices} devices at level {level}")


def decorated(mesh: Any, step: Any, _: Any, **settings: Any) -> Any:
    return jaxdist.data_parallel(step, mesh=mesh, **settings)


LAYOUTS = {"experts": {"experts": 0}, "gpt": gallery.gpt.MEGATRON}
WAYS: list[tuple[dict[str, int], int]] = [
    ({"data": 3, "model": 2}, 3), ({"sequence": 2, "model": 2}, 2), ({"data": 2, "model": 2}, 1), ({"model": 4}, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "level"),
    [(name, *way) for k, name in enumerate(LAYOUTS) for way in (WAYS if EVERYTHING else WAYS[k : k + 1])],
    ids=str,
)
def test_on_meshes(name: str, sizes: dict[str, int], level: int) -> None:
    """The scripts, below, are on others."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(list(sizes.values()))
    mesh = Mesh(devices, tuple(sizes))
    decorate = lambda step, _: jaxdist.parallel(step, mesh=mesh, layouts=LAYOUTS[name])
    found = gallery.CASES[name](decorate, lambda batch: batch, level)
    gallery.compare(found, gallery.on_one_device(name), f"{name} on {sizes} at level {level}")


# --- scripts: their losses are those under `--single`


def loss_in(log: str) -> float:
    (loss,) = re.findall(r"epoch 1 loss (\S+)", log)
    return float(loss)


@functools.cache
def first_epoch_alone(name: str) -> float:
    said, log = gallery.script(name, "--epochs=1", "--single")
    assert re.fullmatch(r"final .* devices=1\n", said)
    return loss_in(log)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt"])
def test_the_script(name: str) -> None:
    said, log = gallery.script(name, "--epochs=1", "--level=2", *(["--model=4"] if name == "experts" else []))
    assert re.fullmatch(r"final .* devices=8\n", said)
    np.testing.assert_allclose(loss_in(log), first_epoch_alone(name), rtol=1e-4)


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
def gpt_alone(_few_steps: None, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
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
def test_on_two_ranks(gpt_alone: list[float], tmp_path: Path) -> None:
    """Steps at level 2, then a script, in one job."""
    names = NAMES if EVERYTHING else ["ppo"]
    wanted = {name: jax.device_get(jax.tree.leaves(gallery.on_one_device(name))) for name in names}
    (tmp_path / "expected.pickle").write_bytes(pickle.dumps(wanted))
    run = tmp_path / "mesh"
    script = shlex.join(["gpt", *GPT, f"--run={run}", "--mesh=sequence=2"])
    words = ["2", str(tmp_path / "expected.pickle"), *names, script]
    two = jobs.mpirun(2, [gallery.__file__, *words], timeout=500)
    assert two.returncode == 0, two.output
    assert sorted(re.findall(r"SAME (\w+)", two.stdout)) == sorted([*names, *names])
    (final,) = re.findall(r"final .* devices=2.*\n", two.stdout)  # the root's
    np.testing.assert_allclose(trained(run, final), gpt_alone, rtol=0, atol=2e-3)
