"""Checkpoints of several processes: kills, disks that are full, other numbers of ranks, levels and communicators."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jobs
import kills
import numpy as np
import pytest

pytestmark = pytest.mark.slow  # together

DAMAGED = """
import sys
import jaxdist, numpy as np
ctx = jaxdist.init()
w = np.random.default_rng(0).normal(size=(60, 500))
if sys.argv[2] == "save":
    for step in (10, 20):
        jaxdist.save(sys.argv[1], {"w": jaxdist.shard(w + step), "step": step}, step)
else:
    try:
        got = jaxdist.restore(sys.argv[1], {"w": jaxdist.shard(w), "step": 0})
        print("GOT", got["step"], np.array_equal(jaxdist.unshard(got["w"]), w.astype(got["w"].dtype) + 10), flush=True)
    except jaxdist.CheckpointError as error:
        print("TOLD", error, flush=True)
"""

KEYS = """
import sys
import jax, jaxdist, numpy as np
jaxdist.init()
step = jaxdist.data_parallel(lambda key, x: (jax.random.split(key)[0], x.sum()))
key, _ = step(jax.random.key(1), np.ones(2))
jaxdist.save(sys.argv[1], {"key": key}, 1)
got = jaxdist.restore(sys.argv[1], {"key": key})["key"]
same = np.array_equal(*map(jax.random.key_data, (got, key)))
print("SAME", got.sharding == key.sharding, same, step(got, np.ones(2))[1])
"""

SCRIPT = str(Path(__file__).parents[1] / "support" / "training.py")


def steps_in(path: Path) -> list[str]:
    """Without the lock, which a killed job leaves."""
    return sorted(p.name for p in path.iterdir() if not p.name.startswith("."))


def found(result: jobs.Result) -> dict[str, Any]:
    line = re.search(r"^.*FOUND (.*)$", result.stdout, re.MULTILINE)
    assert line, result.output
    return json.loads(line[1])


def train(ranks: int, communicator: str, path: Path, steps: int, level: int, *more: str) -> jobs.Result:
    args = [SCRIPT, str(path), str(steps), str(level), *more]
    env = {"JAXDIST_COMMUNICATOR": communicator}
    return jobs.mpirun(ranks, args, env=env, timeout=120)


def test_a_key_that_a_step_returned_is_restored_onto_its_mesh(tmp_path: Path) -> None:
    results = jobs.spawn_env(2, ["-c", KEYS, str(tmp_path / "run")])
    assert [r.stdout for r in results] == ["SAME True True 4.0\n"] * 2, results[0].output + results[1].output


@pytest.mark.mpi
def test_everything_changes_in_between(tmp_path: Path) -> None:
    """8 virtual devices at level 2, 3 ranks over MPI at level 3, one process at level 0."""

    def alone(steps: int, level: int, devices: int, path: Path) -> dict[str, Any]:
        env = jobs.environment({"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"})
        command = [sys.executable, SCRIPT, str(path), str(steps), str(level), "--x64"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return found(jobs.Result(0, done.stdout, done.stderr, 0))

    straight = alone(20, 0, 1, tmp_path / "straight")
    alone(7, 2, 8, tmp_path / "cut")
    between = train(3, "mpi", tmp_path / "cut", 13, 3, "--x64")
    assert between.returncode == 0, between.output
    between = train(2, "xla", tmp_path / "cut", 16, 1, "--x64")
    assert between.returncode == 0, between.output
    end = alone(20, 0, 1, tmp_path / "cut")
    gaps = {k: np.abs(np.subtract(end["params"][k], v)).max() for k, v in straight["params"].items()}
    assert max(gaps.values()) <= 1e-10, gaps


@pytest.mark.mpi
def test_killed_while_saving(tmp_path: Path) -> None:
    """All ranks get SIGKILL at random moments: what is restored then is always whole, and nothing is lost."""
    kills.run(2, 0, tmp_path)


FAILING = """
import sys
import jaxdist, numpy as np
ctx = jaxdist.init()
path = sys.argv[1]
rng = np.random.default_rng(0)  # many: each that can't be written could show a traceback of its own
big = jaxdist.shard({f"w{i}": rng.normal(size=(128, 256)) for i in range(32)})
try:
    jaxdist.save(path, big, 2)
except jaxdist.CheckpointError as error:
    print(f"TOLD rank {ctx.rank}: {error}", flush=True)
print("LAST", ctx.rank, jaxdist.latest_step(path), jaxdist.restore(path, {"w": np.zeros(3)})["w"].tolist(), flush=True)
"""


@pytest.mark.mpi
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
        first = textwrap.dedent("""
            import sys, jaxdist, numpy as np
            jaxdist.save(sys.argv[1], {"w": np.arange(3.0)}, 1)
        """)
        subprocess.run([sys.executable, "-c", first, str(disk)], env=jobs.environment(), check=True, timeout=90)
        script = tmp_path / "failing.py"
        script.write_text(FAILING)
        done = jobs.mpirun(2, [str(script), str(disk)], env={"JAXDIST_COMMUNICATOR": "mpi"}, timeout=120)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 0, done.output
    for rank in range(2):
        assert re.search(rf"TOLD rank {rank}: .*2 was not written.*No space left", done.stdout), done.output
        assert f"LAST {rank} 1 [0.0, 1.0, 2.0]" in done.stdout
    assert "Event loop" not in done.output
    assert "Traceback" not in done.output


SLOW = """
import sys, time
import jaxdist, numpy as np
from jaxdist.checkpoint import writing
ctx = jaxdist.init()

def slow(*args):
    time.sleep(5 if ctx.rank == int(sys.argv[2]) else 0)
    return write(*args)

def full(*args):
    raise OSError(28, "No space left on device")

write, writing._write = writing._write, slow
state = {"whole": np.ones(3), "wide": jaxdist.shard(np.ones(64))}
jaxdist.save(sys.argv[1], state, 1, wait=sys.argv[3] == "wait").wait()
print("LATEST", jaxdist.latest_step(sys.argv[1]), flush=True)
if ctx.rank == int(sys.argv[2]):
    writing._write = full
jaxdist.save(sys.argv[1], state, 2, wait=False)
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("communicator", "rank", "wait"), [("mpi", 0, "wait"), ("xla", 1, "in the background")])
def test_a_slow_write_is_waited_for_and_a_failed_last_one_told(
    communicator: str, rank: int, wait: str, tmp_path: Path
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    env = {"JAXDIST_COMMUNICATOR": communicator, "JAXDIST_TIMEOUT": "2"}
    done = jobs.mpirun(2, [str(script), str(tmp_path / "run"), str(rank), wait], env=env, timeout=90)
    assert done.stdout.count("LATEST 1") == 2, done.output
    assert f"has waited for 2 s for rank {rank} " in done.stderr
    assert done.returncode == 1
    assert re.search(
        rf"its last save had failed: checkpoint .*2 was not written .*, on rank {rank}: .*No space", done.stderr
    )
    assert "Traceback" not in done.stderr
    assert steps_in(tmp_path / "run") == ["1"]


@pytest.mark.mpi
def test_damage_is_told_on_every_rank_or_passed_over(tmp_path: Path) -> None:
    """Shards of 2 ranks, restored by 3, of which each reads a part of what was damaged."""
    script = tmp_path / "damaged.py"
    script.write_text(DAMAGED)
    path = str(tmp_path / "run")
    saved = jobs.mpirun(2, [str(script), path, "save"], timeout=90)
    assert saved.returncode == 0, saved.output
    file = max((tmp_path / "run" / "20").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    told = jobs.mpirun(3, [str(script), path, "restore"], timeout=90)
    assert told.stdout.count("TOLD leaf w of checkpoint") == 3, told.output
    assert told.stdout.count(str(file)) == 3
    went_on = jobs.mpirun(3, [str(script), path, "restore"], {"JAXDIST_RESTARTS": "1"}, timeout=90)
    assert went_on.stdout.count("GOT 10 True") == 3, went_on.output
    assert went_on.stderr.count("step 20 is passed over, going on from step 10: leaf w of checkpoint") == 1


BAD = """
import sys
import jax, jaxdist, numpy as np
ctx = jaxdist.init()
path = sys.argv[1]

def told(what, *args, **kwargs):
    try:
        what(*args, **kwargs)
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        print(f"TOLD {type(error).__name__} {error}", flush=True)
    else:
        print("NOT TOLD", flush=True)

told(jaxdist.restore, path, {"w": 0})
told(jaxdist.save, path + str(ctx.rank), {"w": 0}, 1)
told(jaxdist.save, path, {"w": np.zeros(2 + ctx.rank)}, 1)
told(jaxdist.save, path, {"v": np.ones(3), "w": jax.device_put(np.full(3, ctx.rank), jax.local_devices()[0])}, 1)
told(jaxdist.save, path, {"w": 0 if ctx.rank == 0 else len}, 1)
told(jaxdist.save, "/proc/none", {"w": 0}, 1)
jaxdist.save(path, {"w": np.zeros(3)}, 1)
told(jaxdist.restore, path, {"w": np.zeros(3 + ctx.rank)})
told(jaxdist.save, path, {"w": np.zeros(3)}, 1)
told(jaxdist.restore, path, {"w": np.zeros(3)}, step=1 + ctx.rank)
told(jaxdist.restore, path, {"w": np.zeros(3) if ctx.rank == 0 else b""})
"""


@pytest.mark.mpi
def test_bad_calls_are_told_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(BAD)
    done = jobs.mpirun(2, [str(script), str(tmp_path / "run")], timeout=120)
    assert done.returncode == 0, done.output
    told = re.findall(r"TOLD (.*)", done.stdout)
    for pattern in (
        r"FileNotFoundError restore, on rank 0: there is no checkpoint in",
        r"CheckpointError the ranks call save with .*: the checkpoint is .*run0/1 on rank 0; .*run1/1 on",
        r"CheckpointError the ranks call save .*: leaf w is float64\[2\] on rank 0; float64\[3\] on rank 1\. Save a",
        r"CheckpointError the ranks call save .*: leaf w, which each rank has by itself, is .*Did each rank train by",
        r"TypeError save, on rank 1: leaf w can't be saved",
        r"CheckpointError save, on rank 0: can't write into /proc/none",
        r"CheckpointError restore, on rank 1: leaf w .* has shape \(3,\), in `like` \(4,\)",
        r"FileExistsError save, on rank 0: there is a checkpoint of this step",
        r"CheckpointError the ranks call restore .*: the step is 1 on rank 0; 2 on rank 1",
        r"TypeError restore, on rank 1: leaf w of `like` is nothing that a checkpoint has: bytes",
    ):
        assert sum(bool(re.match(pattern, line)) for line in told) == 2, (pattern, done.output)
    assert len(told) == 20, done.output


DIFFERENT = """
import sys
import jax, jax.numpy as jnp, jaxdist, ml_dtypes, numpy as np
ctx = jaxdist.init()
root = ctx.rank == 0  # the others have something else
long = "x" * 1000
pairs = {
    "float": (0.1, 0.2), "zero": (0.0, -0.0), "int": (1, 2), "bool": (True, False), "complex": (1j, 2j),
    "string": ("a", "b"), "long": (long + "a", long + "b"), "np.str_": (np.str_("a"), np.str_("b")),
    "np.float32": (np.float32(1), np.float32(2)), "np.bool_": (np.bool_(0), np.bool_(1)),
    "int4": (ml_dtypes.int4(1), ml_dtypes.int4(2)), "0-d": (np.array(1.0), np.array(2.0)),
    "array": (np.ones(3), np.zeros(3)), "big": (np.ones(3, ">f4"), np.zeros(3, ">f4")),
    "local": (jnp.ones(3), jnp.zeros(3)), "key": (jax.random.key(0), jax.random.key(1)),
    "type": (1, 1.0), "text": (1, "1"), "scalar": (1.0, np.float64(1)), "dtype": (np.ones(3, "f4"), np.ones(3, "f8")),
    "shape": (np.ones(3), np.ones(4)), "impl": (jax.random.key(0), jax.random.key(0, impl="rbg")),
}
for name, (first, second) in pairs.items():
    state = {"same": np.ones(3), "deep": [0.5, {name: first if ctx.rank < ctx.size - 1 else second}]}
    try:
        jaxdist.save(sys.argv[1], state, 1)
    except jaxdist.CheckpointError as error:
        print("TOLD", name, error, flush=True)
try:
    jaxdist.save(sys.argv[1], {"a": 1} if root else {"a": 1, "b": 2}, 1)
except jaxdist.CheckpointError as error:
    print("TOLD structure", error, flush=True)
same = np.full(3, np.nan), np.full(3, np.nan, ">f4" if root else "<f4"), float("nan"), long, jnp.ones(2), 2**60
for asked in ({"keep": 1 + ctx.rank}, {"overwrite": root}):
    try:
        jaxdist.save(sys.argv[1], [1], 1, **asked)
    except jaxdist.CheckpointError as error:
        print("ASKED", error, flush=True)
print("LATEST", jaxdist.latest_step(sys.argv[1]), flush=True)
jaxdist.save(sys.argv[1], same, 1)
got = jaxdist.restore(sys.argv[1], same)
print("SAME", got[1].dtype.str, got[3] == long, got[5] == 2**60, flush=True)
"""


@pytest.mark.mpi
def test_a_leaf_that_differs_on_one_rank(tmp_path: Path) -> None:
    ranks = 3
    script = tmp_path / "different.py"
    script.write_text(DIFFERENT)
    done = jobs.mpirun(ranks, [str(script), str(tmp_path / "run")], timeout=120)
    assert done.returncode == 0, done.output
    told = re.findall(r"TOLD (\S+) (.*)", done.stdout)
    first, last = ", ".join(map(str, range(ranks - 1))), ranks - 1
    names = [name for name, _ in told]
    assert len(set(names)) == 23, done.output
    for name, error in told:
        assert names.count(name) == ranks, done.output
        leaf = "b" if name == "structure" else rf"deep\.1\.{re.escape(name)}"
        of = "0" if name == "structure" else first
        other = rf"(, which each rank has by itself,)? is \S.* on rank {of}; \S.* on rank .*{last}\. "
        assert re.match(rf"the ranks call save with different arguments: leaf {leaf}{other}", error), (name, error)
        assert len(error) < 700
    assert done.stdout.count("LATEST None") == ranks
    for name in ("keep", "overwrite"):
        assert done.stdout.count(f"ASKED the ranks call save with different arguments: {name} is ") == ranks, (
            done.output
        )
    assert all(f"SAME {order}f4 True True" in done.stdout for order in "<>"), done.output
