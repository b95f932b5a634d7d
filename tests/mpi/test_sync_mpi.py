"""Between processes: `check_sync`, `check_every` and `check_finite` tell every rank the same, and the job goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.slow  # together

SCRIPT = str(Path(__file__).with_name("run_sync.py"))

SAID = {
    "same": r"passed",
    "bits": r"SyncError: check_sync: tree\['w'\]\[1\] \(float32\[2,3\] on \d devices\) has other bits on rank 1 "
    r"than on rank 0(, 2)?\. Something",
    "keys": r"SyncError: check_sync: tree\['key'\] \(key<fry>\[\] on 1 device\) has other bits on rank 1",
    "number": r"SyncError: check_sync: tree\['epoch'\] \(int\) has other bits on rank 1",
    "tree": r"SyncError: check_sync: tree\['extra'\] is absent on rank 0(, 2)?; float32\[2,3\] on the host on rank 1\.",
    "dtype": r"SyncError: check_sync: tree is float32\[2\] on 1 device on rank 0(, 2)?; bfloat16\[2\] on 1 device on ",
    "donated": r"SyncError: check_sync, on rank 1: check_sync: tree can't be compared: ValueError: \[0\] was donated",
    "call 1": "passed",
    "call 2": "passed",
    "call 3": r"SyncError: step 'checked', call 3: result\[0\]\['frozen'\] \(float32\[2,3\] on \d devices\) has other "
    r"bits on rank 1 than on rank 0(, 2)?\.",
    "call 6": "passed",
    "gradients": r"FloatingPointError: step 'finite', call 2: grads\['a'\] is not finite: 3 NaN on every device\.",
    "loss": r"FloatingPointError: step 'each_loss', call 1: each\['losses'\] is not finite: 1 NaN on rank 1\.",
    "kept": "passed",
    "in shards": r"FloatingPointError: step 'in_shards', call 2: result\[0\]\['a'\] is not finite: [13] NaN on "
    r"(every device|rank 0, 1)",
    "in shards, kept": "passed",
    "another call": r"ControlError: rank \d: the ranks are in different calls\. .*at 'check_sync'; rank 1 at 'barrier'",
}


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_is_told_the_same(ranks: int, communicator: str) -> None:
    result = jobs.mpirun(ranks, [SCRIPT, communicator], timeout=300)
    assert result.returncode == 0, result.output
    assert len(re.findall(r"OK \d", result.stdout)) == ranks
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for name, said in SAID.items():
        told = {line["rank"]: line["said"] for line in lines if line["case"] == name}
        assert sorted(told) == list(range(ranks)), name
        for rank, text in told.items():
            assert re.match(said, text), (name, rank, text)
