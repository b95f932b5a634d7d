"""Which paths are directories of checkpoints, and what is said of the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist import CheckpointError
from jaxdist.checkpoint import orbax_writer

STATE = {"w": np.arange(3)}


@pytest.mark.parametrize("path", ["", "gs://bucket/run", "s3://bucket", "file:///tmp/run", Path("gs://bucket/run")])
def test_what_is_no_path(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    why = "the path of the checkpoints is empty" if path == "" else f"^{re.escape(str(path))} looks like a URL"
    for call in (
        lambda: jaxdist.save(path, STATE, 1),
        lambda: jaxdist.restore(path, STATE),
        lambda: jaxdist.latest_step(path),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file", "file is not a directory"),
        ("file/below/it", "file is not a directory"),
        ("to-file", "to-file is a symbolic link to file, which is not a directory"),
        ("dangling", "dangling is a symbolic link to nowhere, which does not exist"),
        ("dangling/below", "dangling is a symbolic link to nowhere, which does not exist"),
        ("circle", "circle is a symbolic link that leads in a circle"),
        ("circle/below", "circle is a symbolic link that leads in a circle"),
    ],
)
def test_what_is_in_the_way(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for link, target in {"to-file": "file", "dangling": "nowhere", "circle": "back", "back": "circle"}.items():
        (tmp_path / link).symlink_to(target)
    with pytest.raises(CheckpointError) as raised:
        jaxdist.save(tmp_path / path, STATE, 1)
    assert str(raised.value) == f"can't write into {tmp_path / path}: {tmp_path}/{why}"


def test_a_link_to_a_directory_is_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    jaxdist.save(tmp_path / "link" / "below", STATE, 1)
    assert jaxdist.restore(tmp_path / "there" / "below", STATE)["w"].tolist() == [0, 1, 2]


def test_arrays_that_the_root_does_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error to orbax: the checkpoint would be there, without them."""
    monkeypatch.setattr(orbax_writer, "write", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"1 was not written .*the arrays of all ranks are not in"):
        jaxdist.save(tmp_path, STATE, 1)
    assert jaxdist.latest_step(tmp_path) is None
