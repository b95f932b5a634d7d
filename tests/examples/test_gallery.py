"""The gallery of examples: each is, on several devices, what its step is under its own library's decorator on one.

On virtual devices, and on two ranks over one of the communicators; with JAXDIST_FULL set, in every way.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import pickle
import re
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
EVERYTHING = "JAXDIST_FULL" in os.environ


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
    for devices, level in [(1, 0), (2, 0), (4, 3)] if EVERYTHING else [(4, 3)]:
        decorate = functools.partial(decorated, parity.mesh(devices))
        found = gallery.CASES[name](decorate, lambda batch: batch, level)
        gallery.compare(found, expected, f"{name} on {devices} devices at level {level}")


def decorated(mesh: Any, step: Any, _: Any, **settings: Any) -> Any:
    return jaxdist.data_parallel(step, mesh=mesh, **settings)


LAYOUTS = {"experts": {"experts": 0}, "gpt": gallery.gpt.MEGATRON}


WAYS: list[tuple[dict[str, int], int]] = [
    ({"data": 2, "model": 2}, 1), ({"model": 4}, 0), ({"sequence": 2, "model": 2}, 2), ({"data": 3, "model": 2}, 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "level"),
    [(name, *way) for k, name in enumerate(LAYOUTS) for way in (WAYS if EVERYTHING else WAYS[1 - k :: 2])],
    ids=str,
)
def test_on_meshes(name: str, sizes: dict[str, int], level: int) -> None:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(list(sizes.values()))
    mesh = Mesh(devices, tuple(sizes))
    decorate = lambda step, _: jaxdist.parallel(step, mesh=mesh, layouts=LAYOUTS[name])
    found = gallery.CASES[name](decorate, lambda batch: batch, level)
    gallery.compare(found, gallery.on_one_device(name), f"{name} on {sizes} at level {level}")


@pytest.mark.parametrize(("communicator", "level"), [("xla", 1), pytest.param("mpi", 2, marks=pytest.mark.mpi)])
def test_on_two_ranks(communicator: str, level: int, expected: str) -> None:
    names = NAMES if EVERYTHING else NAMES[level - 1 :: 2]
    arguments = [str(Path(gallery.__file__)), communicator, str(level), expected, *names]
    if communicator == "mpi":
        results = [jobs.mpirun(2, arguments, timeout=500)]
    else:
        results = jobs.spawn_env(2, arguments, timeout=500)
    for result in results:
        assert result.returncode == 0, result.output
    said = "".join(result.stdout for result in results)
    assert sorted(re.findall(r"SAME (\w+)", said)) == sorted([*names, *names])


@functools.cache
def first_epoch(name: str, *arguments: str) -> tuple[str, float]:
    """What the script prints, and its loss."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as log,
    ):
        patch.setattr(sys, "argv", [f"{name}.py", "--epochs", "1", *arguments])
        getattr(gallery, name).main()
    return out.getvalue(), loss_in(log.getvalue())


def loss_in(said: str) -> float:
    (loss,) = re.findall(r"epoch 1 loss (\S+)", said)
    return float(loss)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt"])  # test_gpt.py
def test_the_script(name: str) -> None:
    """Its first epoch with `--single`, and on all devices at a level of ZeRO."""
    losses = []
    mesh = ["--model", "4"] if name == "experts" else []
    for arguments, devices in ((["--single"], 1), (["--level", "2", *mesh], 8)):
        said, loss = first_epoch(name, *arguments)
        assert re.fullmatch(rf"final .* devices={devices}\n", said)
        losses.append(loss)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.mpi
def test_experts_on_two_ranks() -> None:
    two = jobs.mpirun(2, [str(EXAMPLES / "experts.py"), "--epochs=1", "--model=2"], timeout=240)
    assert two.returncode == 0, two.output
    assert "devices=2" in two.stdout
    np.testing.assert_allclose(loss_in(two.stderr), first_epoch("experts", "--single")[1], rtol=1e-4)


def test_the_length_of_each() -> None:
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 150, name
