"""`jaxdist plot`: a picture of one run or several, and what it refuses."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.cli.plot import draw
from jaxdist.metrics import FILE, read_metrics


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


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: seen.append(self))
    runs = [write_run(tmp_path / name, ["3", "2", "1"]) for name in "ab"]
    draw({run: read_metrics(run) for run in runs}, ["loss", "accuracy"], tmp_path / "x.png")
    loss, accuracy, rate = seen[0].axes

    def lines(axes: Any) -> list[list[float]]:
        return [list(line.get_ydata()) for line in axes.lines]

    assert [axes.get_ylabel() for axes in seen[0].axes] == ["loss", "accuracy", "examples per second"]
    assert lines(loss) == [[3, 2, 1]] * 2
    assert lines(accuracy) == [[0.5]] * 2
    assert lines(rate) == [[100, 101, 102]] * 2
    legend = loss.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(map(str, runs))


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
    assert "pipinstall'jaxdist[plots]'" in plot(run)[1]
    if os.geteuid() != 0:
        run.chmod(0o500)
        assert plot(run)[0] == 2
