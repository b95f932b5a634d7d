"""The order of saving: what `latest_step` means after going back, and which checkpoints `keep=` removes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxdist
from jaxdist.checkpoint import history
from jaxdist.checkpoint.files import Saved, too_many

LIKE = {"w": 0}


def save(path: Path, *steps: int, keep: int | None = None, overwrite: bool = False) -> None:
    for step in steps:
        jaxdist.save(path, {"w": step}, step, keep=keep, overwrite=overwrite)


def there(path: Path) -> list[int]:
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal())


def new_job(path: Path) -> None:
    """What this process knows of the directory, another one would not."""
    history._at.pop(path.resolve(), None)


def test_the_last_saved_is_the_latest(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    jaxdist.restore(tmp_path, LIKE, step=10)
    assert jaxdist.latest_step(tmp_path) == 30  # nothing was saved on this branch yet
    save(tmp_path, 15)
    assert jaxdist.latest_step(tmp_path) == 15
    new_job(tmp_path)
    assert jaxdist.restore(tmp_path, LIKE) == {"w": 15}
    with pytest.raises(FileExistsError, match="overwrite=True"):  # of the branch that was left
        save(tmp_path, 20)
    save(tmp_path, 20, overwrite=True)
    assert there(tmp_path) == [10, 15, 20, 30]
    assert jaxdist.latest_step(tmp_path) == 20


def test_keep_after_going_back(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, keep=3)
    jaxdist.restore(tmp_path, LIKE, step=10)
    save(tmp_path, 15, keep=3)
    assert there(tmp_path) == [10, 15, 30]  # the branch that was left goes first, its oldest before
    save(tmp_path, 20, keep=3)
    assert there(tmp_path) == [10, 15, 20]
    save(tmp_path, 25, keep=3)
    assert there(tmp_path) == [15, 20, 25]


def test_keep_in_a_restarted_job(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, keep=3)
    new_job(tmp_path)
    jaxdist.restore(tmp_path, LIKE, step=20)
    save(tmp_path, 25, keep=2)
    assert there(tmp_path) == [20, 25]


def test_a_job_that_begins_anew(tmp_path: Path) -> None:
    """In the directory of another run, whose checkpoints count but are not its own."""
    save(tmp_path, 100, 200)
    new_job(tmp_path)
    save(tmp_path, 1, keep=2)
    assert there(tmp_path) == [1, 200]
    save(tmp_path, 2, keep=2)
    assert there(tmp_path) == [1, 2]
    assert jaxdist.latest_step(tmp_path) == 2


def test_keep_one(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, keep=1)
    jaxdist.restore(tmp_path, LIKE)
    save(tmp_path, 5, keep=1)
    assert there(tmp_path) == [5]


def test_a_step_replaced(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    save(tmp_path, 10, keep=1, overwrite=True)
    assert there(tmp_path) == [10]
    assert jaxdist.restore(tmp_path, LIKE) == {"w": 10}


def test_what_is_not_known_is_not_removed() -> None:
    line = [Saved(1, 1, 0), Saved(2, 2, 1), Saved(9, None, 0)]
    assert too_many(line, 1) == [Saved(1, 1, 0)]
    assert too_many(line[2:], 1) == []
    assert too_many([], 1) == []


def test_a_circle_ends() -> None:
    """Numbers begin at 1 again in a directory that was emptied under a running job."""
    assert too_many([Saved(5, 1, 3), Saved(6, 2, 1), Saved(7, 3, 2)], 2) == [Saved(5, 1, 3)]


def test_a_removed_directory(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, 3)
    shutil.rmtree(tmp_path / "run")
    save(tmp_path / "run", 1, 2, keep=1)
    assert there(tmp_path / "run") == [2]
    assert np.asarray(jaxdist.restore(tmp_path / "run", LIKE)["w"]) == 2
