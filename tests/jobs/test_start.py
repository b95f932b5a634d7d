"""How processes come together: by whom, with what, with which streams; and what keeps a job from starting."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import jobs
from harness.errors import missing

SCRIPT = str(Path(__file__).parent / "scripts" / "starts.py")


class Start(NamedTuple):
    """A job, and what it says: to each rank started by hand, or in all."""

    call: str  # arguments of the script; ``PORT`` is replaced
    tokens: tuple[str, ...] = ()  # of the output
    fails: bool = False  # whether it does not start
    how: str = "hand"  # it is started
    ranks: int = 2  # of it
    quick: bool = False  # whether it is a quick test
    env: dict[str, str | None] = {}  # noqa: RUF012  # of the job


COUNT = "--xla_force_host_platform_device_count"
FAST, PROXY = "--xla_cpu_enable_fast_math=", "http://127.0.0.1:9"
STARTS = [
    Start("initialized PORT", (" of 2, 4 devices, mean 1.5",), quick=True, env={"XLA_FLAGS": f"{COUNT}=2"}),
    Start("initialized PORT local", ("rank ", " of 2", "local", "by itself"), True, quick=True),
    Start("late", ("rank 1", "JAX backend"), True),
    Start(f"joins {FAST}false {FAST}true", ("rank 0 (", "rank 1 (", f"{FAST}false", f"{FAST}true"), True),
    Start("joins lanes=4 lanes=2", ("lanes=4", "rank 0", "lanes=2", "rank 1"), True),
    Start("joins lanes=1 lanes=1", ("2 processes", "lanes=1"), True),
    Start("shares_some_examples", ("'data': 3", "2 processes"), True, env={"JAXDIST_LANES": "6"}),
    Start("joins communicator=mpi communicator=mpi", ("mpi", "lanes"), True, env={"JAXDIST_LANES": "4"}),
    Start("joins communicator=mpi communicator=mpi", ("communicator 'mpi'",), True),
    Start("joins communicator=mpi communicator=mpi", ("rank 0", "one device each"), True, env={"JAXDIST_DEVICES": "2"}),
    Start("joins devices=3", ("3 devices",), ranks=1, quick=True, env={"XLA_FLAGS": ""}),
    Start("joins devices=4 devices=4"),
    Start("sums_in_groups", env={"JAXDIST_DEVICES": "2", "JAXDIST_MACHINE": "cpu,latency=0,stall=4e-5"}),
    Start("joins devices=2 devices=3", ("2 on rank 0", "3 on rank 1", "--devices"), True, quick=True),
    Start(
        "joins devices=2 lanes=4", ("devices=2", "lanes=4"), True, env={"JAXDIST_LANES": "4", "JAXDIST_DEVICES": "2"}
    ),
    Start("joins lanes=4 lanes=4", ("lanes=4", "TPUs"), True, env={"JAX_PLATFORMS": "tpu"}),
    Start("joins communicator=mpi communicator=mpi", ("'mpi'", "TPUs"), True, env={"JAX_PLATFORMS": "tpu"}),
    Start("connects", ranks=3, env={"http_proxy": PROXY, "https_proxy": PROXY, "no_proxy": None}),
    Start("other_processors", ("rank 0", "rank 1", "Mine", "Yours", "max_isa"), True, quick=True),
    Start("other_processors --xla_cpu_max_isa=AVX2"),
    Start("threads 3 2"),
    Start("spawns_workers", ("data worker", "__main__"), how="hand", ranks=1),
    Start("listens", how="mpirun"),
    Start("funneled auto", ("COMMUNICATOR xla", "one thread"), how="mpirun"),
]


@pytest.mark.parametrize(
    "given",
    [pytest.param(s, marks=[pytest.mark.mpi] * (s.how == "mpirun") + [pytest.mark.slow] * (not s.quick), id=s.call)
     for s in STARTS],
)  # fmt: skip
def test_processes_come_together_or_say_why_not(given: Start) -> None:
    call = given.call.replace("PORT", str(jobs.free_port())).split()
    results = jobs.launch(given.how, given.ranks, [SCRIPT, *call], given.env).finish(90)
    for result in results:
        assert bool(result.returncode) == given.fails, result.output
        assert ("FINE" in result.stdout) != given.fails, result.output
        assert "peer ranks" not in result.stdout, "gloo's chatter, mixed between the devices of a process"
        assert missing(given.tokens, result.output) == [], result.output


@pytest.mark.slow
def test_libtpu_of_another_version(tmp_path: Path) -> None:
    about = tmp_path / "libtpu-0.0.1.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.1\n")
    command = [SCRIPT, "joins", "communicator=xla", "communicator=xla"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    for result in jobs.launch("hand", 2, command, {"JAX_PLATFORMS": "tpu", "PYTHONPATH": path}).finish(90):
        assert result.returncode != 0
        assert missing(("libtpu 0.0.1", "jaxdist[tpu]"), result.output) == [], result.output


def test_a_process_alone() -> None:
    env = jobs.environment({
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(Path(__file__).parents[1]),
    })  # fmt: skip
    command = [sys.executable, SCRIPT, "alone", str(jobs.free_port())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "FINE\n", done.stdout + done.stderr


def test_which_gpu_a_process_takes() -> None:
    from jaxdist.runtime.devices import Resources, choose_gpus  # private: there is no GPU here

    def taken(hosts: str, *seen: str, wanted: int | None = None) -> list[list[int]]:
        """Each process with its host, and the GPUs that it sees, a letter each."""
        ranks = [Resources(host, (0,), tuple(gpus), "gpu") for host, gpus in zip(hosts, seen, strict=True)]
        return [choose_gpus(ranks, rank, wanted) for rank in range(len(ranks))]

    assert taken("aabb", "xy", "xy", "xy", "xy") == [[0], [1], [0], [1]]  # mpirun
    assert taken("aa", "wxyz", "wxyz") == [[0, 1], [2, 3]]
    assert taken("aaa", "x", "y", "z") == [[0], [0], [0]]  # srun --gpus-per-task=1
    assert taken("aabb", "wx", "yz", "wx", "yz") == [[0, 1]] * 4  # --gpus-per-task=2
    assert taken("ab", "wxyz", "wxyz") == [[0, 1, 2, 3]] * 2  # a process per host
    assert taken("aa", "wxyz", "wxyz", wanted=1) == [[0], [1]]
    for hosts, seen, wanted in (("aaa", ["xy"] * 3, None), ("aa", ["xy"] * 2, 2), ("aa", ["xy", "yz"], 1)):
        with pytest.raises(ValueError, match=rf"{len(hosts)} .*\b{len(set(''.join(seen)))}\b"):
            taken(hosts, *seen, wanted=wanted)


def test_the_share_of_a_rank_of_its_hosts_cores() -> None:
    from jaxdist.runtime.devices import Resources, fair_threads  # private: there is one host here

    ranks = [Resources(host, cores, (), "cpu") for host, cores in zip("aabb", [(0, 1)] * 3 + [(2, 3)], strict=True)]
    assert [fair_threads(ranks, rank) for rank in range(4)] == [1, 1, 2, 2]
    assert fair_threads([Resources("a", (0,), (), "cpu")] * 3, 0) == 1


@pytest.mark.slow
def test_nothing_of_the_job_gets_the_number_of_a_stream_that_was_closed(tmp_path: Path) -> None:
    """When a process started: a daemon's child, `2>&-`."""
    job, port = jobs.Job(), str(jobs.free_port())
    for rank in range(2):
        there = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"] if rank else []
        job.start([*closing, sys.executable, SCRIPT, "in_a_job", str(tmp_path)], there)
    results = job.finish(90)
    assert [result.returncode for result in results] == [0, 0], [r.output for r in results]
    assert eval((tmp_path / "seen1").read_text()) == ["/dev/null"] * 3
