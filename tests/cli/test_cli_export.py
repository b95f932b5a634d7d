"""`jaxdist export`: one file of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors import safe_open
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


class Net(nnx.Module):
    """With blocks, as an nnx checkpoint has them: a tuple of model and optimizer."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])


NAMES = ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]


def test_names_of_ones_own(tmp_path: Path) -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    jaxdist.save(tmp_path / "run", nnx.state((model, optimizer)), 1)
    renames = {r"\.value$": "", r"blocks\.(\d+)": r"layers.\1", "kernel$": "weight"}
    out, live = tmp_path / "out.safetensors", tmp_path / "live.safetensors"
    words = [word for old, new in renames.items() for word in ("--rename", f"{old}={new}")]
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(out), "--only", "0", *words])
    assert done.exit_code == 0, done.output
    jaxdist.export(live, nnx.state(model, nnx.Param), rename=renames)
    for file in (out, live):
        found = load_file(file)
        assert sorted(found) == NAMES
        assert np.array_equal(found["layers.1.weight"], model.blocks[1].kernel[...])


def test_what_is_in_memory(tmp_path: Path) -> None:
    """Shards, keys, text and what is not contiguous."""
    tree = {
        "w": jaxdist.shard(jnp.arange(33.0)),
        "t": np.arange(6).reshape(2, 3).T,
        "name": "tall",
        "k": jax.random.key(3),
    }
    jaxdist.export(tmp_path / "out.safetensors", tree)
    found = load_file(tmp_path / "out.safetensors")
    assert found["w"].tolist() == list(range(33))
    assert found["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["k"].tolist() == [0, 3]
    with safe_open(tmp_path / "out.safetensors", "numpy") as file:
        assert file.metadata() == {"name": "tall"}
    with pytest.raises(ValueError, match="has to end in"):
        jaxdist.export(tmp_path / "out.pt", tree)
    one = np.ones(2)
    for wrong, said in [
        ({"a.b": one, "a": {"b": one}}, "two arrays have the name 'a.b'"), ({}, "no array to write"),
        ({"__metadata__": one}, "can't have the name '__metadata__'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            jaxdist.export(tmp_path / "out.safetensors", wrong)
    with pytest.raises(OSError, match="No such file"):
        jaxdist.export(tmp_path / "no" / "out.npz", tree)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "out.pt"], "has to end in .safetensors or .npz"),
        (["nowhere", "out.npz"], "is not a checkpoint"),
        (["run", "out.npz", "--only", "model"], "nothing below 'model'"),
        (["run", "no/such/folder/out.npz"], "No such file"),
        (["run", "out.npz", "--rename", "kernel"], "--rename 'kernel': expected OLD=NEW"),
        (["run", "out.npz", "--rename", "ker(nel=x"], "rename 'ker(nel' to 'x': missing )"),
        (["run", "out.npz", "--rename", r"kernel=\2"], "invalid group reference"),
        (["run", "out.npz", "--rename", "kernel|bias=x"], "and params.dense.kernel would both be 'params.dense.x'"),
    ],
)
def test_bad_calls(run: Path, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(app, ["export", *args], terminal_width=1000)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
