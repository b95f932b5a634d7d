"""`jaxdist plot`: the metrics and throughput of runs, from the files of `jaxdist.run_log`, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli.bench import check_plot

_RATES = {"tokens_per_s": "tokens per second", "examples_per_s": "examples per second"}

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
    """
    from jaxdist.metrics import read_metrics

    names = list(dict.fromkeys(name.strip() for name in metrics.split(",")))
    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "metrics.png"
    try:
        found = {run: read_metrics(run) for run in dict.fromkeys(runs)}
        for run, lines in found.items():
            if not lines:
                raise ValueError(f"{run}: no step has been logged yet")
        there = list(dict.fromkeys(name for lines in found.values() for line in lines for name in line))
        for name in names:
            if name not in there:
                known = ", ".join(sorted(set(there) - {"step", "time", *_RATES}))
                raise ValueError(f"--metrics: no run has {name!r}; there are: {known}")
        check_plot(target, "--out")
        draw(found, names, target)
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    print(target)


def draw(runs: Mapping[Path, Lines], names: Sequence[str], path: Path) -> None:
    """A diagram for each metric, and one for the throughput.

    Args:
      runs: the lines of each.
      names: of metrics.
      path: .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    rates = [name for name in _RATES if any(name in line for lines in runs.values() for line in lines)]
    shown = {**{name: name for name in names}, **{name: _RATES[name] for name in rates[:1]}}
    figure = Figure(figsize=(9, 1 + 3 * len(shown)), layout="constrained")
    diagrams = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, label) in zip(diagrams, shown.items(), strict=True):
        for run, lines in runs.items():
            points = [(line["step"], line[name]) for line in lines if name in line]
            marker = "o" if len(points) < 30 else ""
            axes.plot([x for x, _ in points], [y for _, y in points], label=str(run), marker=marker, markersize=3)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if name in rates:
            axes.set_ylim(bottom=0)
    diagrams[-1].set_xlabel("step")
    if len(runs) > 1:
        diagrams[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
