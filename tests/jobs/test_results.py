"""The one promise, between processes: what one device computes, over both wires, on 2, 3 and 4 ranks.

A case runs in some of the jobs, so that each kind of it occurs over both wires and by all numbers of ranks that it has;
with JAXDIST_FULL set, in all of them.
"""

import json
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from catalogue import optimizers
from harness import jobs, oracle, quick
from harness.check import on_host

FULL = "JAXDIST_FULL" in os.environ
ROWS, STEPS = 24, 2  # as in scripts/one_device.py
IDIOMS = [
    "infonce", "cnn_batchnorm", "mixup_permutation", "private_map", "moe_expert_choice", "topk_hard_mining",
    "gradient_accumulation", "moco_queue", "flax_batchnorm_dropout", "spearman_double_argsort", "transformer_scanned",
    "aux_in_order",
]  # fmt: skip
"""Between them they gather, exchange, permute, sort, scatter, carry and draw."""
SMALL = ["ppo_shuffled_minibatches", "gan_concatenated", "quantile_clipping"]
"""Whose messages cost more than to compute them whole."""
ON_MESHES = [name for name in IDIOMS if name not in ("mixup_permutation", "private_map", "moco_queue", "aux_in_order")]
OPTIMIZERS = list(optimizers.ENTRIES) if FULL else ["chain", "lamb", "adafactor", "muon", "galore", "apply_if_finite"]
SOME = OPTIMIZERS[1::2] if FULL else ["lamb", "muon"]
CASES = list(oracle.CASES)
APART = {"JAXDIST_MACHINE": "cpu,latency=0,stall=4e-5"}  # where no step is computed whole for its messages


class Job(NamedTuple):
    """Ranks that run cases one after the other."""

    ranks: int
    how: str
    wire: str
    env: dict[str, str] = APART


JOBS = {
    "2 by run": Job(2, "run", "xla"),
    "2 by mpirun": Job(2, "mpirun", "mpi"),
    "2 by hand": Job(2, "hand", "xla", {"JAXDIST_MACHINE": "cpu"}),
    "3 by mpirun": Job(3, "mpirun", "mpi"),
    "4 by hand": Job(4, "hand", "xla"),
    "4 by mpirun": Job(4, "mpirun", "mpi", {"JAXDIST_MACHINE": "cpu"}),
    "2 with 2_devices": Job(2, "hand", "xla", {"JAXDIST_DEVICES": "2", **APART}),
    "3 with 2_devices": Job(3, "run", "xla", {"JAXDIST_DEVICES": "2", **APART}),
    "2 with 3_devices": Job(2, "hand", "xla", {"JAXDIST_DEVICES": "3", **APART}),
}


class Row(NamedTuple):
    """Words for the runner, in which ``FOLDER`` and ``EXPECTED`` are replaced; jobs of the quick tests, and others."""

    words: list[str]
    quick: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()


def word(name: str, *arguments: Any) -> str:
    return name + (json.dumps(arguments) if arguments else "")


def dealt(names: list[str], turn: int, of: int, levels: bool = True) -> list[str]:
    """Every so many of the names, or all, each at one of the four levels."""
    chosen = [(i, name) for i, name in enumerate(names) if FULL or i % of == turn % of]
    return [f"{name}:{(i // of + turn) % 4}" if levels else name for i, name in chosen]


RUN, MPIRUN, HAND, THREE, FOUR, FOUR_MPI, PAIRS, THREE_PAIRS, TRIPLES = JOBS
TWO, ALL = (RUN, MPIRUN), tuple(JOBS)
IDIOM_JOBS = {RUN: (IDIOMS, {}), MPIRUN: (IDIOMS, {}), HAND: (SMALL, {}), THREE: (IDIOMS + SMALL, {}),
              THREE_PAIRS: (IDIOMS + SMALL, {}), TRIPLES: (IDIOMS, {})}  # fmt: skip
MESHES: dict[str, list[dict[str, int]]] = {
    RUN: [{"sequence": 2}, {"model": 2, "data": 1}],
    FOUR: [{"data": 2, "model": 2}, {"data": 2, "sequence": 2}],
    FOUR_MPI: [{"model": 2, "data": 2}, {"model": 2, "sequence": 2}],
    PAIRS: [{"data": 2, "model": 2}, {"model": 2, "data": 2}, {"sequence": 4, "data": 1}],
    TRIPLES: [
        {"data": 2, "model": 3},
        {"model": 3, "data": 2},
        {"model": 2, "data": 3},
    ],  # inside processes, and across
    THREE_PAIRS: [{"data": 3, "model": 2}, {"model": 3, "data": 2}],
}
ROWS_OF: list[Row] = [
    # What every rank compares by itself.
    Row(["collectives:numbers"], TWO, (FOUR, FOUR_MPI)),
    Row(["collectives:details"], TWO, (THREE, PAIRS)),
    Row([word("collectives:moves", "float32", "complex64")], TWO),
    Row([word("collectives:reductions", 17)], (MPIRUN,)),
    Row([word("collectives:reductions", 16)], (), (MPIRUN,)),
    Row(["collectives:guarded"], (RUN,), (MPIRUN, PAIRS)),
    Row(["collectives:refused"], (RUN,), (MPIRUN,)),
    Row([word("collectives:random_calls", 8)], (MPIRUN,), ()),
    Row([word("collectives:random_calls", 10)], (), (THREE, FOUR)),
    Row([word("collectives:large", 4, 4.0)], (MPIRUN,), ()),
    Row([word("collectives:large", 50 if FULL else 10, 35.0)], (), (HAND, MPIRUN)),
    Row([word("collectives:of_jax", True)], (MPIRUN,), ()),
    Row(["collectives:of_jax"], (), (HAND,)),
    Row([word("collectives:of_jaxdist", 1)], (), (RUN, THREE)),
    Row(["collectives:of_every_dtype"], (MPIRUN,), (RUN,)),
    Row(["collectives:nan_in_a_step"], (MPIRUN,), (RUN,)),
    Row([word("collectives:away", "FOLDER")], (), (MPIRUN,)),
    Row(["collectives:too_long"], (), (MPIRUN,)),
    Row(["collectives:threads"], (MPIRUN,), (HAND,)),
    Row([word("calls:steps", 0, 3)], (), (RUN,)),
    Row([word("calls:steps", 1, 3)], (MPIRUN,), (PAIRS, TRIPLES)),
    Row([word("calls:steps", 2, 3)], (), (HAND, PAIRS)),
    Row(["calls:verified"], (RUN, MPIRUN), (THREE, PAIRS)),
    Row(["calls:refused"], (RUN,), (MPIRUN,)),
    Row(["calls:said"], (RUN,), (THREE, PAIRS)),
    Row(["state:compared"], (RUN, PAIRS), (FOUR,)),
    Row(["state:checked_in_steps"], (), (RUN, THREE, PAIRS)),
    Row([word("state:differs", "FOLDER")], (), (RUN, MPIRUN, PAIRS)),
    Row(["rows:steps", "rows:known"], (MPIRUN,), (THREE, RUN)),
    Row(["rows:steps"], (), (PAIRS,)),
    Row(["rows:loaders"], (), (PAIRS, TRIPLES)),
    Row(["rows:loaders", "rows:refused"], (RUN,), (FOUR_MPI,)),
    Row(["context:fields"], (*TWO, PAIRS), (FOUR, THREE_PAIRS)),
    Row(["context:sockets"], (RUN,), (FOUR,)),
    Row(["context:as_after_jax_initialize"], (RUN,), (MPIRUN, FOUR, TRIPLES)),
    Row(["calls:known", "calls:stages"], (RUN,), (MPIRUN, FOUR)),
    Row(["context:broadcasts"], (), (MPIRUN, HAND)),
    Row(["records:evaluations"], (MPIRUN,), (HAND, THREE_PAIRS)),
    Row([word("records:seen", "FOLDER")], (), (RUN, MPIRUN)),
    # How far it is from one device.
    *(Row([word("one_device:idioms", "EXPECTED", dealt(names, i, 5))], (), (job,))
      for i, (job, (names, _)) in enumerate(IDIOM_JOBS.items())),
    Row([word("one_device:idioms", "EXPECTED", ["cnn_batchnorm:3", "infonce:1"])], (RUN, PAIRS)),
    Row([word("one_device:idioms", "EXPECTED", ["topk_hard_mining:2", "moe_expert_choice:0"])], (), (MPIRUN,)),
    *(Row([word("one_device:idioms", "EXPECTED", dealt(ON_MESHES, i + k, 8), mesh)], (), (job,))
      for i, (job, meshes) in enumerate(MESHES.items()) for k, mesh in enumerate(meshes)),
    *(Row([word("one_device:around", "FOLDER", MESHES[job][0])], (), (job,)) for job in (RUN, FOUR_MPI, PAIRS)),
    *(Row([word("one_device:cases", "EXPECTED", dealt(CASES, i, 3, levels=False))], (), (job,))
      for i, job in enumerate((RUN, THREE, FOUR_MPI, THREE_PAIRS))),
    Row([word("one_device:cases", "EXPECTED", ["clip_adamw"])], (RUN,)),
    Row([word("one_device:optimizers_in_shards", "EXPECTED", ["chain", "muon"], 1, None)], (), (RUN,)),
    Row([word("one_device:optimizers_in_shards", "EXPECTED", OPTIMIZERS[::2], 0, None)], (), (MPIRUN,)),
    Row([word("one_device:optimizers_in_shards", "EXPECTED", SOME, 2, 2)], (), (FOUR, PAIRS, THREE_PAIRS)),
    Row([word("one_device:between_axes", "EXPECTED", ["clip_adamw"])], (), (FOUR, FOUR_MPI)),
    Row(["one_device:chosen"], (), (HAND, FOUR_MPI, TRIPLES)),
    Row(["one_device:places"], (), (FOUR, FOUR_MPI)),
]  # fmt: skip


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one device computes in each case that words name, in a file: the ranks need not compute it again."""
    known: dict[str, Any] = {}

    def named(text: str) -> str:
        with quick.compilation():
            for name in CASES + IDIOMS + SMALL:
                if f'"{name}' in text and name not in known:
                    one = oracle.idiom(name, ROWS) if name in IDIOMS + SMALL else oracle.case(name)
                    rows = (STEPS, ROWS) if name in IDIOMS + SMALL else ()
                    known[name] = on_host(oracle.run_plain(one, *rows))
            if "optimizers_in_shards" in text:
                known["few_examples"] = oracle.expected("few_examples")
                chosen = [name for name in OPTIMIZERS if f'"{name}' in text]
                out = jax.device_get(optimizers.run_plain(chosen))
                known["optimizers"] = {name: out[2 * i : 2 * i + 2] for i, name in enumerate(chosen)}
        path = tmp_path_factory.mktemp("expected") / "expected.pickle"
        path.write_bytes(pickle.dumps(known))
        return str(path)

    return named


def speeds(name: str) -> Any:
    marks = [pytest.mark.mpi] if JOBS[name].how == "mpirun" else []
    if any(name in row.quick for row in ROWS_OF):
        yield pytest.param(name, True, marks=marks, id=f"{name}, quick")
    yield pytest.param(name, False, marks=[*marks, pytest.mark.slow], id=name)


@pytest.mark.parametrize(("name", "fast"), [each for name in JOBS for each in speeds(name)])
def test_several_processes_compute_what_one_device_does(name: str, fast: bool, expected: Any, tmp_path: Path) -> None:
    ranks, how, wire, env = JOBS[name]
    rows = [row for row in ROWS_OF if name in (row.quick if fast else row.slow)]
    text = "\n".join(one for row in rows for one in row.words).replace("FOLDER", str(tmp_path))
    words = text.replace("EXPECTED", expected(text)).splitlines()
    done, found = jobs.cases(ranks, wire, tmp_path, *words, env={"JAXDIST_TIMEOUT": "60", **env}, how=how)
    assert name != PAIRS or "peer ranks" not in done.output, "gloo's own lines"
    for one, of_ranks in found.items():
        gaps = [gap for gaps in of_ranks if one.startswith("one_device") for gap in gaps.items()]
        assert bool(gaps) == one.startswith("one_device"), one
        assert {name: gap for name, gap in gaps if not gap <= 1e-10} == {}, one
        if one == "context:fields":
            assert of_ranks == [[rank, rank, ranks, True] for rank in range(ranks)]
        if one == "records:evaluations":
            assert of_ranks == of_ranks[:1] * ranks
        if one.startswith("records:seen"):  # by the root
            assert [done.stderr.count(said) for said in ("step 0/5", "step 4/5", "1 damaged line")] == [1, 1, 1]


# --- lanes: the bits do not depend on the number of processes

LANES = 4
QUICK_BITS = ["whole:0", "groups:0"]
BITS = ["wide:3", "wide:1:2:inner", "cnn_batchnorm:1", "transformer_scanned:3", "matrices:1",
        "padded:3", "microbatches:3:2:outer"]  # fmt: skip
"""An MLP of products that Eigen may divide among threads, also on a mesh with a model axis; BatchNorm, dropout in a
scan, Muon by owners, an uneven tail of the loader, accumulation with parts that several ranks pass."""


@pytest.mark.parametrize(
    ("words", "steps", "sizes"),
    [
        pytest.param(QUICK_BITS, 2, (1, 2), id="quick"),
        pytest.param(BITS, 200 if FULL else 3, (1, 2, 4) if FULL else (1, 4), marks=pytest.mark.slow, id="all"),
    ],
)
def test_in_lanes_the_bits_are_those_of_one_process(
    words: list[str], steps: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    found = []
    for ranks in sizes:
        (folder := tmp_path / str(ranks)).mkdir()
        asked = word("lanes:bits", words, ROWS, steps)
        between = ["collectives:details", "collectives:of_every_dtype"] if words == QUICK_BITS and ranks > 1 else []
        _, bits = jobs.cases(ranks, "auto", folder, asked, *between, env={"JAXDIST_LANES": str(LANES)}, how="hand")
        found += bits[asked]
    assert found == found[:1] * sum(sizes)
    names = {one.split(":")[0] for one in words}
    assert len(set(found[0].values())) >= len(names)  # of one problem at several levels they may be the same
