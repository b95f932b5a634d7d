"""`jaxdist plot`: metrics and throughput of runs in one picture."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_RATES = {"tokens_per_s": "tokens per second", "examples_per_s": "examples per second"}
_DECADES = 100.0  # ratio of extreme values above which an axis is logarithmic
_PARTS = 50  # number of parts of a curve, each with its own running median


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders written by `jaxdist.run_log`.")],
    out: Annotated[
        Path | None, typer.Option(help="Picture to write: .png, .pdf, or .svg (default: metrics.png in the first run).")
    ] = None,
    metrics: Annotated[str, typer.Option(help="Comma-separated names of metrics.")] = "loss",
    dark: Annotated[bool, typer.Option("--dark", help="Use a dark background.")] = False,
) -> None:
    """Plot metrics and throughput by step, with a running median."""
    from jaxdist.observe.metrics import FILE, entry_of

    try:
        logs = dict[str, list[dict[str, Any]]]()
        for run in runs:
            lines = (run / FILE).read_bytes().split(b"\n")
            logs[str(run)] = [entry for entry in map(entry_of, lines) if entry is not None]
        logged = {name for entries in logs.values() for entry in entries for name in entry}
        names = metrics.split(",")
        if missing := [name for name in names if name not in logged]:
            there = ", ".join(sorted(logged - {"step", "time", *_RATES})) or "none"
            raise ValueError(f"--metrics: no run has logged {missing[0]!r}; logged: {there}")
        target = out or runs[0] / "metrics.png"
        draw(logs, {**{name: name for name in names}, **{k: v for k, v in _RATES.items() if k in logged}}, target, dark)
    except ImportError:
        raise typer.BadParameter("plotting needs matplotlib: pip install 'jaxdist[plots]'") from None
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    print(target)


def draw(logs: dict[str, list[dict[str, Any]]], shown: dict[str, str], target: Path, dark: bool) -> None:
    """Draw one diagram per name, with one curve per run."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("dark_background" if dark else "default"):
        figure = Figure(figsize=(9, 1 + 3 * len(shown)), layout="constrained")
        diagrams = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, label) in zip(diagrams, shown.items(), strict=True):
            for i, (run, entries) in enumerate(logs.items()):
                points = [(entry["step"], float(entry.get(name, "nan"))) for entry in entries]
                steps = [step for step, x in points if math.isfinite(x)]
                values = [x for _, x in points if math.isfinite(x)]
                marker = "o" if len(values) < _PARTS else ""
                axes.plot(steps, values, color=f"C{i}", alpha=0.3, marker=marker, markersize=3)
                axes.plot(steps, median(values), color=f"C{i}", label=run)
            low, high = axes.dataLim.y0, axes.dataLim.y1
            if name in _RATES:
                axes.set_ylim(bottom=0)
            elif low > 0 and high / low >= _DECADES:
                axes.set_yscale("log")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        diagrams[-1].set_xlabel("step")
        diagrams[0].legend(fontsize="small")
        figure.savefig(target, dpi=150)


def median(values: Sequence[float]) -> list[float]:
    """Return running medians, so that pauses, spikes and noise do not hide the curve."""
    around = len(values) // (2 * _PARTS)
    return [statistics.median(values[max(0, i - around) : i + around + 1]) for i in range(len(values))]
