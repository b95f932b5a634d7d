"""What two ranks say of themselves, on both communicators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import jobs

from jaxdist.observe.metrics import read_metrics
from jaxdist.observe.profile import share

pytestmark = pytest.mark.slow  # together


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_two_ranks_look_at_themselves(communicator: str, tmp_path: Path) -> None:
    # What travels may not depend on how busy the machine was when it was measured.
    env = {"JAXDIST_LOG": "comm", "JAXDIST_TIMEOUT": "60", "JAXDIST_MACHINE": "cpu"}
    result, _ = jobs.cases(2, communicator, tmp_path, f'seeing:main["{tmp_path}"]', env=env, timeout=110)

    # Nothing waited for the second step, and all is in the file: the root's alone.
    assert re.findall(r"WRITTEN (\d)", result.stdout) == ["1"], result.output
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert len(set(re.findall(r"REFUSED \w+ on rank \d", result.stdout))) == 4, result.output

    # One bucket: two gradients and the loss, 64 * 64 + 64 * 8 + 1 floats; each of two devices sends as much.
    said = [line for line in result.stderr.splitlines() if "[jaxdist comm]" in line]
    rows = [line.split()[2:] for line in said if "all-reduce" in line]
    assert rows == [["all-reduce", "1", "float32", "4609", "18436", "3", "2", "1", "18436"]]
    calls = [line for line in said if re.search(r"'step', call \d: 1 collectives, 18436 bytes sent", line)]
    assert len(calls) == 4, result.stderr
    assert any("allreduce(op='sum') of float32[10]: 40 bytes, 40 sent" in line for line in said), result.stderr

    # The profile has one reduction for each of its two steps, on every rank.
    for rank in (0, 1):
        (trace,) = (tmp_path / "trace" / f"rank{rank}").glob("plugins/profile/*/*.xplane.pb")
        assert list(trace.parent.glob("perfetto_trace.json.gz"))
        found = share(trace)
        assert found.kinds == {"all_reduce": 2}
        assert 0 < found.collectives < found.busy
    (line,) = (line for line in result.stderr.splitlines() if "of the devices' busy time is in collectives" in line)
    assert "on 2 rank(s)" in line
