"""`jaxdist plot`: the metrics and throughput of runs, from the files of `jaxdist.run_log`, as a picture."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from jaxdist.cli.output import check_plot

_RATES = {"tokens_per_s": "tokens per second", "examples_per_s": "examples per second"}
_INTERVALS = 200  # of a curve of throughput at most: more could not be told apart
_MEAN = 6  # intervals that a mean is taken over, where there are enough
_DECADES = 100.0  # largest / smallest value from which a loss is drawn on a logarithmic axis

Lines = Sequence[Mapping[str, float]]


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders that `jaxdist.run_log` wrote to, or metrics.jsonl.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The picture (.png, .pdf or .svg); default: metrics.png in the first run.")
    ] = None,
    metrics: Annotated[str, typer.Option(help="Which, with commas between them.")] = "loss",
) -> None:
    """Draws metrics and throughput over the step; several runs in one picture, a colour each. What is not finite is
    left out.

    A loss that spans two decades or more is on a logarithmic axis. The throughput is that of each interval between two
    lines of the log, faint, and in full colour what is left of it without pauses and spikes.
    """
    from jaxdist.observe.metrics import read_metrics

    names = list(dict.fromkeys(name.strip() for name in metrics.split(",")))
    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "metrics.png"
    try:
        found = {run: read_metrics(run) for run in dict.fromkeys(runs)}
        for run, lines in found.items():
            if not lines:
                raise ValueError(f"{run}: no step has been logged yet")
        logged = list(dict.fromkeys(name for lines in found.values() for line in lines for name in line))
        for name in names:
            if name not in logged:
                known = ", ".join(sorted(set(logged) - {"step", "time", *_RATES}))
                raise ValueError(f"--metrics: no run has {name!r}; there are: {known}")
        check_plot(target, "--out")
        draw(found, names, target)
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    print(target)


def draw(runs: Mapping[Path, Lines], names: Sequence[str], path: Path) -> None:
    """A diagram for each metric, and one for the throughput: of each interval, and what is steady of it."""
    from matplotlib.figure import Figure

    rates = [name for name in _RATES if any(name in line for lines in runs.values() for line in lines)]
    shown = {**{name: name for name in names}, **{name: _RATES[name] for name in rates[:1]}}
    figure = Figure(figsize=(9, 1 + 3 * len(shown)), layout="constrained")
    diagrams = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, label) in zip(diagrams, shown.items(), strict=True):
        tops = []
        for i, (run, lines) in enumerate(runs.items()):
            points = [(line["step"], line[name]) for line in lines if name in line]
            if name in rates:
                each = intervals(lines, name)
                axes.plot([x.step for x in each], [x.rate for x in each], color=f"C{i}", alpha=0.25, linewidth=0.8)
                points = [(x.step, x.rate) for x in steady(each)]
                tops += [y for _, y in points]
            marker = "o" if len(points) < 30 else ""
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=f"C{i}",
                label=str(run),
                marker=marker,
                markersize=3,
            )
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if tops:
            axes.set_ylim(0, 1.2 * max(tops))
        if "loss" in name and _spans_decades(line[name] for lines in runs.values() for line in lines if name in line):
            axes.set_yscale("log")
    diagrams[-1].set_xlabel("step")
    if len(runs) > 1:
        diagrams[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


class Interval(NamedTuple):
    """Between two lines of a log: the step at its end, its length, and the throughput in it."""

    step: float
    seconds: float
    rate: float


def intervals(lines: Lines, name: str) -> list[Interval]:
    """The throughput between two lines each; neighbours together where there are many."""
    found: list[Interval] = []
    step, begin = None, 0.0
    for line in lines:
        if name in line and line["time"] > begin:
            found.append(Interval(line["step"], line["time"] - begin, line[name]))
        if line["step"] != step:  # or it is an evaluation after the step
            step, begin = line["step"], line["time"]
    size = -(-len(found) // _INTERVALS) or 1
    return [_together(found[i : i + size]) for i in range(0, len(found), size)]


def steady(found: Sequence[Interval]) -> list[Interval]:
    """The throughput without what is short: means over some intervals, and of these the median of those around.

    The means are for steps that end in bursts, as when a loader delivers several batches at once; the median for pauses
    and spikes, which are in less than half of the means around.
    """
    size = max(1, min(_MEAN, len(found) // (4 * _MEAN)))
    means = [_together(found[max(0, i - size + 1) : i + 1]).rate for i in range(len(found))]
    around = 2 * size
    medians = [statistics.median(means[max(0, i - around) : i + around + 1]) for i in range(len(found))]
    return [Interval(one.step, one.seconds, rate) for one, rate in zip(found, medians, strict=True)]


def _together(part: Sequence[Interval]) -> Interval:
    seconds = sum(one.seconds for one in part)
    return Interval(part[-1].step, seconds, sum(one.seconds * one.rate for one in part) / seconds)


def _spans_decades(values: Iterable[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= _DECADES
