"""Folders of jobs: removed at the end, and if the job was killed at the start of the next."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jaxdist.control import scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


HOLDS = "from jaxdist.control import scratch; print(scratch.make('jaxdist-try-')[0], flush=True); input()"


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(temporary: Path) -> None:
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "file").write_text("x")
        (temporary / "jaxdist-try-file").write_text("not a folder")
        (temporary / "jaxdist-other-1").mkdir()
        with scratch.folder("jaxdist-try-") as mine:
            assert theirs.is_dir()
            other.send_signal(signal.SIGKILL)
            other.wait(20)
            with scratch.folder("jaxdist-try-"):
                assert not theirs.exists()
                assert Path(mine).is_dir()
    assert sorted(path.name for path in temporary.iterdir()) == ["jaxdist-other-1", "jaxdist-try-file"]


def test_without_locks_there_is_a_folder_all_the_same(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        scratch.make("jaxdist-try-")
    with scratch.folder("jaxdist-try-") as path:
        assert Path(path).is_dir()
    assert list(temporary.iterdir()) == []
