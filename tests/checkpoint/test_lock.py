"""One job saves into a directory at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import jobs

import jaxdist
from jaxdist import CheckpointError
from jaxdist.checkpoint import lock

SAVER = textwrap.dedent("""
    import sys, time, jaxdist
    jaxdist.save(sys.argv[1], {"w": 1}, 1)
    print("SAVED", flush=True)
    time.sleep(60)
""")


def write(path: Path, age: float = 0.0, **said: Any) -> Path:
    """The lock of another job."""
    file = path / lock.NAME
    file.write_text(json.dumps({"token": "t", "host": "elsewhere", "pid": 7, "since": "noon", "machine": "m"} | said))
    then = time.time() - age
    os.utime(file, (then, then))
    return file


@pytest.mark.slow
def test_a_second_job_is_an_error_until_the_first_is_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVER, str(tmp_path)]
    job = subprocess.Popen(command, env=jobs.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert job.stdout is not None
        if job.stdout.readline() != "SAVED\n":
            pytest.fail(job.communicate(timeout=60)[1])
        with pytest.raises(CheckpointError, match=rf"another job saves into .*: process {job.pid} on \S+, since 2"):
            jaxdist.save(tmp_path, {"w": 2}, 2)
        assert jaxdist.restore(tmp_path, {"w": 0}) == {"w": 1}  # to read is free
        told = (tmp_path / lock.NAME).read_text()
        job.kill()
        os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
        began = time.monotonic()
        jaxdist.save(tmp_path, {"w": 2}, 2)  # a killed process keeps its number until its parent has asked for its end
        job.communicate(timeout=60)
        lock.release_all()
        (tmp_path / lock.NAME).write_text(told)
        jaxdist.save(tmp_path, {"w": 3}, 3)
        assert time.monotonic() - began < lock.LEASE / 2  # it did not wait for a dead process of this host
    finally:
        job.kill()
        job.communicate(timeout=60)


def test_a_number_that_another_process_has_now(tmp_path: Path) -> None:
    mine = lock._process(os.getppid())
    write(tmp_path, **mine)
    with pytest.raises(CheckpointError, match="another job"):
        lock.take(tmp_path, 0)
    write(tmp_path, **(mine | {"started": mine["started"] - 1}))
    lock.take(tmp_path, 0)


def test_a_copied_lock(tmp_path: Path) -> None:
    """Of this very process, which has not taken it."""
    write(tmp_path, **lock._process())
    lock.take(tmp_path, 0)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_lock_that_says_nothing(text: str, tmp_path: Path) -> None:
    """Its owner died while it was writing it: it counts for its time."""
    file = write(tmp_path)
    file.write_text(text)
    with pytest.raises(CheckpointError, match=r"process \? on \?"):
        lock.take(tmp_path, 0)
    os.utime(file, (0, 0))
    lock.take(tmp_path, 0)


def test_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, age=lock.LEASE / 2)
    with pytest.raises(CheckpointError, match=r"process 7 on elsewhere, since noon.*that was 3\d s ago"):
        lock.take(tmp_path, 0)
    write(tmp_path, age=lock.LEASE + 1)
    lock.take(tmp_path, 0)
    # One that is about to end is waited for.
    monkeypatch.setattr(lock, "LEASE", 1.0)
    write(tmp_path)
    lock.take(tmp_path, 600)


def test_an_owner_elsewhere_that_renews_is_noticed(tmp_path: Path) -> None:
    file, ended = write(tmp_path), threading.Event()

    def renew() -> None:
        while not ended.wait(0.1):
            os.utime(file)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="process 7 on elsewhere"):
            lock.take(tmp_path, 600)
    finally:
        ended.set()
        thread.join()


def test_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_RENEW", 0.05)
    lock.take(tmp_path, 0)
    file = tmp_path / lock.NAME
    os.utime(file, (0, 0))
    end = time.monotonic() + 60
    while file.stat().st_mtime == 0:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lock_that_was_taken_away(tmp_path: Path) -> None:
    """From a host that was suspended: it must not publish what it has written."""
    jaxdist.save(tmp_path, {"w": 1}, 1)
    write(tmp_path)
    with pytest.raises(CheckpointError, match="process 7 on elsewhere"):
        lock.take(tmp_path, 0)
    assert re.search("elsewhere", (tmp_path / lock.NAME).read_text())  # and leaves it alone


def test_breaking_takes_no_other_lock(tmp_path: Path) -> None:
    """Two jobs find a dead owner's; when the slower one acts, the faster one has its own there."""
    file = write(tmp_path, token="of the faster one")
    lock._break(file, {"token": "of the dead"})
    assert json.loads(file.read_text())["token"] == "of the faster one"
    assert [p.name for p in tmp_path.iterdir()] == [lock.NAME]


@pytest.mark.slow
def test_a_forked_child_leaves_it_alone_and_the_parent_gives_it_back(tmp_path: Path) -> None:
    """A child ends as a script does, and it tries to save."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path)],
        env=jobs.environment(), text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CHILD another job saves into") == 2, done.stdout + done.stderr
    assert "PARENT True" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


FORKING = """
import multiprocessing, os, sys
import jaxdist
from jaxdist.checkpoint import lock
jaxdist.save(sys.argv[1], {"w": 1}, 1)
def child():
    try:
        jaxdist.save(sys.argv[1], {"w": 1}, 2)
    except jaxdist.CheckpointError as error:
        print("CHILD", error, flush=True)
if os.fork() == 0:
    child()
    sys.exit(0)
assert os.wait()[1] == 0
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
assert process.exitcode == 0
own = lock._locks[lock.Path(sys.argv[1]).resolve()]
print("PARENT", own.held(), flush=True)
"""


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock.os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"can't write into .*: No space left on device"):
            jaxdist.save(tmp_path, {"w": 1}, 1)
    assert list(tmp_path.iterdir()) == []
    lock.take(tmp_path, 0)


@pytest.mark.parametrize("kind", ["to nothing", "to a file", "pipe"])
def test_what_is_no_lock_of_ours(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    path.mkdir()
    if kind == "pipe":
        os.mkfifo(path / lock.NAME)
    else:
        (path / lock.NAME).symlink_to(other)
    if kind == "to a file":
        other.write_text("mine")
    jaxdist.save(path, {"w": 1}, 1)
    assert lock._locks[path.resolve()].held()
    assert not (path / lock.NAME).is_symlink()
    assert kind != "to a file" or other.read_text() == "mine"
