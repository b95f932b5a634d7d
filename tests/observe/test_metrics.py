"""`run_log`: what is in the file, after a restart and a failure too, and that nothing waits for the device."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist.observe import display
from jaxdist.observe.metrics import FILE, _Entry, read_metrics


class NotYet:
    """A scalar that its device has not computed."""

    shape = ()

    def __init__(self, value: float):
        self.value, self.computed = value, False

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.computed

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        assert self.computed, "fetched before it was computed"
        return jnp.asarray(self.value).__array__()


def steps(path: Path) -> list[float]:
    return [line["step"] for line in read_metrics(path)]


def log_steps(path: Path, first: int, last: int, **kwargs: Any) -> None:
    with jaxdist.run_log(path, **kwargs) as log:
        for step in range(first, last):
            log(step, loss=jnp.float32(step))


def test_what_is_logged(tmp_path: Path) -> None:
    """An evaluation at the same step is a line of its own."""
    with jaxdist.run_log(tmp_path / "a" / "run", total=3, examples_per_step=64, tokens_per_step=640) as log:
        for step in range(3):
            log(step, loss=jnp.float32(step), correct=jnp.int32(step), lr=0.5)
        log(2, accuracy=0.5)
    *lines, last = read_metrics(tmp_path / "a" / "run")
    assert (last["step"], last["accuracy"], last.get("loss")) == (2, 0.5, None)
    assert [(x["step"], x["loss"], x["correct"], x["lr"]) for x in lines] == [(i, float(i), i, 0.5) for i in range(3)]
    assert "examples_per_s" not in lines[0], "the first step is compiled: it says nothing of the throughput"
    assert all(x["tokens_per_s"] == pytest.approx(10 * x["examples_per_s"], rel=1e-4) for x in lines[1:])
    assert [x["time"] for x in lines] == sorted(x["time"] for x in lines)


def test_throughput_is_that_of_the_interval(tmp_path: Path) -> None:
    """In the file; an evaluation belongs to the interval that it is in. The display has that of the last seconds."""
    with jaxdist.run_log(tmp_path, examples_per_step=6) as log:
        found = [log._throughput(step, now) for step, now in ((0, 0.0), (1, 2.0), (1, 3.0), (4, 5.0))]
    assert found == [
        ({}, {}),
        ({"examples_per_s": 3.0}, {"examples_per_s": 3.0}),
        ({}, {"examples_per_s": 2.0}),
        ({"examples_per_s": 6.0}, {"examples_per_s": 4.8}),
    ]


def test_what_is_not_computed_yet_is_held_back(tmp_path: Path) -> None:
    slow, quick = NotYet(1.0), NotYet(2.0)
    quick.computed = True
    with jaxdist.run_log(tmp_path) as log:
        log(0, loss=slow)
        log(1, loss=quick)
        assert steps(tmp_path) == [], "in order: step 1 waits for step 0"
        slow.computed = True
        log(2, loss=(never := NotYet(3.0)))
        assert steps(tmp_path) == [0, 1]
        never.computed = True
    assert steps(tmp_path) == [0, 1, 2]


def test_a_failure_keeps_what_was_computed_and_waits_for_nothing(tmp_path: Path) -> None:
    def train() -> None:
        with jaxdist.run_log(tmp_path) as log:
            log(0, loss=1.0)
            log(1, loss=NotYet(1.0))
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert steps(tmp_path) == [0]


def test_a_host_too_far_ahead_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.observe.metrics._MOST", 2)

    def train() -> None:
        with jaxdist.run_log(tmp_path) as log:
            for step in range(3):
                log(step, loss=NotYet(1.0))

    with pytest.raises(AssertionError, match="fetched before"):
        train()


def test_the_end_of_a_step_is_noted_when_it_ends(tmp_path: Path) -> None:
    """Not when the host next looks, which may be long after: the throughput would be that of the looking."""
    with jaxdist.run_log(tmp_path, examples_per_step=1) as log:
        for step in range(3):
            log._pending.append(entry := _Entry(step, {"loss": jnp.float32(step)}))
            log._open(step) if step == 0 else None
            log._running.put(entry)
            deadline = time.monotonic() + 60
            while entry.ended is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        ends = [entry.ended or 0.0 for entry in log._pending]
        time.sleep(0.2)
    lines = read_metrics(tmp_path)
    assert lines[2]["examples_per_s"] == pytest.approx(1 / (ends[2] - ends[1]), rel=1e-4)
    assert lines[2]["time"] <= time.time() - 0.2 + 0.002


def test_metrics_of_a_decorated_step(tmp_path: Path) -> None:
    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        return w - 1, {"loss": jnp.mean(batch) * w}

    w = jnp.ones(())
    with jaxdist.run_log(tmp_path) as log:
        for i in range(3):
            w, aux = step(w, jnp.ones((8, 2)))
            log(i, **aux)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 0.0, -1.0]


def test_donated_state_is_named(tmp_path: Path) -> None:
    x = jnp.ones(())
    x.delete()
    said = r"'norm' of step 4 was donated.*log float\(norm\)"
    with pytest.raises(RuntimeError, match=said), jaxdist.run_log(tmp_path) as log:
        log(4, norm=x)


def test_a_restart_leaves_no_step_twice(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 6)
    before = (tmp_path / FILE).read_text()
    log_steps(tmp_path, 4, 7)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert (tmp_path / "metrics.jsonl.bak").read_text() == before
    log_steps(tmp_path, 7, 7)  # opening alone changes nothing
    log_steps(tmp_path, 7, 8)
    assert steps(tmp_path) == list(range(8))
    assert (tmp_path / "metrics.jsonl.bak").read_text() == before, "nothing was dropped: nothing to keep"


def test_a_line_cut_off_by_a_kill_goes(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 2, "lo')
    assert steps(tmp_path) == [0, 1]
    log_steps(tmp_path, 2, 3)
    assert steps(tmp_path) == [0, 1, 2]


def test_nan_and_infinity_are_valid_json(tmp_path: Path) -> None:
    with jaxdist.run_log(tmp_path) as log:
        log(0, a=jnp.nan, b=jnp.float32(jnp.inf), c=-jnp.inf)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (line,) = (json.loads(text, parse_constant=refuse) for text in (tmp_path / FILE).read_text().splitlines())
    assert (line["a"], line["b"], line["c"]) == ("NaN", "Infinity", "-Infinity")
    (back,) = read_metrics(tmp_path)
    assert back["a"] != back["a"]
    assert (back["b"], back["c"]) == (jnp.inf, -jnp.inf)


def test_what_is_refused(tmp_path: Path) -> None:
    with jaxdist.run_log(tmp_path) as log:
        log(3, loss=1.0)
        with pytest.raises(ValueError, match=r"'loss' of step 4 has shape \(2,\); expected a scalar"):
            log(4, loss=jnp.ones(2))
        with pytest.raises(ValueError, match=r"'time'.*choose another"):
            log(4, time=1.0)
        with pytest.raises(ValueError, match="step 2 was logged after step 3"):
            log(2, loss=1.0)
    (tmp_path / FILE).write_text("not JSON\n")
    with pytest.raises(ValueError, match=r"line 1 is not a line of jaxdist.run_log: 'not JSON'"):
        read_metrics(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no metrics.jsonl"):
        read_metrics(tmp_path / "nowhere")


def test_a_folder_that_can_t_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OSError, match=r"metrics can't be written there: .*file/run"),
        jaxdist.run_log(tmp_path / "file/run"),
    ):
        pass


def test_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_steps(tmp_path, 0, 50, total=50, examples_per_step=8)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "step 1/50  loss=0"
    assert lines[-1].startswith("step 50/50  loss=49  ")
    assert lines[-1].endswith(" examples/s")


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_that_are_counted_from_one(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 4 steps never shows a fifth; also where it started again, and where not each step is logged."""
    monkeypatch.setattr(display, "_EVERY", -1.0)
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    if terminal:
        monkeypatch.setattr(display, "_terminal", lambda: display._Launchers(os.ttyname(theirs)))

    def shown(*steps: int) -> list[int]:
        with jaxdist.run_log(tmp_path, total=4) as log:
            for step in steps:
                log(step, loss=1.0)
        text = capsys.readouterr().err
        with contextlib.suppress(BlockingIOError):  # all is read
            while terminal:
                text += os.read(ours, 1 << 16).decode(errors="replace")
        return [int(n) for n in dict.fromkeys(re.findall(r"(\d+)/4", text))]

    assert shown(1, 2, 3, 4) == ([0, 4] if terminal else [1, 2, 3, 4])
    assert shown(3, 4) == ([2, 4] if terminal else [3, 4])
    (tmp_path / "metrics.jsonl").unlink()
    assert shown(0, 1, 2, 3) == ([0, 4] if terminal else [1, 2, 3, 4])
    assert shown(3)[-1:] == [4]
    (tmp_path / "metrics.jsonl").unlink()
    assert shown(2, 4)[-1] == 4
