"""Folders of any name: a checkpoint comes back from where it was saved."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import jaxdist
from jaxdist import CheckpointError
from jaxdist.checkpoint import plain

NAMES = [
    "lr=[0.1]", "[!a]", "a*b", "**", "a?b", "run#3", "a|b", "50%", "a%20b", "a%2Fb", "a\\b", "a/b", "gs:/b", "a:b",
    "~", "{a}", "$HOME", "a;b", "a&b", "'", '"', "a b", "a\nb", "a\x7fb", "ü", os.fsdecode(b"a\xffb"), "x" * 255,
]  # fmt: skip


def test_a_checkpoint_is_read_from_the_folder_it_was_saved_into(tmp_path: Path) -> None:
    for i, name in enumerate(NAMES):
        jaxdist.save(tmp_path / name, {"w": np.full(3, i), "text": name.encode("utf-8", "replace").decode()}, 1)
    for i, name in enumerate(NAMES):
        got = jaxdist.restore(tmp_path / name, {"w": np.zeros(3, int), "text": ""})
        assert got["w"].tolist() == [i] * 3, name
        (tmp_path / name).rename(tmp_path / "moved")
        assert jaxdist.restore(tmp_path / "moved", got)["w"].tolist() == [i] * 3, name
        (tmp_path / "moved").rename(tmp_path / f"done-{i}")


def test_damage_is_reported_under_the_name_of_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run[1]%20"
    jaxdist.save(path, {"w": np.arange(3)}, 1)
    files = [f for f in (path / "1" / "default").rglob("d/*") if f.is_file()]
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError) as raised:
        jaxdist.restore(path, {"w": np.zeros(3, int)})
    assert f"leaf w of checkpoint {path}/1 is damaged" in str(raised.value)
    assert "/proc/" not in str(raised.value)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    jaxdist.save(tmp_path, {"w": np.arange(3)}, 1)
    jaxdist.restore(tmp_path, {"w": np.zeros(3, int)})  # what libraries open once stays
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for step in range(2, 5):
        jaxdist.save(tmp_path, {"w": np.arange(3)}, step)
        jaxdist.restore(tmp_path, {"w": np.zeros(3, int)})
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_what_a_library_says_has_the_name_of_the_folder(tmp_path: Path) -> None:
    descriptor, name = plain.opened(tmp_path)
    assert plain.as_called(f"can't read {name}/d/1") == f"can't read {tmp_path}/d/1"
    os.close(descriptor)
    assert plain.as_called(f"can't read {name}/d/1") == f"can't read {name}/d/1"


def test_a_system_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "Path", lambda _: tmp_path / "missing")
    with pytest.raises(CheckpointError, match="there is no /proc"):
        plain.opened(tmp_path)
