"""`jaxdist plot`: a picture of one run or several, and what it refuses."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.cli.plot import Interval, draw, intervals, steady
from jaxdist.observe.metrics import FILE, read_metrics


def write_run(folder: Path, losses: list[str]) -> Path:
    folder.mkdir()
    rows = [f'{{"step": {i}, "time": {i}, "loss": {x}, "examples_per_s": {100 + i}}}' for i, x in enumerate(losses)]
    (folder / FILE).write_text("\n".join([*rows, '{"step": 1, "time": 1, "accuracy": 0.5}', ""]))
    return folder


def plot(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plot", *map(str, args)])
    return done.exit_code, "".join(done.output.replace("│", "").split())


def test_one_run_and_several(tmp_path: Path):
    a, b = write_run(tmp_path / "a", ["3", '"NaN"', "1"]), write_run(tmp_path / "b", ["2", '"Infinity"'])
    assert plot(a) == (0, str(a / "metrics.png"))
    assert (a / "metrics.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert plot(a, b / FILE, "--metrics", "loss,accuracy", "--out", tmp_path / "both.svg")[0] == 0
    text = (tmp_path / "both.svg").read_text()
    assert "<svg" in text


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: found.append(self))
    return found


def test_what_is_drawn(tmp_path: Path, seen: list[Figure]):
    runs = [write_run(tmp_path / name, ["3", "2", "1"]) for name in "ab"]
    draw({run: read_metrics(run) for run in runs}, ["loss", "accuracy"], tmp_path / "x.png")
    loss, accuracy, rate = seen[0].axes

    def lines(axes: Any) -> list[list[float]]:
        return [list(line.get_ydata()) for line in axes.lines]

    assert [axes.get_ylabel() for axes in seen[0].axes] == ["loss", "accuracy", "examples per second"]
    assert lines(loss) == [[3, 2, 1]] * 2
    assert lines(accuracy) == [[0.5]] * 2
    assert lines(rate) == [[101, 102], [101.5, 101.5]] * 2  # each interval, and the median
    assert loss.get_yscale() == "linear"
    legend = loss.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(map(str, runs))


def test_a_loss_over_decades_is_on_a_logarithmic_axis(tmp_path: Path, seen: list[Figure]):
    for losses, scale in ((["1", '"NaN"', "0.01"], "log"), (["1", "0.02"], "linear"), (["1", "0"], "linear")):
        run = write_run(tmp_path / "".join(losses).replace('"', ""), losses)
        draw({run: read_metrics(run)}, ["loss", "accuracy"], tmp_path / "x.png")
        assert [axes.get_yscale() for axes in seen[-1].axes] == [scale, "linear", "linear"], losses


def test_throughput_between_lines():
    """An evaluation after a step is in the interval that it is in."""
    lines = [
        {"step": 0, "time": 5.0},
        {"step": 1, "time": 105.0, "r": 1.0},
        {"step": 1, "time": 106.0},
        {"step": 2, "time": 107.0, "r": 0.5},
        {"step": 3, "time": 108.0, "r": 4.0},
    ]
    assert intervals(lines, "r") == [Interval(1, 100.0, 1.0), Interval(2, 2.0, 0.5), Interval(3, 1.0, 4.0)]
    assert intervals(lines[:1], "r") == []


def test_pauses_spikes_and_bursts_are_not_in_the_steady_throughput():
    def rates(each: list[tuple[float, float]]) -> list[float]:
        return [one.rate for one in steady([Interval(i, *one) for i, one in enumerate(each)])]

    level = [(1.0, 50.0)] * 200
    assert rates([(60.0, 1.0) if i % 40 == 7 else one for i, one in enumerate(level)]) == [50.0] * 200
    spikes = rates([(0.001, 1e6) if i % 40 == 7 else one for i, one in enumerate(level)])
    assert spikes == pytest.approx([50.0] * 200, 0.2)
    bursts = rates([(0.01, 5000.0), (1.99, 50 / 1.99)] * 100)  # 50 examples each
    assert bursts[5:] == pytest.approx([50.0] * 195, 0.02)
    change = rates([(1.0, 50.0)] * 100 + [(1.0, 80.0)] * 100)
    assert change[:85] == [50.0] * 85
    assert change[115:] == [80.0] * 85


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "run", ["1"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / FILE).write_text("")
    for arguments, said in (
        ((tmp_path / "nowhere",), "there is no metrics.jsonl of jaxdist.run_log"),
        ((tmp_path / "empty",), "no step has been logged yet"),
        ((run, "--metrics", "lr"), "no run has 'lr'; there are: accuracy, loss"),
        ((run, "--out", "x.txt"), "--out x.txt: the name must end in .png, .pdf or .svg"),
        ((run, "--out", "nowhere/x.png"), "there is no folder nowhere"),
        ((), "Missing argument"),
    ):
        code, output = plot(*arguments)
        assert code == 2
        assert said.replace(" ", "") in output
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *r: None if name == "matplotlib" else find_spec(name))
    code, output = plot(run)
    assert (code, "todrawneedsmatplotlib:pipinstall'jaxdist[plots]'" in output) == (2, True)
    assert "--out" not in output  # which was not given
    if os.geteuid() != 0:
        run.chmod(0o500)
        assert plot(run)[0] == 2
