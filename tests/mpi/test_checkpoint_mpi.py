"""Checkpoints of several processes: kills, disks that are full, other numbers of ranks, levels and communicators."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import kills
import numpy as np
import pytest
from harness import jobs, training

import jaxdist
from jaxdist.checkpoint import lock

pytestmark = [pytest.mark.slow, pytest.mark.mpi]  # together


class Found(NamedTuple):
    """What two jobs, one after the other, had to say.

    Attributes:
      folder: of their checkpoints.
      by: the name of a case: what it returned on each rank.
      error: the standard error of the second.
      damaged: the file of a shard in which a bit was changed between them.
    """

    folder: Path
    by: dict[str, list[Any]]
    error: str
    damaged: Path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """2 ranks and then 3; both go on with what 8 virtual devices have begun to train."""
    folder = tmp_path_factory.mktemp("checkpoints")
    training.run(str(folder / "cut"), 7, 2)
    lock.release_all()  # as at the end of a job

    def case(name: str, *more: Any, path: str = "") -> str:
        return f"{name}{json.dumps([str(folder / (path or name)), *more])}"

    first = [case("saves:bad_calls"), case("saves:key_of_a_step"), case("saves:two_steps", path="steps")]
    _, by = jobs.cases(2, "xla", folder, *first, case("training:run", 13, 1, path="cut"))
    damaged = max((folder / "steps" / "20").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    second = [case("saves:damaged", path="steps"), case("saves:a_leaf_that_differs")]
    result, more = jobs.cases(3, "mpi", folder, *second, case("training:run", 16, 3, path="cut"))
    named = {word.partition("[")[0].partition(":")[2]: said for word, said in (by | more).items()}
    return Found(folder, named, result.stderr, damaged)


def test_everything_changes_in_between(found: Found) -> None:
    """8 virtual devices at level 2, 2 ranks over gloo at level 1, 3 over MPI at level 3, one process at level 0."""
    straight = training.run(str(found.folder / "straight"), 20, 0)
    env = jobs.environment({"XLA_FLAGS": None})
    command = [sys.executable, training.__file__, str(found.folder / "cut"), "20", "0", "--x64"]
    end = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    params = json.loads(end.stdout.partition("FOUND ")[2])["params"]
    gaps = {k: np.abs(np.subtract(params[k], v)).max() for k, v in straight["params"].items()}
    assert max(gaps.values()) <= 1e-10, gaps


def test_killed_while_saving(tmp_path: Path) -> None:
    """All ranks get SIGKILL at random moments: what is restored then is always whole, and nothing is lost."""
    kills.run(2, 0, tmp_path)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="DISK FULL NOT CHECKED: mounts need root"
)
def test_disk_full(tmp_path: Path) -> None:
    """Over the other communicator: benchmarks/test_faults.py."""
    disk = tmp_path / ("disk" * 40)  # a long path: the cause comes after several of it
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=False).returncode != 0:
        pytest.skip("DISK FULL NOT CHECKED: this container can't mount a tmpfs")
    try:
        jaxdist.save(disk, {"w": np.arange(3.0)}, 1)
        lock.release_all()
        word = f"saves:full_disk{json.dumps([str(disk)])}"
        done, said = jobs.cases(2, "mpi", tmp_path, word)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    for text in said[word]:
        assert re.match(r"CheckpointError .*2 was not written.*No space left", text), text
    assert "Event loop" not in done.output
    assert "Traceback" not in done.output


def test_slow_writes_are_waited_for_and_a_failed_last_one_told(tmp_path: Path) -> None:
    word = f"saves:slow_writes{json.dumps([str(tmp_path / 'run')])}"
    done = jobs.mpirun(2, [jobs.RUNNER, "mpi", str(tmp_path), word], {"JAXDIST_TIMEOUT": "2"}, timeout=90)
    for rank in (0, 1):  # each was the slow one of a step
        assert done.stdout.count(f"LATEST {rank}") == 2, done.output
        assert f"has waited for 2 s for rank {rank} " in done.stderr, done.output
    assert done.returncode == 1
    assert re.search(r"its last save had failed: checkpoint .*2 was not written .*, on rank 1: .*No space", done.stderr)
    assert "Traceback" not in done.stderr
    left = sorted(p.name for p in (tmp_path / "run").iterdir() if not p.name.startswith("."))  # or it is a lock
    assert left == ["0", "1"]


def test_damage_is_told_on_every_rank_or_passed_over(found: Found) -> None:
    """Of shards of 2 ranks 3 read each a part of what was damaged."""
    for said, step, whole in found.by["damaged"]:
        assert said.startswith("CheckpointError leaf w of checkpoint")
        assert str(found.damaged) in said
        assert (step, whole) == (10, True)
    assert found.error.count("step 20 is passed over, going on from step 10: leaf w of checkpoint") == 1


BAD = [
    r"FileNotFoundError restore, on rank 0: there is no checkpoint in",
    r"CheckpointError the ranks call save with .*: the checkpoint is .*bad_calls0/1 on rank 0; .*bad_calls1/1 on",
    r"CheckpointError the ranks call save .*: leaf w is float64\[2\] on rank 0; float64\[3\] on rank 1\. Save a",
    r"CheckpointError the ranks call save .*: leaf w, which each rank has by itself, is .*Did each rank train by",
    r"TypeError save, on rank 1: leaf w can't be saved",
    r"CheckpointError save, on rank 0: can't write into /proc/none",
    r"CheckpointError restore, on rank 1: leaf w .* has shape \(3,\), in `like` \(4,\)",
    r"FileExistsError save, on rank 0: there is a checkpoint of this step",
    r"CheckpointError the ranks call restore .*: the step is 1 on rank 0; 2 on rank 1",
    r"TypeError restore, on rank 1: leaf w of `like` is nothing that a checkpoint has: bytes",
]


def test_bad_calls_are_told_on_every_rank(found: Found) -> None:
    for told in found.by["bad_calls"]:
        for pattern, text in zip(BAD, told, strict=True):
            assert re.match(pattern, text), (pattern, text)


def test_a_leaf_that_differs_on_one_rank(found: Found) -> None:
    for told in found.by["a_leaf_that_differs"]:
        assert len(told) == 25
        for name, error in told.items():
            leaf = {"structure": "leaf b", "keep": "keep", "overwrite": "overwrite"}.get(
                name, rf"leaf deep\.1\.{re.escape(name)}(, which each rank has by itself,)?"
            )
            said = rf"{leaf} is \S.* on rank 0, 1; \S.* on rank 2\. "
            assert re.match(f"CheckpointError the ranks call save with different arguments: {said}", error), error
            assert len(error) < 720
