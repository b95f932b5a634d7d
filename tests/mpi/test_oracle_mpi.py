"""The one promise, between processes: cases of `oracle` and idioms on 2 and 3 ranks, over both communicators.

Each case in one of the four jobs, and a dozen idioms in each; with JAXDIST_FULL set, all in all.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import jobs
import oracle
import pytest
import quick

pytestmark = pytest.mark.slow  # together

ROWS, STEPS = 24, 2  # as in run_oracle.py
SCRIPT = str(Path(__file__).with_name("run_oracle.py"))
EVERYTHING = "JAXDIST_FULL" in os.environ
IDIOMS = [
    "infonce", "cnn_batchnorm", "mixup_permutation", "private_map", "moe_expert_choice", "topk_hard_mining",
    "gradient_accumulation", "moco_queue", "flax_batchnorm_dropout", "spearman_double_argsort",
    "transformer_scanned",
    "aux_in_order",
]  # fmt: skip
"""Between them they gather, exchange, permute, sort, scatter, carry and draw."""
SMALL = ["ppo_shuffled_minibatches", "gan_concatenated", "quantile_clipping"]
"""What every rank computes whole, in place of messages."""


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device computes in each case, in a file: the ranks need not compute it again."""
    path = tmp_path_factory.mktemp("oracle") / "expected.pickle"
    with quick.compilation():
        found = {name: oracle.expected(name) for name in oracle.CASES}
        for name in [*IDIOMS, *SMALL]:
            found[name] = oracle.leaves(oracle.run_plain(oracle.idiom(name, ROWS), STEPS, ROWS))
    path.write_bytes(pickle.dumps(found))
    return str(path)


def check(report: dict[str, float], names: list[str], idioms: list[str]) -> None:
    in_shards = {f"{name} at level {level}" for name, level in oracle.IN_SHARDS.items() if name in names}
    assert set(report) == {*names, *in_shards, *idioms}
    tolerance = lambda name: 1e-10 if name in idioms else oracle.case(name.split(" at ")[0]).tolerance
    assert {name: gap for name, gap in report.items() if gap > tolerance(name)} == {}


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_n_processes_compute_what_one_would(ranks: int, communicator: str, expected: str) -> None:
    turn = 2 * (ranks - 2) + (communicator == "mpi")
    names = list(oracle.CASES) if EVERYTHING else list(oracle.CASES)[turn::4]
    idioms = [f"{name}:{(i + turn) % 4}" for i, name in enumerate(IDIOMS)]
    small = [f"{name}:{(i + turn) % 4}" for i, name in enumerate(SMALL)]
    words = [",".join(each) for each in (names, idioms, small)]
    result = jobs.mpirun(ranks, [SCRIPT, communicator, expected, *words], timeout=540)
    assert result.returncode == 0, result.output
    found = re.search(r"^.*REPORT (.*)$", result.stdout, re.MULTILINE)
    assert found, result.output
    report = json.loads(found[1])
    assert (report["communicator"], report["size"]) == (communicator, ranks)
    check(report["gaps"], names, [*idioms, *small])
