"""`evaluate` and the sinks of `run_log` on three ranks, over both communicators."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import jobs

from jaxdist.observe.metrics import read_metrics

pytestmark = pytest.mark.slow  # together


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_three_ranks_evaluate_and_log(communicator: str, tmp_path: Path) -> None:
    words = ["everyday:evaluations", f'everyday:sinks["{tmp_path}"]']
    result, found = jobs.cases(3, communicator, tmp_path, *words, env={"JAXDIST_TIMEOUT": "60"}, timeout=150)
    ranks = found[words[0]]
    assert ranks[0] == ranks[1] == ranks[2], "the same on every rank, to the bit"
    mean, local, each, none = ranks[0]["refused"]
    assert "ValueError: evaluate: result of the step is no sum over the examples with a weight" in mean
    assert "is of this rank's examples alone, and there are 3 ranks: decorate the step" in local
    assert "has shape (6, 3) and is split over the devices: an entry an example" in each
    assert "there is no batch, on any rank" in none
    assert ranks[0]["dropped"] == 45
    assert "evaluate: with tail='drop' the loader leaves out 8 of 53 examples, as 3 parts take 5 each" in result.stderr

    # All is in the file, and in the sink that works; no other rank opened one.
    assert [line["loss"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    good = ["open", "0 0.0", "1 1.0", "2 2.0", "3 3.0", "close False"]
    good += ["open", "drop 2", "2 2.0", "3 3.0", "4 4.0", "close False"]
    assert (tmp_path / "good0").read_text().splitlines() == good
    assert (tmp_path / "fails0").read_text().splitlines() == ["open", "0 0.0"]
    assert (tmp_path / "other0").read_text().splitlines() == ["open", "close True"]
    assert list(tmp_path.glob("*[a-z][12]")) == []
    said = "Recording failed at step 1: ConnectionError: the server is gone. It gets no more metrics; metrics.jsonl has"
    assert said in result.stderr
    assert "Recording is still at work 1 s after the end of the run" in result.stderr
    refused = {text for (text,) in found[words[1]]}
    assert all("Recording can't be opened: ConnectionError: no such server" in text for text in refused)
    assert {text.partition(":")[0] for text in refused} == {"RuntimeError"}
