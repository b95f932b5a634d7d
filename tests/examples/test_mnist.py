"""examples/mnist.py: trains, on one device and on several."""

import json
import re
from pathlib import Path

import gallery
import numpy as np
import pytest
from gallery import digits
from harness import jobs
from harness.started import Jaxdist

from jaxdist.launch.mpi import find_mpirun  # private: the one that `jaxdist run` takes

pytestmark = pytest.mark.slow  # together

SCRIPT = Path(__file__).parents[2] / "examples" / "mnist.py"


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_load_scans", gallery.all_scans)


def final(said: str) -> tuple[float, int, int, str]:
    """Accuracy, epochs, devices, communicator."""
    found = re.fullmatch(r"final test_accuracy=([01]\.\d{4}) epochs=(\d+) devices=(\d+) communicator=(\w+)\n", said)
    assert found, said
    return float(found[1]), int(found[2]), int(found[3]), found[4]


def logged(run: Path, metric: str = "loss") -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[metric] for line in lines if metric in line]


def on_one_device(run: Path, *flags: str) -> list[float]:
    gallery.script("mnist_single", "--epochs", 2, "--log-dir", run, *flags)
    return logged(run)


def test_it_learns(tmp_path: Path) -> None:
    accuracy, epochs, devices, communicator = final(gallery.script("mnist", "--log-dir", tmp_path)[0])
    assert accuracy >= 0.95
    assert (epochs, devices, communicator) == (12, 8, "xla")
    seen = logged(tmp_path, "test_accuracy")
    assert (len(seen), round(seen[-1], 4)) == (12, accuracy)


def test_two_ranks(jaxdist: Jaxdist, tmp_path: Path) -> None:
    """As the README has it, but for their number."""
    done = jaxdist("run", "-n", 2, SCRIPT, "--epochs", 2, "--log-dir", "run", timeout=150)
    assert done.returncode == 0, done.stderr
    assert final(done.stdout)[2:] == (2, "mpi" if find_mpirun() else "xla")  # only the root writes
    first, *lines = done.stderr.splitlines()
    assert first.startswith("jaxdist: 2 ranks on 1 host, ")
    steps = len(logged(tmp_path / "run"))
    assert re.match(rf"step {steps - 1}/{steps}  loss=\S+  test_accuracy=\S+  examples_per_s=\S+", lines[-1]), lines
    np.testing.assert_allclose(logged(tmp_path / "run"), on_one_device(tmp_path / "one"), rtol=1e-4)


@pytest.mark.mpi
def test_as_the_readme_has_it(tmp_path: Path) -> None:
    """But for the ranks, the epochs and the folder of its logs: ``mpirun -np 8 python examples/mnist.py``."""
    done = jobs.launch("mpirun", 3, [str(SCRIPT), "--epochs", "1", "--log-dir", str(tmp_path)]).end(300)
    assert done.returncode == 0, done.output
    assert final(done.stdout)[1:] == (1, 3, "mpi")


def test_the_number_of_devices_does_not_change_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(digits, "_load_scans", gallery.few_scans)
    run, flags = tmp_path / "run", ("--dropout", "0.1", "--batchnorm")
    said, _ = gallery.script("mnist", "--epochs", 2, "--level", 3, "--log-dir", run, *flags)
    assert final(said)[2] == 8
    np.testing.assert_allclose(logged(run), on_one_device(tmp_path / "one", *flags), rtol=1e-4)
