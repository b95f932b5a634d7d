"""`export`, as a function and as a command: arrays in one file that loads without jaxdist."""

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from harness.commands import command, refused
from harness.errors import raises
from safetensors import safe_open
from safetensors.numpy import load_file

import jaxdist

TREE = {
    "params": {"dense": {"kernel": jnp.arange(33.0), "bias": jnp.arange(16.0)}},
    "extra": {
        "half": jnp.ones((2, 3), jnp.bfloat16), "empty": jnp.zeros((0, 2)), "name": "tall", "n": 7,
        "key": jax.random.key(3), "turned": np.arange(6).reshape(2, 3).T,
    },
}  # fmt: skip
ARRAYS = {
    "params.dense.kernel": np.arange(33.0), "params.dense.bias": np.arange(16.0),
    "extra.half": np.ones((2, 3), jnp.bfloat16), "extra.empty": np.zeros((0, 2)), "extra.n": np.array(7),
    "extra.key": np.array([0, 3], np.uint32), "extra.turned": np.array([[0, 3], [1, 4], [2, 5]]),
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of checkpoints."""
    jaxdist.save(tmp_path / "run", TREE | {"params": jaxdist.shard(TREE["params"])}, 3)
    return tmp_path / "run"


def check(found: Any, expected: dict[str, np.ndarray]) -> None:
    """The names, dtypes, shapes and values of a file."""
    assert sorted(found) == sorted(expected)
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == np.ascontiguousarray(x).tobytes(), name


def test_of_a_checkpoint_and_of_what_is_in_memory(run: Path, tmp_path: Path) -> None:
    """Of a step, or the latest; shards, keys, text and what is not contiguous; all of it or a part."""
    out = tmp_path / "out.safetensors"
    jaxdist.export(tmp_path / "live.safetensors", TREE | {"params": jaxdist.shard(TREE["params"])})
    check(load_file(tmp_path / "live.safetensors"), ARRAYS)
    for path in (run, run / "3"):
        code, said = command("export", path, out)
        assert (code, "7 arrays" in said) == (0, True), said
        check(load_file(out), ARRAYS)
        with safe_open(out, "numpy") as file:
            assert file.metadata() == {"extra.name": "tall"}
    assert command("export", run, tmp_path / "out.npz", "--only", "params")[0] == 0
    with np.load(tmp_path / "out.npz") as found:
        check(dict(found), {name: ARRAYS[f"params.{name}"] for name in ("dense.bias", "dense.kernel")})


class Net(nnx.Module):
    """With blocks, as an nnx checkpoint has them: a tuple of model and optimizer."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])


def test_names_of_ones_own(tmp_path: Path) -> None:
    model = Net(nnx.Rngs(0))
    jaxdist.save(tmp_path / "run", nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))), 1)
    renames = {r"\.value$": "", r"blocks\.(\d+)": r"layers.\1", "kernel$": "weight"}
    expected = {
        f"layers.{i}.{name}": np.asarray(x)
        for i, block in enumerate(model.blocks) for name, x in (("bias", block.bias), ("weight", block.kernel))
    }  # fmt: skip
    words = [word for old, new in renames.items() for word in ("--rename", f"{old}={new}")]
    assert command("export", tmp_path / "run", tmp_path / "a.safetensors", "--only", "0", *words)[0] == 0
    jaxdist.export(tmp_path / "b.safetensors", nnx.state(model, nnx.Param), rename=renames)
    for name in "ab":
        check(load_file(tmp_path / f"{name}.safetensors"), expected)


def test_bad_calls(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, tokens in [
        (["run", "out.pt"], (".safetensors", ".npz")), (["nowhere", "out.npz"], ("nowhere",)),
        (["run", "out.npz", "--only", "model"], ("'model'", "params")),
        (["run", "out.npz", "--rename", "kernel"], ("--rename", "'kernel'", "OLD=NEW")),
        (["run", "out.npz", "--rename", "ker(nel=x"], ("'ker(nel'",)),
        (["run", "out.npz", "--rename", "kernel|bias=x"], ("params.dense.kernel", "params.dense.x")),
    ]:  # fmt: skip
        refused(tokens, "export", *arguments)
    one = np.ones(2)
    calls: list[tuple[str, Any, tuple[str, ...]]] = [
        ("out.npz", {"a.b": one, "a": {"b": one}}, ("a.b",)), ("out.npz", {}, ("no array",)),
        ("out.safetensors", {"__metadata__": one}, ("__metadata__",)), ("no/out.npz", {"a": one}, ("No such file",)),
    ]  # fmt: skip
    for name, tree, tokens in calls:
        with raises((ValueError, OSError), *tokens):
            jaxdist.export(name, tree)


@pytest.mark.parametrize(
    ("dtype", "npz", "tag"),
    [
        ("float16", True, "F16"), ("bfloat16", False, "BF16"), ("float8_e4m3fn", False, "F8_E4M3"),
        ("int4", False, ""), ("float8_e3m4", False, ""), ("complex128", True, ""), (">i4", True, "I32"),
    ],
)  # fmt: skip
def test_a_dtype_is_kept_or_an_error(dtype: str, npz: bool, tag: str, tmp_path: Path) -> None:
    """Which names the array."""
    x = np.array([1, -2, 3]).astype(np.dtype(dtype) if dtype.startswith(">") else jnp.dtype(dtype))
    for ending, fits in ((".npz", npz), (".safetensors", tag)):
        with contextlib.nullcontext() if fits else raises(ValueError, "layer.w", dtype, ending):
            jaxdist.export(tmp_path / f"out{ending}", {"layer": {"w": x}})
    if npz:
        check(dict(np.load(tmp_path / "out.npz")), {"layer.w": x.astype(x.dtype.newbyteorder("="))})
    if tag:
        with safe_open(tmp_path / "out.safetensors", "numpy") as file:
            assert file.get_slice("layer.w").get_dtype() == tag
