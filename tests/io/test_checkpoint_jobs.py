"""Checkpoints of several processes: other numbers of ranks, damage, full disks, and one owner of a folder."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import jobs, training
from harness.errors import check, raises
from harness.states import small_files, there

import jaxdist
from jaxdist import CheckpointError

SCRIPTS = Path(__file__).with_name("scripts")
LOCK = ".jaxdist-lock"
BAD = {
    "nothing there": ("FileNotFoundError", "rank 0", "bad_calls"),
    "another folder": ("CheckpointError", "bad_calls0/1 on rank 0", "bad_calls1/1 on rank 1"),
    "another shape": ("CheckpointError", "leaf w", "[2] on rank 0", "[3] on rank 1"),
    "another value": ("CheckpointError", "leaf w", "rank 0", "rank 1"),
    "no leaf": ("TypeError", "rank 1", "leaf w"),
    "no folder": ("CheckpointError", "rank 0", "/proc/none"),
    "another like": ("CheckpointError", "rank 1", "leaf w", "[3]", "[4]"),
    "there already": ("FileExistsError", "rank 0", "bad_calls/1"),
    "another step": ("CheckpointError", "1 on rank 0", "2 on rank 1"),
    "no leaf of like": ("TypeError", "rank 1", "leaf w", "bytes"),
}


def test_two_ranks(tmp_path: Path) -> None:
    """Each writes its shards; damage of one is told on both; what is wrong on one rank is told on both."""
    names = [
        "two_steps",
        "damaged",
        "key_of_a_step",
        "bad_calls",
        "other_leaves",
        "full_disk",
        "not_shared",
        "lost_part",
    ]
    words = [f'checkpoints:{name}["{tmp_path / name.replace("damaged", "two_steps")}"]' for name in names]
    done, found = jobs.cases(2, "auto", tmp_path, *words, how="hand")
    _, damaged, _, bad_calls, other_leaves, _, not_shared, lost_part = found.values()
    for rank in range(2):
        (kind, message), *restored = damaged[rank]
        assert (kind, "leaf w" in message, restored) == ("CheckpointError", True, [10, True]), message
        check(bad_calls[rank], BAD)
        check(not_shared[rank], {"save": ("CheckpointError", "run/1"), "restore": ("FileNotFoundError", "rank 1")})
        check({"save": lost_part[rank]}, {"save": ("CheckpointError", "lost_part/1", "rank 1", "MemoryError")})
        expected = {n: ("CheckpointError", n, "rank 0", "rank 1") for n in other_leaves[rank]}
        check(other_leaves[rank], expected)
        assert max(len(message) for _, message in other_leaves[rank].values()) < 720
    assert done.output.count("skipped step 20") == 1
    like = {"w": np.zeros((60, 500), "u4"), "odd": np.zeros((7, 3), "u4"), "step": 0}
    assert jaxdist.restore(tmp_path / "two_steps", like)["step"] == 10


@pytest.mark.slow
def test_from_any_processes_and_devices_onto_any_others(tmp_path: Path) -> None:
    for step, (ranks, devices) in enumerate([(2, 2), (1, 4), (2, 3), (3, 1), (2, 2)]):
        word = f'checkpoints:goes_on["{tmp_path}", {step}]'
        jobs.cases(ranks, "xla", tmp_path, word, how="hand", env={"JAXDIST_DEVICES": str(devices)})


@pytest.mark.slow
@pytest.mark.mpi
def test_training_on_any_number_of_ranks(tmp_path: Path) -> None:
    """30 steps, restarted on others and at another level: the losses and the weights of one process."""
    straight, found = training.run(str(tmp_path / "straight"), 30, 0), dict[str, Any]()
    losses = list[float]()
    for ranks, devices, steps, level in ((4, 1, 12, 3), (2, 2, 18, 2), (3, 0, 23, 2), (1, 3, 27, 3), (2, 1, 30, 1)):
        words = [training.__file__, str(tmp_path / "cut"), str(steps), str(level), "--x64"]
        env = {"JAXDIST_DEVICES": str(devices)} if devices else {"JAXDIST_COMMUNICATOR": "mpi"}
        done = jobs.run("hand" if devices else "mpirun", ranks, words, env)
        found = json.loads(done.stdout.partition("FOUND ")[2].partition("\n")[0])
        losses += found["losses"]
    np.testing.assert_allclose(losses, straight["losses"], atol=1e-10, rtol=0)
    for name, x in straight["params"].items():
        np.testing.assert_allclose(found["params"][name], x, atol=1e-10, rtol=0, err_msg=name)


# --- disks


@pytest.mark.slow
def test_slow_writes_are_waited_for_and_a_failed_last_one_told(tmp_path: Path) -> None:
    """Longer than the timeout; and what fails when the script has ended fails the job."""
    words = [str(SCRIPTS / "slow_writes.py"), str(tmp_path / "run")]
    output = jobs.run("hand", 2, words, {"JAXDIST_TIMEOUT": "2"}, code=1).output
    for step in (0, 1):
        assert output.count(f"LATEST {step}") == 2, output
    for token in (str(tmp_path / "run" / "2"), "on rank 1", "File too large"):
        assert token in output, token
    assert there(tmp_path / "run") == ["0", "1"]


@pytest.mark.slow
def test_the_last_save_in_the_background_is_waited_for(tmp_path: Path) -> None:
    done = jobs.run("hand", 1, [str(SCRIPTS / "owner.py"), str(tmp_path), "ends"])
    assert done.stdout == "the end\n"
    got = jaxdist.restore(tmp_path, {f"w{i}": np.zeros(200_000, int) for i in range(20)})
    assert all((got[f"w{i}"] == i).all() for i in range(20))


# --- one owner


@pytest.mark.slow
def test_a_second_job_is_an_error_until_the_first_is_dead(tmp_path: Path) -> None:
    """Reading is free; a killed owner's folder is taken over at once."""
    job = jobs.Job().start([sys.executable, str(SCRIPTS / "owner.py"), str(tmp_path)])
    try:
        job.wait_for(lambda text: "SAVED" in text)
        owner = job.processes[0].pid
        with raises(CheckpointError, str(tmp_path), str(owner), os.uname().nodename):
            jaxdist.save(tmp_path, {"w": 2}, 2)
        (tmp_path / LOCK).write_text('{"pid": 1' + "0" * 5000)  # an editor, say
        with raises(CheckpointError, str(tmp_path / LOCK), "100"):
            jaxdist.save(tmp_path, {"w": 2}, 2)
        assert jaxdist.restore(tmp_path, {"w": 0}) == {"w": 1}
        os.kill(owner, signal.SIGKILL)
        os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)  # dead, and keeps its number until its parent takes note
        jaxdist.save(tmp_path, {"w": 2}, 2)
    finally:
        job.kill()


@pytest.mark.slow
def test_a_forked_child_leaves_the_lock_alone(tmp_path: Path) -> None:
    done = jobs.run("hand", 1, [str(SCRIPTS / "owner.py"), str(tmp_path), "forks"])
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["SAVED", "CHILD"]
    assert there(tmp_path) == ["1", "3"]


def test_a_lock_that_nobody_holds(tmp_path: Path) -> None:
    """Is taken over at once, whatever it says; one that was moved away is made anew."""
    (tmp_path / LOCK).write_bytes(b"process 1\xff")
    for step in (2, 3):
        jaxdist.save(tmp_path, {"w": 2}, step)
        assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text()
        (tmp_path / LOCK).rename(tmp_path / "moved")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with raises(CheckpointError, str(tmp_path), "No space left on device"):
            jaxdist.save(tmp_path, {"w": 1}, 1)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    jaxdist.save(tmp_path, {"w": 1}, 1)


def test_what_a_full_disk_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=300_000)
    x = np.random.default_rng(0).normal(size=100_000)
    with monkeypatch.context() as patch, small_files():
        patch.setattr(shutil, "disk_usage", lambda path: free)
        with raises(CheckpointError, str(tmp_path), "800,000 bytes", "300,000 free", "500,000 missing"):
            jaxdist.save(tmp_path, {"w": x}, 1)
    jaxdist.save(tmp_path, {"w": x}, 1)
