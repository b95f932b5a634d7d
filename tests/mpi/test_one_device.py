"""The one promise, between processes: what one device computes, on 2, 3 and 4 ranks, over both communicators.

Each kind of case in some of the jobs, so that it occurs with both communicators and all numbers of ranks that it has;
with JAXDIST_FULL set, in all of them.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from catalogue import optimizers
from harness import jobs, oracle, quick

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
    2: [{"sequence": 2}, {"model": 2, "data": 1}],
    4: [{"data": 2, "model": 2}, {"model": 2, "data": 2}, {"data": 2, "sequence": 2}, {"model": 2, "sequence": 2}],
}
OPTIMIZERS = list(optimizers.ENTRIES) if EVERYTHING else [
    "chain", "lamb", "adafactor", "muon", "galore", "apply_if_finite",
]  # fmt: skip
"""The last one sees a NaN of the last rank."""
CASES = [name for name in oracle.CASES if EVERYTHING or name not in OPTIMIZERS]


KINDS: dict[int, list[str]] = {
    2: ["cases", "idioms", "mesh", "zero", "offload", "choice"],
    3: ["cases", "idioms", "zero", "offload"],
    4: ["places", "mesh", "zero", "choice"],
}
JOBS = {(2, "xla"): KINDS[2], (3, "mpi"): KINDS[3], (4, "xla"): ["places", "mesh", "zero"],
        (4, "mpi"): ["places", "mesh", "choice"]}  # fmt: skip
if EVERYTHING:
    JOBS = {(ranks, wire): kinds for ranks, kinds in KINDS.items() for wire in ("xla", "mpi")}


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device computes in each case, in a file: the ranks need not compute it again."""
    path = tmp_path_factory.mktemp("one_device") / "expected.pickle"
    with quick.compilation():
        found: dict[str, Any] = {name: oracle.expected(name) for name in CASES}
        for name in [*IDIOMS, *SMALL]:
            found[name] = oracle.leaves(oracle.run_plain(oracle.idiom(name, ROWS), STEPS, ROWS))
        out = jax.device_get(optimizers.run_plain(OPTIMIZERS))
    found["optimizers"] = {name: out[2 * i : 2 * i + 2] for i, name in enumerate(OPTIMIZERS)}
    path.write_bytes(pickle.dumps(found))
    return str(path)


def levels(names: Sequence[str], turn: int) -> list[str]:
    """Every second of the idioms, or all, each at one of the four levels."""
    return [f"{name}:{(i // 2 + turn) % 4}" for i, name in enumerate(names) if EVERYTHING or i % 2 == turn % 2]


def words(kind: str, ranks: int, mpi: bool, expected: str, folder: str) -> list[str]:
    """A kind of case for the runner."""
    if kind == "cases":
        calls = [[expected, CASES if EVERYTHING else CASES[mpi::2]]]
    elif kind == "idioms":
        calls = [[expected, levels(names, mpi), names is SMALL] for names in (IDIOMS, SMALL)]
    elif kind == "mesh":
        meshes = MESHES[ranks] if ranks == 2 or EVERYTHING else MESHES[ranks][mpi::2]
        names = levels(ON_MESHES, ranks // 2 + mpi)
        calls = [[expected, folder, mesh, names[k :: len(meshes)]] for k, mesh in enumerate(meshes)]
    elif kind == "zero":
        calls = [[expected, OPTIMIZERS, ranks + mpi, 2 if ranks == 4 else None]]
    elif kind == "offload":
        calls = [[f"{folder}/run"]]
    else:
        return [f"{kind}:main"]
    return [f"one_device:{kind}{json.dumps(arguments)}" for arguments in calls]


@pytest.mark.parametrize(("ranks", "communicator"), JOBS)
def test_n_processes_compute_what_one_would(ranks: int, communicator: str, expected: str, tmp_path: Path) -> None:
    kinds = JOBS[ranks, communicator]
    asked = [word for kind in kinds for word in words(kind, ranks, communicator == "mpi", expected, str(tmp_path))]
    # What is chosen may not depend on how busy the machine is.
    result, found = jobs.cases(ranks, communicator, tmp_path, *asked, env={"JAXDIST_MACHINE": "cpu"})
    for word, of_ranks in found.items():
        # In parts of the tolerance of a case; of all else it is 1e-10.
        limit = 1.0 if word.startswith("one_device:cases") else 1e-10
        for gaps in of_ranks:
            assert gaps, word
            assert {name: gap for name, gap in gaps.items() if not gap <= limit} == {}
    assert "Gloo" not in result.stdout.partition("PLACES ARE THROUGH")[0]
    if ranks == 4:  # by each rank without jaxdist, and once a call
        assert result.stdout.count("PRINTED") == 4 + 6, result.output
