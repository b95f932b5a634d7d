"""Damaged checkpoints: an error that names leaf, file and step, or the one before; never other weights."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from states import there

import jaxdist
from jaxdist import CheckpointError
from jaxdist.checkpoint import record
from jaxdist.checkpoint.arrays import ArrayReader

STATE = {"model": {"w": np.random.default_rng(0).normal(size=(100, 100)), "n": np.arange(4)}, "name": "a"}


def filled(step: int) -> dict[str, Any]:
    return {**STATE, "model": {"w": STATE["model"]["w"] + step, "n": np.full(4, step)}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for step in (10, 20):
        jaxdist.save(tmp_path, filled(step), step)
    return tmp_path


def data_file(step: Path) -> Path:
    """The one with the bytes of `w`."""
    return max(step.rglob("d/*"), key=lambda p: p.stat().st_size)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_is_silent(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them: `python tests/checkpoint/damage.py 10000 0`."""
    monkeypatch.setattr(jaxdist.init().control, "say", lambda message: None)
    tally = damage.run(50, seed, tmp_path)
    assert tally["SILENT"] == tally["RAW"] == 0, tally
    assert sum(tally.values()) == 50


def test_a_bit_of_the_data(path: Path) -> None:
    """In the middle of floats that hardly compress: zstandard stores them as they are, without a checksum."""
    file = data_file(path / "20")
    flip(file, 40_000)
    with pytest.raises(CheckpointError, match=r"leaf model\.w of checkpoint .*/20 is damaged: it has other bits") as e:
        jaxdist.restore(path, STATE)
    assert str(file) in str(e.value)
    assert "Other steps: [10]" in str(e.value)
    assert jaxdist.restore(path, STATE, step=10)["model"]["n"].tolist() == [10] * 4


def _without_files(opens: Callable[..., Any]) -> Callable[..., Any]:
    """As `opens`, in a process that has as many files open as it may."""

    def call(*args: Any) -> Any:
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        try:
            opened = opens(*args)
            with contextlib.suppress(Exception):
                opened.result()
            return opened
        finally:
            for fd in taken:
                os.close(fd)

    return call


def _refuse_to_pass_over(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"can't be read: .*{words}.*which is no damage") as e:
        jaxdist.restore(path, STATE, fallback=True)
    assert "is damaged" not in str(e.value)


@pytest.mark.parametrize(
    ("where", "number"),
    [("_bytes", errno.EMFILE), ("check_files", errno.EACCES), ("read", errno.EIO), ("_bytes", errno.ESTALE)],
)
def test_what_the_system_cannot_read_is_no_damage(
    where: str, number: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(record, where, fail)
        _refuse_to_pass_over(path, os.strerror(number))
    assert jaxdist.restore(path, STATE)["model"]["n"].tolist() == [20] * 4
    jaxdist.save(path, filled(30), 30)
    assert there(path) == ["10", "20", "30"]


def test_nor_is_what_tensorstore_cannot_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(ArrayReader, "open", _without_files(ArrayReader.open))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        _refuse_to_pass_over(path, os.strerror(errno.EMFILE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: data_file(d).write_bytes(data_file(d).read_bytes()[:-100]), r"file .*/d/\w+ of .*20 has \d+ bytes"),
        (lambda d: data_file(d).unlink(), r"file .*/d/\w+ of .*20 can't be read: No such file"),
        (lambda d: shutil.rmtree(d / "default"), "file .* can't be read: No such file"),
        (lambda d: flip(d / "default" / "_METADATA", 30), "file .*_METADATA of .*20 has other bytes"),
        (lambda d: next(d.glob("saved-*")).unlink(), r"20 has no record \(saved-\*\.json\)"),
        (lambda d: next(d.glob("saved-*")).write_text("{"), r"file .*saved-2-after-1\.json of .*20 can't be read"),
        (lambda d: next(d.glob("saved-*")).write_text("[]"), r"file .*saved-2-after-1\.json of .*20 can't be read"),
        (lambda d: flip(next(d.glob("saved-*")), 300), r"file .*saved-2-after-1\.json of .*20 "),
        (
            lambda d: shutil.copy(next((d.parent / "10").glob("saved-*")), next(d.glob("saved-*"))),
            r"20 should be save 2 of step 20, but .* says save 1 of step 10: files were swapped",
        ),
        (
            lambda d: (shutil.rmtree(d), (d.parent / "10").rename(d)),
            r"20 should be save 1 of step 20, but .* step 10: .*renamed",
        ),
        # Each file is whole and has the right length: only the array's checksum can tell.
        (lambda d: (shutil.rmtree(d / "default"), shutil.copytree(d.parent / "10" / "default", d / "default")), "/20"),
    ],
)
def test_what_the_error_names(change: Callable[[Path], Any], message: str, path: Path) -> None:
    change(path / "20")
    assert jaxdist.latest_step(path) == 20
    with pytest.raises(CheckpointError, match=message):
        jaxdist.restore(path, STATE)


def test_on_to_the_one_before(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jaxdist.save(path, filled(30), 30)
    flip(data_file(path / "30"), 40_000)
    (path / "20" / "default" / "manifest.ocdbt").unlink()
    got = jaxdist.restore(path, STATE, fallback=True)
    assert got["model"]["n"].tolist() == [10] * 4
    said = capfd.readouterr().err
    assert "step 30 is passed over, going on from step 10: leaf model.w of" in said
    assert "step 20 is passed over, going on from step 10: file " in said
    # The job comes to those steps again.
    jaxdist.save(path, filled(20), 20)
    assert there(path) == ["10", "20", "20.damaged", "30.damaged"]
    assert jaxdist.latest_step(path) == 20
    assert jaxdist.restore(path, STATE)["model"]["n"].tolist() == [20] * 4


def test_a_restart_goes_on_by_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(data_file(path / "20"), 40_000)
    monkeypatch.setenv("JAXDIST_RESTARTS", "0")
    with pytest.raises(CheckpointError, match="damaged"):
        jaxdist.restore(path, STATE)
    monkeypatch.setenv("JAXDIST_RESTARTS", "1")
    assert jaxdist.restore(path, STATE)["model"]["n"].tolist() == [10] * 4
    with pytest.raises(CheckpointError, match="damaged"):
        jaxdist.restore(path, STATE, step=20)  # nothing else will do
    with pytest.raises(CheckpointError, match="damaged"):
        jaxdist.restore(path, STATE, fallback=False)


def test_none_is_whole(path: Path) -> None:
    for step in ("10", "20"):
        flip(data_file(path / step), 40_000)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* that is complete: step 20: leaf .*; step 10: leaf"):
        jaxdist.restore(path, STATE, fallback=True)


def test_another_model_is_no_damage(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"leaf model\.n .* has shape"):
        jaxdist.restore(path, {**STATE, "model": {**STATE["model"], "n": np.zeros(5)}}, fallback=True)


def test_step_and_fallback(path: Path) -> None:
    with pytest.raises(ValueError, match="of which step"):
        jaxdist.restore(path, STATE, step=10, fallback=True)


def test_export_says_so_too(path: Path, tmp_path: Path) -> None:
    from jaxdist.checkpoint import read_all

    assert read_all(path / "20")[1]["model.n"].tolist() == [20] * 4  # type: ignore[union-attr]
    shutil.copytree(path / "20", path / "best")  # under any name
    assert read_all(path / "best")[1]["name"] == "a"
    flip(data_file(path / "best"), 40_000)
    with pytest.raises(CheckpointError, match=r"leaf model\.w .* is damaged"):
        read_all(path / "best")
