"""`jaxdist.zero` between processes: some optimizers of the catalog on 2 and 3 ranks, over both communicators.

One step trains them all, each at a level of its own: another one in each job. With JAXDIST_FULL set, the whole catalog.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import jax
import jobs
import optimizers
import pytest

pytestmark = pytest.mark.slow  # together

SCRIPT = str(Path(__file__).with_name("run_zero_optimizers.py"))
SOME = ["chain", "lamb", "adafactor", "muon", "galore", "apply_if_finite"]  # the last one sees a NaN of the last rank
ALL = list(optimizers.ENTRIES)
GROUPS = [ALL[i::12] for i in range(12)] if "JAXDIST_FULL" in os.environ else [SOME]


@pytest.fixture(scope="session", params=GROUPS, ids=lambda names: names[0])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """Parameters and state of each optimizer on one device, in a file; how many optimizers."""
    names = request.param
    out = jax.device_get(optimizers.run_plain(names))
    path = tmp_path_factory.mktemp("zero") / "expected.pickle"
    path.write_bytes(pickle.dumps({name: out[2 * i : 2 * i + 2] for i, name in enumerate(names)}))
    return str(path), len(names)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "communicator", "shift", "within"),
    [
        (2, "xla", 0, ""),
        (2, "mpi", 1, ""),
        (3, "xla", 2, ""),
        (3, "mpi", 0, ""),
        (4, "xla", 1, "2"),
        (4, "mpi", 2, "2"),
    ],
)
def test_as_on_one_device(ranks: int, communicator: str, shift: int, within: str, expected: tuple[str, int]) -> None:
    path, count = expected
    result = jobs.mpirun(ranks, [SCRIPT, communicator, path, str(shift), *([within] if within else [])], timeout=300)
    assert result.returncode == 0, result.output
    found = re.search(r"^.*REPORT (.*)$", result.stdout, re.MULTILINE)
    assert found, result.output
    report = json.loads(found[1])
    assert (report["communicator"], report["size"], len(report["gaps"])) == (communicator, ranks, count + bool(within))
    assert {name: gap for name, gap in report["gaps"].items() if gap > 1e-10} == {}
