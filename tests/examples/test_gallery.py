"""The gallery of examples: each is, on several devices, what its step is under its own library's decorator on one."""

from __future__ import annotations

import functools
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gallery
import jax
import jobs
import numpy as np
import parity
import pytest
import quick
from jax.sharding import Mesh

import jaxdist

pytestmark = pytest.mark.slow  # together

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = list(gallery.CASES)


@pytest.fixture(autouse=True, scope="module")
def _few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery.ppo, "STEPS", 6)
        yield


@pytest.fixture(scope="module")
def expected(_few_steps: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The leaves of what one device computes, in a file."""
    path = tmp_path_factory.mktemp("gallery") / "expected.pickle"
    with quick.compilation():
        found = {name: jax.device_get(jax.tree.leaves(gallery.on_one_device(name))) for name in NAMES}
    path.write_bytes(pickle.dumps(found))
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_as_on_one_device(name: str) -> None:
    expected = gallery.on_one_device(name)
    for devices, level in [(1, 0), (2, 0), (4, 3)]:
        decorate = functools.partial(decorated, parity.mesh(devices))
        found = gallery.CASES[name](decorate, lambda batch: batch, level)
        gallery.compare(found, expected, f"{name} on {devices} devices at level {level}")


def decorated(mesh: Any, step: Any, _: Any, **settings: Any) -> Any:
    return jaxdist.data_parallel(step, mesh=mesh, **settings)


LAYOUTS = {"experts": {"experts": 0}, "gpt": gallery.gpt.MEGATRON}


@pytest.mark.parametrize(
    ("sizes", "level"),
    [({"data": 2, "model": 2}, 1), ({"model": 4}, 0), ({"data": 3, "model": 2}, 3), ({"sequence": 2, "model": 2}, 2)],
    ids=str,
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_on_meshes(name: str, sizes: dict[str, int], level: int) -> None:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(list(sizes.values()))
    mesh = Mesh(devices, tuple(sizes))
    decorate = lambda step, _: jaxdist.parallel(step, mesh=mesh, layouts=LAYOUTS[name])
    found = gallery.CASES[name](decorate, lambda batch: batch, level)
    gallery.compare(found, gallery.on_one_device(name), f"{name} on {sizes} at level {level}")


@pytest.mark.parametrize(("communicator", "level"), [("xla", 1), pytest.param("mpi", 2, marks=pytest.mark.mpi)])
def test_on_two_ranks(communicator: str, level: int, expected: str) -> None:
    arguments = [str(Path(gallery.__file__)), communicator, str(level), expected]
    if communicator == "mpi":
        results = [jobs.mpirun(2, arguments, timeout=500)]
    else:
        results = jobs.spawn_env(2, arguments, timeout=500)
    for result in results:
        assert result.returncode == 0, result.output
    said = "".join(result.stdout for result in results)
    assert sorted(re.findall(r"SAME (\w+)", said)) == sorted([*NAMES, *NAMES])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt"])  # test_gpt.py
def test_the_script(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first epoch with `--single`, and on all devices at a level of ZeRO."""
    losses = []
    mesh = ["--model", "4"] if name == "experts" else []
    for arguments in (["--single"], ["--level", "2", *mesh]):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--epochs", "1", *arguments])
        getattr(gallery, name).main()
        said = capsys.readouterr()
        assert re.fullmatch(rf"final .* devices={1 if arguments == ['--single'] else 8}\n", said.out)
        (loss,) = re.findall(r"epoch 1 loss (\S+)", said.err)
        losses.append(float(loss))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.mpi
def test_experts_on_two_ranks() -> None:
    script = str(EXAMPLES / "experts.py")
    alone = subprocess.run(
        [sys.executable, script, "--epochs=1", "--single"],
        env=jobs.environment(), capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    two = jobs.mpirun(2, [script, "--epochs=1", "--model=2"], timeout=240)
    assert two.returncode == 0, two.output
    assert "devices=2" in two.stdout
    found = [float(re.findall(r"epoch 1 loss (\S+)", said)[0]) for said in (alone.stderr, two.stderr)]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_the_length_of_each() -> None:
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 150, name
