"""The one promise, between processes: what one device computes, on 2, 3 and 4 ranks, over both communicators.

Each case in some of the six jobs, so that all pairs of a kind of case and a communicator occur; with JAXDIST_FULL set,
in all of its kind.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jobs
import optimizers
import oracle
import pytest
import quick

pytestmark = [pytest.mark.slow, pytest.mark.mpi]  # together

ROWS, STEPS = 24, 2  # as in one_device.py
EVERYTHING = "JAXDIST_FULL" in os.environ
IDIOMS = [
    "infonce", "cnn_batchnorm", "mixup_permutation", "private_map", "moe_expert_choice", "topk_hard_mining",
    "gradient_accumulation", "moco_queue", "flax_batchnorm_dropout", "spearman_double_argsort",
    "transformer_scanned", "aux_in_order",
]  # fmt: skip
"""Between them they gather, exchange, permute, sort, scatter, carry and draw."""
SMALL = ["ppo_shuffled_minibatches", "gan_concatenated", "quantile_clipping"]
"""What every rank computes whole, in place of messages."""
ON_MESHES = [name for name in IDIOMS if name not in ("mixup_permutation", "private_map", "moco_queue", "aux_in_order")]
MESHES: dict[int, list[dict[str, int]]] = {
    2: [{"data": 1, "model": 2}, {"sequence": 2}, {"model": 2, "data": 1}],
    4: [{"data": 2, "model": 2}, {"model": 2, "data": 2}, {"data": 2, "sequence": 2}, {"model": 2, "sequence": 2}],
}
OPTIMIZERS = list(optimizers.ENTRIES) if EVERYTHING else [
    "chain", "lamb", "adafactor", "muon", "galore", "apply_if_finite",
]  # fmt: skip
"""The last one sees a NaN of the last rank."""


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device computes in each case, in a file: the ranks need not compute it again."""
    path = tmp_path_factory.mktemp("one_device") / "expected.pickle"
    with quick.compilation():
        found: dict[str, Any] = {name: oracle.expected(name) for name in oracle.CASES}
        for name in [*IDIOMS, *SMALL]:
            found[name] = oracle.leaves(oracle.run_plain(oracle.idiom(name, ROWS), STEPS, ROWS))
        out = jax.device_get(optimizers.run_plain(OPTIMIZERS))
    found["optimizers"] = {name: out[2 * i : 2 * i + 2] for i, name in enumerate(OPTIMIZERS)}
    path.write_bytes(pickle.dumps(found))
    return str(path)


def some(names: Sequence[Any], k: int, n: int) -> list[Any]:
    """The k-th of n parts of the names, or all."""
    return list(names) if EVERYTHING else list(names[k % n :: n])


def at_levels(names: Sequence[str], turn: int) -> list[str]:
    return [f"{name}:{(i + turn) % 4}" for i, name in enumerate(names)]


@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_n_processes_compute_what_one_would(ranks: int, communicator: str, expected: str, tmp_path: Path) -> None:
    mpi = communicator == "mpi"
    turn = 2 * (ranks - 2) + mpi
    asked: dict[str, int] = {}

    def ask(name: str, count: int, *arguments: Any) -> None:
        asked[f"one_device:{name}{json.dumps(arguments)}"] = count

    if ranks < 4:
        names = some(list(oracle.CASES), turn, 4)
        ask("cases", len(names) + len(oracle.IN_SHARDS.keys() & set(names)), expected, names)
        for every, whole in ((IDIOMS, False), (SMALL, True)):
            words = some(at_levels(every, turn), turn + ranks, 2)
            ask("idioms", len(words), expected, words, whole)
    if ranks in MESHES:
        meshes = some(MESHES[ranks], mpi, 2)
        words = some(at_levels(ON_MESHES, turn), turn + ranks // 2, 2)
        for k, mesh in enumerate(meshes):
            here = words[k :: len(meshes)]
            ask("mesh", len(here) + 1, expected, str(tmp_path), mesh, here)
    if EVERYTHING or (ranks, communicator) not in ((2, "xla"), (3, "mpi")):
        within = 2 if ranks == 4 else None
        ask("zero", len(OPTIMIZERS) + bool(within), expected, OPTIMIZERS, turn, within)
    _, found = jobs.cases(ranks, communicator, tmp_path, *asked)
    for word, count in asked.items():
        for gaps in found[word]:
            assert len(gaps) == count, word
            # In parts of the tolerance of a case; of all else it is 1e-10.
            limit = 1.0 if word.startswith("one_device:cases") else 1e-10
            assert {name: gap for name, gap in gaps.items() if not gap <= limit} == {}


@pytest.mark.parametrize(("ranks", "communicator"), [(2, "xla"), (3, "mpi")])
def test_state_in_the_hosts_memory(ranks: int, communicator: str, tmp_path: Path) -> None:
    """Each rank moves its own shards."""
    word = f"one_device:offload{json.dumps([str(tmp_path / 'run')])}"
    result, found = jobs.cases(ranks, communicator, tmp_path, word)
    assert "is not the same" not in result.output
    for one in found[word]:
        assert one["gap"] < 1e-10
        assert one["kinds"] == [["device"]] + [["device", "pinned_host"]] * 4


@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_places_and_ranks_that_differ(communicator: str, tmp_path: Path) -> None:
    result, _ = jobs.cases(4, communicator, tmp_path, "places:main")
    assert result.stdout.count("PRINTED") == 4 + 6, result.output  # by each rank without jaxdist, and once a call
    assert "Gloo" not in result.stdout
