"""Lanes: the bits of what steps return do not depend on the number of processes that hold them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import jobs

from jaxdist.runtime import in_lanes

pytestmark = pytest.mark.slow  # together

EVERYTHING = "JAXDIST_FULL" in os.environ
LANES, ROWS, STEPS = (8, 24, 200) if EVERYTHING else (4, 24, 3)
WORDS = ["wide:0", "wide:3", "wide:1:2:inner", "cnn_batchnorm:1", "transformer_scanned:3", "infonce:0", "gru_lengths:1",
         "lstm:0", "microbatches:0", "matrices:1", "padded:3", "whole:0", "microbatches:3:2:outer"]  # fmt: skip
"""An MLP of products that Eigen may divide among threads, also on a mesh with a model axis; BatchNorm, dropout in a
scan, a contrastive loss, recurrent nets, accumulation, Muon by owners, an uneven tail of the loader, a step of the
whole batch alone, parts that several ranks pass."""
NETS = list(dict.fromkeys(word.split(":")[0] for word in WORDS))
if EVERYTHING:
    WORDS += [word for net in NETS for level in (0, 1, 3) if (word := f"{net}:{level}") not in WORDS]


def bits(ranks: int, folder: Path) -> dict[str, str]:
    (folder := folder / str(ranks)).mkdir()
    word = f"lanes:bits{json.dumps([WORDS, ROWS, STEPS])}"
    env = {"JAXDIST_LANES": str(LANES)}
    job = jobs.start_env(ranks, [jobs.RUNNER, "auto", str(folder), word], env)
    for result in job.finish(3600 if EVERYTHING else 300):
        assert result.returncode == 0, result.output
    found = [json.loads((folder / f"rank{rank}.json").read_text())[1] for rank in range(ranks)]
    assert all(one == found[0] for one in found)
    return found[0]


def test_the_same_bits_on_any_number_of_processes(tmp_path: Path) -> None:
    alone = bits(1, tmp_path)
    assert len(set(alone.values())) >= len(NETS)  # of one problem at several levels they may be the same
    for ranks in (2, 3, 4, 8) if EVERYTHING else (3,):  # 3 hold 2, 1 and 1
        assert bits(ranks, tmp_path) == alone


REFUSED = """
import sys
import jaxdist

lanes = [None, *map(int, sys.argv[2:])]
rank = int(__import__("os").environ.get("RANK", "0"))
jaxdist.init(communicator=sys.argv[1], lanes=lanes[min(rank + 1, len(lanes) - 1)])
"""


@pytest.mark.parametrize(
    ("args", "env", "ranks", "said"),
    [
        (["xla", "1"], {}, 2, "2 processes for lanes=1, and a lane is not divided: start at most 1"),
        (["xla", "4", "2"], {}, 2, r"lanes=4 on rank 0 .* and lanes=2 on rank 1 .*: give the same number"),
        (["mpi", "4"], {}, 1, "communicator 'mpi' adds up in MPI's order.*use communicator 'xla'"),
        (["mpi", "4"], {}, 2, "communicator 'mpi' adds up in MPI's order.*use communicator 'xla'"),
        (["xla"], {"JAXDIST_LANES": "many"}, 1, "JAXDIST_LANES='many': expected a positive number of lanes"),
        (["xla", "1025"], {}, 1, "lanes=1025: expected a positive number of lanes, such as 8, and at most 1024"),
    ],
)
def test_lanes_that_cannot_be(args: list[str], env: dict[str, str], ranks: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    job = jobs.start_env(ranks, [str(script), *args], env)
    for result in job.finish(60):
        assert result.returncode != 0
        assert re.search(said, result.stderr), result.output


def test_more_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 256 lanes, each connected with 255 others."""
    control: Any = SimpleNamespace(rank=1, size=2)
    monkeypatch.setattr(in_lanes.resource, "getrlimit", lambda _: (20000, 20000))
    with pytest.raises(ValueError, match=r"rank 1: lanes=256: gloo connects .* 32640 .* may open 20000 files"):
        in_lanes.check(control, [256, 256], "cpu", "auto")
    in_lanes.check(control, [128, 128], "cpu", "auto")


def test_any_integer_is_a_number_of_lanes() -> None:
    assert (in_lanes.asked(np.int64(4)), in_lanes.asked(None)) == (4, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lanes=True: expected a positive number"):
        in_lanes.asked(True)
