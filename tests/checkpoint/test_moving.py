"""Reading beside a job that saves: what it removes or replaces meanwhile is not damaged, and not mixed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import jobs
from typer.testing import CliRunner

import jaxdist
from jaxdist import CheckpointError
from jaxdist.checkpoint import files, read_all, reading, record
from jaxdist.cli import app

LIKE = {"w": np.zeros(100), "n": 0, "t": ""}


def state(n: int) -> dict[str, Any]:
    return {"w": np.full(100, float(n)), "n": n, "t": str(n)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of the steps 1 to 4, of which `path` has the first."""
    for n in range(1, 5):
        jaxdist.save(tmp_path / "all", state(n), n)
    (tmp_path / "path").mkdir()
    publish(tmp_path / "path", 1)
    return tmp_path / "path"


def publish(path: Path, n: int) -> None:
    """As the job does it, with `keep=1`."""
    shutil.copytree(path.parent / "all" / str(n), path / f"{n}.new")
    (path / f"{n}.new").rename(path / str(n))
    for old in path.iterdir():
        if old.name != str(n):
            files.remove(old)


def at(call: str, what: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each of these happen at one call of a function of `record`."""
    original = getattr(record, call)

    def first(*args: Any) -> Any:
        if what:
            what.pop(0)()
        return original(*args)

    monkeypatch.setattr(record, call, first)


@pytest.mark.parametrize("call", ["read", "check_files"])
def test_a_newer_one_is_read(run: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(call, [lambda: publish(run, 2), lambda: publish(run, 3)], monkeypatch)
    assert jaxdist.restore(run, LIKE)["t"] == "3"
    at(call, [lambda: publish(run, 4)], monkeypatch)
    assert read_all(run)[0] == run / "4"


def test_while_its_arrays_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, left = reading.ArrayReader.read, [2]

    def read(*args: Any) -> Any:
        if left:
            publish(run, left.pop())
        return original(*args)

    monkeypatch.setattr(reading.ArrayReader, "read", read)
    got = jaxdist.restore(run, LIKE, fallback=True)
    assert (got["n"], got["w"][0]) == (2, 2.0)
    assert [p.name for p in run.iterdir()] == ["2"]


@pytest.mark.parametrize("call", ["read", "check_files"])
def test_a_step_that_was_asked_for_is_gone(run: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(call, [lambda: publish(run, 2)], monkeypatch)
    with pytest.raises(FileNotFoundError, match="path/1 was removed while it was being read; there: 2"):
        jaxdist.restore(run, LIKE, step=1)
    at(call, [lambda: publish(run, 3)], monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"path/2 was removed while it was being read$"):
        read_all(run / "2")
    at(call, [lambda: publish(run, 4)], monkeypatch)
    done = CliRunner().invoke(app, ["export", str(run / "3"), str(run.parent / "out.npz")], terminal_width=1000)
    assert (done.exit_code, "was removed while it was being read" in done.output) == (2, True)


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize("call", ["read", "check_files"])
def test_a_step_that_was_replaced(run: Path, step: int | None, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the two renames, and with one that has the same number."""

    def aside() -> None:
        (run / "1").rename(files.aside(run / "1"))

    def back() -> None:
        files.aside(run / "1").rename(run / "1")

    def another() -> None:
        jaxdist.save(run, state(7), 1, overwrite=True)

    at(call, [aside, back, another], monkeypatch)
    assert jaxdist.restore(run, LIKE, step=step)["t"] == "7"
    at(call, [lambda: jaxdist.save(run, state(8), 1, overwrite=True)], monkeypatch)
    assert read_all(run / "1")[1]["t"] == "8"
    assert jaxdist.latest_step(run) == 1


@pytest.mark.parametrize("of", ["run", "step"])
def test_export_between_the_renames(run: Path, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is chosen, and has another name when it is looked at; then it is gone."""
    original = reading.identity
    moves = [
        lambda: (run / "1").rename(files.aside(run / "1")),
        lambda: None,
        lambda: files.aside(run / "1").rename(run / "1"),
        *([lambda: None, lambda: publish(run, 2)] if of == "run" else []),
    ]

    def identity(directory: Path) -> Any:
        if moves:
            moves.pop(0)()
        return original(directory)

    monkeypatch.setattr(reading, "identity", identity)
    assert read_all(run if of == "run" else run / "1")[1]["t"] == ("2" if of == "run" else "1")


@pytest.mark.parametrize("reader", [lambda path: jaxdist.restore(path, LIKE), read_all], ids=["restore", "export"])
def test_it_is_not_tried_for_ever(run: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_FOR", 0.0)
    at("check_files", [lambda n=n: publish(run, 2 + n % 2) for n in range(40)], monkeypatch)
    with pytest.raises(CheckpointError, match=r"was removed or replaced .* as were 10 before it: .*Let it keep more"):
        reader(run)


def test_damage_is_still_damage(run: Path) -> None:
    next((run / "1").rglob("manifest.ocdbt")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        jaxdist.restore(run, LIKE)
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        read_all(run)


def test_the_latest_of_what_moves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment is there none."""
    original, left = files.look, [3, 2]

    def look(directory: Path, step: int) -> Any:
        if left:
            publish(run, left.pop())
        return original(directory, step)

    monkeypatch.setattr(files, "look", look)
    assert jaxdist.latest_step(run) == 3


def test_a_directory_that_is_half_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was opened under its name, and listed when it had another and no record any more."""
    original, left = Path.iterdir, [True]

    def iterdir(path: Path) -> Any:
        names = list(original(path))
        if left and path == run / "1":
            left.pop()
            publish(run, 2)
            names = [p for p in names if not p.name.startswith("saved-")]
        return iter(names)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert files.saved(run) == [files.Saved(2, 2, 1)]


def test_a_pipe_for_a_record(run: Path) -> None:
    """It is not waited for."""
    file = next((run / "1").glob("saved-*"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"saved-1-after-0\.json is not a file"):
        jaxdist.restore(run, LIKE)


SAVER = textwrap.dedent("""
    import sys, jaxdist, numpy as np
    n = 0
    while True:
        n += 1
        step = (n, 7, n % 3)[n // 20 % 3]  # another one each time, the same, or one that was removed
        state = {"w": np.full(100, float(n)), "n": n, "t": str(n)}
        jaxdist.save(sys.argv[1], state, step, keep=1, overwrite=True)
        print(n, flush=True)
""")


@pytest.mark.slow
def test_beside_a_job(tmp_path: Path) -> None:
    path, newest, said = tmp_path / "run", 0, set[str]()
    job = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path)], env=jobs.environment(), text=True, stdout=subprocess.PIPE
    )
    try:
        assert job.stdout is not None
        job.stdout.readline()
        end = time.monotonic() + 120
        while newest < 70 and time.monotonic() < end:
            step = jaxdist.latest_step(path)
            assert step is not None
            exported: Any = read_all(path)[1]
            for got in (exported, jaxdist.restore(path, LIKE)):
                assert (got["w"] == float(got["t"])).all()
                assert int(got["n"]) == int(got["t"]) >= newest
                newest = int(got["n"])
            try:
                assert (jaxdist.restore(path, LIKE, step=step)["w"] >= 1).all()
            except FileNotFoundError as error:
                said.add(str(error))
    finally:
        job.kill()
        job.communicate(timeout=60)
    assert all("was removed" in text or "no checkpoint of step" in text for text in said), said
    assert newest > 60  # all three ways
