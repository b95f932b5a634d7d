"""`jaxdist export`: one file of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import jaxdist
from jaxdist.cli import app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    params = jaxdist.shard({"dense": {"kernel": jnp.arange(33.0), "bias": jnp.arange(16.0)}})
    extra = {"half": jnp.ones((2, 3), jnp.bfloat16), "empty": jnp.zeros((0, 2)), "name": "tall", "n": 7}
    jaxdist.save(tmp_path / "run", {"params": params, "extra": extra}, 3)
    return tmp_path / "run"


@pytest.mark.parametrize("whole", [True, False])
def test_safetensors(run: Path, tmp_path: Path, whole: bool) -> None:
    out = tmp_path / "out.safetensors"
    done = CliRunner().invoke(app, ["export", str(run / "3" if whole else run), str(out)])
    assert done.exit_code == 0, done.output
    assert "5 arrays" in done.output
    found = load_file(out)
    assert found["params.dense.kernel"].tolist() == list(range(33))
    assert found["params.dense.bias"].tolist() == list(range(16))
    assert (found["extra.half"].shape, str(found["extra.half"].dtype)) == ((2, 3), "bfloat16")
    assert found["extra.empty"].shape == (0, 2)
    assert found["extra.n"] == 7


def test_npz_of_a_part(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    done = CliRunner().invoke(app, ["export", str(run), str(out), "--only", "params"])
    assert done.exit_code == 0, done.output
    with np.load(out) as found:
        assert sorted(found) == ["dense.bias", "dense.kernel"]
        assert found["dense.kernel"].tolist() == list(range(33))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "out.pt"], "has to end in .safetensors or .npz"),
        (["nowhere", "out.npz"], "is not a checkpoint"),
        (["run", "out.npz", "--only", "model"], "nothing below 'model'"),
        (["run", "no/such/folder/out.npz"], "No such file"),
    ],
)
def test_bad_calls(run: Path, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(app, ["export", *args], terminal_width=1000)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
