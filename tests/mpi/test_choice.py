"""`parallel(mesh="auto")` between processes: each passes rows of its own, and all choose the same."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.mpi]  # together


@pytest.mark.parametrize(("communicator", "ranks"), [("xla", 2), ("mpi", 2), ("xla", 4)])
def test_ranks_choose_the_same(communicator: str, ranks: int, tmp_path: Path) -> None:
    machine = {"JAXDIST_MACHINE": "cpu"}  # or what is the fastest would depend on how busy the machine was
    _, cases = jobs.cases(ranks, communicator, tmp_path, "choice:chosen", env=machine)
    found = cases["choice:chosen"]
    for one in found:
        assert one["small"]["mesh"] == {"data": ranks}
        assert one["wide"]["mesh"] == ({"model": ranks} if communicator == "xla" else {"data": ranks})
        assert communicator == "mpi" or "data" not in one["loader"]["mesh"]
        assert max(one[name]["gap"] for name in ("small", "wide", "loader")) < 1e-10
        assert one["loader"]["calls"] == 6, "two epochs, whose last batches are shorter"
        assert communicator == "mpi" or "on this rank" in one["failed"]
        assert "ValueError" in one["unlike"], one
    assert found[0]["wide"]["why"] == found[1]["wide"]["why"]
