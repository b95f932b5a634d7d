"""Damage is told or passed over, kills lose nothing, and what a job removes while it is read is no damage."""

import errno
import functools
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.damages import DAMAGES, at_random, record
from harness.commands import command
from harness.errors import raises
from harness.moments import at_each, snapshots
from harness.states import bits, data_file, flip, same, there

import jaxdist
from jaxdist import CheckpointError

W = np.random.default_rng(0).normal(size=(100, 100))


def filled(step: int) -> dict[str, Any]:
    return {"model": {"w": W + step, "n": np.full(4, step)}, "name": str(step)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of the steps 10 and 20."""
    for step in (10, 20):
        jaxdist.save(tmp_path / "run", filled(step), step)
    return tmp_path / "run"


def restored(path: Path, **how: Any) -> int:
    """The step that comes back, which must be whole."""
    got = jaxdist.restore(path, filled(0), **how)
    assert same(got, filled(int(got["name"])))
    return int(got["name"])


def test_each_damage_is_told(path: Path, tmp_path: Path) -> None:
    """By the names of the leaf, the file and the folder, an odd one; and by an export."""
    for i, (name, (damage, tokens)) in enumerate(DAMAGES.items()):
        shutil.copytree(path, run := tmp_path / f"run{i}%20")
        damage(run / "20")
        with raises(CheckpointError, *tokens, str(run / "20")):
            jaxdist.restore(run, filled(0), 20)
        if "another, renamed" not in name:
            assert restored(run) == 10, name
        code, said = command("export", run / "20", tmp_path / "out.npz")
        assert (code, str(run / "20") in said) == (2, True), name


def test_the_one_before(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Unless one is asked for; and a save of a damaged step replaces it."""
    jaxdist.save(path, filled(30), 30)
    flip(data_file(path / "30"))
    record(path / "20").unlink()
    assert restored(path) == 10
    said = capfd.readouterr().err
    assert [text for text in ("step 30", "step 20", "step 10", "model.w") if text not in said] == []
    with raises(CheckpointError, "30"):
        restored(path, step=30)
    jaxdist.save(path, filled(15), 15, keep=2)
    assert there(path) == ["10", "15", "20", "30"]
    for step in (20, 30):
        jaxdist.save(path, filled(step), step)
        assert restored(path) == step
    with raises(FileExistsError, "30"):
        jaxdist.save(path, filled(30), 30)
    for step in (10, 15, 20, 30):
        record(path / str(step)).unlink()
    for call in (restored, jaxdist.latest_step):
        with raises(CheckpointError, "step 10", "step 20", str(path)):
            call(path)


def leaves_of_all_kinds(step: int) -> dict[str, Any]:
    """In shards and whole, that compress and that do not; another one for each step."""
    rng = np.random.default_rng(step)
    return {
        "wide": jaxdist.shard({"even": rng.normal(size=(16, 40)), "padded": np.full((9, 5), float(step))}),
        "half": jnp.asarray(rng.normal(size=(8, 24)), jnp.bfloat16), "bytes": rng.integers(0, 255, 3000, np.uint8),
        "zeros": np.zeros((64, 64), np.float32) + (step == 20), "same": np.arange(12.0), "scalar": np.float32(step),
        "key": jax.random.key(step), "step": step, "flag": step == 20, "text": f"step {step}", "none": None,
    }  # fmt: skip


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_no_damage_is_silent(seed: int, tmp_path: Path) -> None:
    """What comes back is, bit for bit, one of those that were saved: the last one, or one before where it may be."""
    good, steps = tmp_path / "good", (10, 20, 30)
    for step in steps:
        jaxdist.save(good, leaves_of_all_kinds(step), step)
    leaves = lambda tree: jax.tree.map(bits, jaxdist.unshard(tree))
    expected = {step: leaves(leaves_of_all_kinds(step)) for step in steps}
    for i in range(25):
        rng, bad = random.Random(f"{seed} {i}"), tmp_path / f"bad{i}"
        shutil.copytree(good, bad)
        what, any_step = at_random(bad, "30", ["10", "20"], rng), rng.random() < 0.25
        try:
            got = leaves(jaxdist.restore(bad, leaves_of_all_kinds(0), None if any_step else 30))
        except CheckpointError:
            continue
        found = [step for step in steps if got == expected[step]]
        assert found == [30] or (found and any_step), (what, i)


# --- kills


def test_a_kill_at_any_moment_of_a_save_loses_nothing(path: Path, tmp_path: Path) -> None:
    """Also while others are removed, and a damaged one is replaced."""
    for i, step in enumerate([30, 40]):
        shutil.copytree(path, run := tmp_path / str(i))
        if step == 40:
            jaxdist.save(run, filled(40), 40)
            flip(data_file(run / "40"))
            assert restored(run) == 20
        left = snapshots(run, tmp_path / f"left{i}", functools.partial(jaxdist.save, run, filled(step), step, keep=1))
        assert len(left) > 10
        for one in left:
            assert restored(one) in (20, step), one
            jaxdist.save(one, filled(50), 50, keep=1)
            assert set(there(one)) <= {"40", "50"}, one


def test_it_has_its_name_when_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses power does not forget a rename, but what was written and not synced."""
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def fsync(file: int) -> None:
        sync(file)
        done.append(f"sync {Path(f'/proc/self/fd/{file}').readlink()}")

    def renamed(a: Any, b: Any) -> None:
        rename(a, b)
        done.append(f"rename {b}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    jaxdist.save(tmp_path, filled(1), 1)
    at = done.index(f"rename {tmp_path}/1")
    assert any("manifest.json" in what for what in done[:at])
    assert any(what.startswith(f"sync {tmp_path}/1.") and "manifest.json" not in what for what in done[:at])
    assert f"sync {tmp_path}" in done[at:]


# --- what is no damage


def test_too_many_open_files_are_no_damage(path: Path) -> None:
    """However few more the process may open: nothing is passed over, and so nothing put aside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert restored(path) == 20  # what libraries open once stays
    highest = max(int(p.name) for p in Path("/proc/self/fd").iterdir() if p.exists())
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < highest:  # no number below is free
        taken.append(os.open(os.devnull, os.O_RDONLY))
    told = []
    for more in range(7):
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + more, hard))
        try:
            assert restored(path) == 20
        except (CheckpointError, OSError) as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for number in taken:
        os.close(number)
    assert told
    words = os.strerror(errno.EMFILE), f"os_error_code='{errno.EMFILE}'"  # the middle of a long message is cut out
    assert all(any(word in text for word in words) for text in told), told
    jaxdist.save(path, filled(30), 30)
    assert there(path) == ["10", "20", "30"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_nor_is_a_disk_that_fails(number: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(file: Path, of: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
        if path / "20" in file.parents:
            raise OSError(number, os.strerror(number))
        return of(file)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        with raises(CheckpointError, str(path / "20"), os.strerror(number)):
            restored(path)
    assert restored(path) == 20


# --- read beside a job that saves


def publish(run: Path, step: int) -> None:
    """As a job does it, with ``keep=1``."""
    shutil.copytree(run.parent / "run" / str(step), run / f"{step}.new")
    (run / f"{step}.new").rename(run / str(step))
    for old in run.iterdir():
        if old.name != str(step):
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.removed.orbax-checkpoint-tmp")))


READERS: dict[str, Callable[[Path], Any]] = {
    "restore": restored,
    "latest_step": jaxdist.latest_step,
    "restore of a step": lambda run: restored(run, step=10),
}


@pytest.mark.parametrize("reader", list(READERS))
def test_what_is_removed_at_any_moment_of_a_reading(reader: str, path: Path, tmp_path: Path) -> None:
    """The next one is read; a step that was asked for is said to be gone."""
    found, gone = [], list[str]()
    for moment in range(60):
        (run := tmp_path / f"{reader}{moment}").mkdir()
        publish(run, 10)
        with at_each(run, lambda n, run=run, moment=moment: publish(run, 20) if n == moment else None) as seen:
            try:
                found.append(READERS[reader](run))
            except FileNotFoundError as error:
                gone.append(str(error))
        if len(seen) <= moment:
            break
    assert set(found) <= {10, 20}
    assert 10 in found
    assert (20 in found, gone == []) == ((False, False) if reader == "restore of a step" else (True, True))
    assert all("step 10" in text or "/10 " in text for text in gone), gone
