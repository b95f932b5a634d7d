"""Step time of jaxdist, torch, and hand-written JAX: two ranks, one core each, equal weights and batches.

    python benchmarks/step_time.py --torch PYTHON --json step_time.json --markdown step_time.md --png step_time.png

"jaxdist mpi 3" is jaxdist over MPI at ZeRO level 3; xla is gloo. In hand-written JAX, "per leaf" sends each
gradient, "flat" sends all in one buffer, and "constraints" is `jax.jit` with sharding constraints over gloo. "1
rank x2" has the batch of both ranks. It fails unless all variants agree in the losses of the first three steps.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

import models
import report
from rounds import Built, Job, build, take_turns

TOLERANCE = 2e-3
"""Relative tolerance of losses: float32 sums differ in order, and Adam divides by values near zero."""

JOBS = {"jax 2": ("jax_steps:Steps", 2), "jax 1": ("jax_steps:Steps", 1),
        "torch 2": ("torch_steps:Steps", 2), "torch 1": ("torch_steps:Steps", 1)}  # fmt: skip

JAXDIST = [f"jaxdist {communicator} {level}" for communicator in ("mpi", "xla") for level in range(4)]
BY_HAND = ["gloo per leaf", "gloo flat", "mpi4jax per leaf", "mpi4jax flat"]
CONSTRAINTS = [f"constraints {level}" for level in (0, 1, 3)]
TORCH = ["DDP", "DDP fused", "ZeRO", "FSDP2"]

VARIANTS: dict[str, tuple[str, str]] = {
    **{name: ("jax 2", name) for name in JAXDIST + BY_HAND + CONSTRAINTS},
    **{f"torch {name}": ("torch 2", name) for name in TORCH},
    "raw allreduce": ("jax 2", "raw allreduce"),
    "1 rank: jaxdist": ("jax 1", "jaxdist auto 0"),
    "1 rank: jit": ("jax 1", "jit"),
    "1 rank: torch": ("torch 1", "plain"),
    "1 rank x2: jaxdist": ("jax 1", "jaxdist auto 0 x2"),
    "1 rank x2: jit": ("jax 1", "jit x2"),
    "1 rank x2: torch": ("torch 1", "plain x2"),
}
"""Label -> job, and name there. "1 rank" uses one rank's batch, "1 rank x2" both ranks' batches."""


class Comparison(NamedTuple):
    """A ratio of step times.

    Attributes:
      one: a variant's label.
      other: labels of variants whose times are added up.
    """

    one: str
    other: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return the label of a row."""
        return f"{self.one} / {self.other[0]}" if len(self.other) == 1 else f"{self.one} / ({' + '.join(self.other)})"


COMPARISONS = [
    Comparison("jaxdist mpi 0", ("torch DDP",)),
    Comparison("jaxdist mpi 0", ("torch DDP fused",)),
    Comparison("jaxdist mpi 1", ("torch ZeRO",)),
    Comparison("jaxdist mpi 3", ("torch FSDP2",)),
    Comparison("jaxdist mpi 0", ("gloo per leaf",)),
    Comparison("jaxdist mpi 0", ("gloo flat",)),
    Comparison("jaxdist mpi 0", ("mpi4jax per leaf",)),
    Comparison("jaxdist mpi 0", ("mpi4jax flat",)),
    Comparison("jaxdist mpi 0", ("1 rank: jaxdist", "raw allreduce")),
    Comparison("jaxdist xla 0", ("torch DDP",)),
    Comparison("jaxdist xla 0", ("gloo per leaf",)),
    Comparison("jaxdist xla 0", ("gloo flat",)),
    Comparison("jaxdist xla 0", ("constraints 0",)),
    Comparison("jaxdist xla 1", ("constraints 1",)),
    Comparison("jaxdist xla 3", ("constraints 3",)),
    Comparison("1 rank: jaxdist", ("1 rank: jit",)),
    Comparison("1 rank: jaxdist", ("1 rank: torch",)),
    Comparison("1 rank x2: jaxdist", ("1 rank x2: torch",)),
]
SCALING = {"jaxdist mpi 0": "jaxdist", "jaxdist xla 0": "jaxdist", "torch DDP": "torch"}
SHOWN = {
    "jaxdist mpi 0": "jaxdist, MPI", "jaxdist xla 0": "jaxdist, gloo", "gloo flat": "JAX by hand, gloo",
    "torch DDP": "torch DDP, gloo", "1 rank: jit": "JAX, one rank alone", "1 rank: torch": "torch, one rank alone",
}  # fmt: skip
"""Models in the picture. All have equally many examples per rank."""
FIRST_CALLS = ("jaxdist mpi 0", "jaxdist mpi 3", "gloo flat", "torch DDP", "1 rank: jit")


def faster_peers(found: dict[str, Any]) -> list[str]:
    """List comparisons with other systems whose median is above 1 for some model, in words."""
    lines = []
    for c in COMPARISONS:
        ratios = {name: report.ratio(m["ms"], c.one, c.other) for name, m in found.items()}
        slower = [f"{name} {ratio}" for name, ratio in ratios.items() if ratio and ratio.median > 1]
        if slower and "jaxdist" not in c.other[0]:
            lines.append(f"- {c.title}: {', '.join(slower)}")
    return lines


def check_losses(losses: dict[str, list[float]], tolerance: float = TOLERANCE, apart: str = "1 rank:") -> float:
    """Return the largest relative difference between variants that train on the same examples.

    Args:
      losses: losses of each variant's first steps.
      tolerance: relative tolerance.
      apart: prefix of labels of variants that train on different examples.

    Raises:
      SystemExit: the difference is larger than `tolerance`, or a loss is NaN.
    """
    worst = 0.0
    references: dict[bool, str] = {}
    for label, mine in losses.items():
        reference = references.setdefault(label.startswith(apart), label)
        for a, b in zip(mine, losses[reference], strict=True):
            difference = abs(a - b) / abs(b)
            if not difference <= tolerance:
                raise SystemExit(f"{label} does not compute what {reference} does: losses {mine}, {losses[reference]}")
            worst = max(worst, difference)
    return worst


def chosen(
    variants: dict[str, tuple[str, str]], patterns: Sequence[str], torch: str | None
) -> dict[str, tuple[str, str]]:
    """Return the variants that a command selects.

    Args:
      variants: label -> job, and name there.
      patterns: patterns for labels.
      torch: an interpreter, or None to leave out torch's variants.

    Raises:
      SystemExit: none is selected.
    """
    found = {
        label: how
        for label, how in variants.items()
        if any(fnmatch.fnmatch(label, pattern) for pattern in patterns) and (torch or "torch" not in how[0])
    }
    if not found:
        raise SystemExit(f"no variant is like {patterns}; there are {list(variants)}")
    return found


def measure(
    model: str,
    variants: dict[str, tuple[str, str]],
    rounds: int,
    seconds: float,
    torch: str | None = None,
    tolerance: float = TOLERANCE,
    apart: str = "1 rank:",
) -> dict[str, Any]:
    """Measure all variants with one model.

    Args:
      model: its name.
      variants: label -> job, and name there.
      rounds: the number of rounds.
      seconds: time per variant and round.
      torch: an interpreter.
      tolerance: tolerance of the losses.
      apart: see `check_losses`.
    """
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for job in dict.fromkeys(job for job, _ in variants.values()):
            side, ranks = JOBS[job]
            python = {"python": torch} if torch and job.startswith("torch") else {}
            jobs[job] = stack.enter_context(Job([side, model], ranks, **python))
        tasks = {label: (jobs[job], name) for label, (job, name) in variants.items()}
        built: dict[str, Built] = build(tasks, seconds)
        losses = {label: b.losses for label, b in built.items() if b.losses}
        worst = check_losses(losses, tolerance, apart)
        return {
            "parameters": models.parameters(models.find(model)),
            "leaves": len(models.leaves(models.init(models.find(model)))),
            "rows": models.find(model).rows,
            "losses": losses,
            "largest_difference": worst,
            "first_call_s": {label: round(b.first_call_s, 3) for label, b in built.items()},
            "ms": take_turns(tasks, built, rounds),
        }


def shorter(results: dict[str, Any]) -> str:
    """Return the page for a second processor: ratios to torch, and all cases in which a peer is faster."""
    return markdown(results, "Ratios", "torch")


def markdown(results: dict[str, Any], only: str = "", beside: str = "") -> str:
    """Return the tables.

    Args:
      results: the results.
      only: prefix of the wanted titles.
      beside: part of the names of variants in the denominators of the wanted ratios.
    """
    found = results["models"]
    labels = [label for label in VARIANTS if any(label in m["ms"] for m in found.values())]

    def times(label: str) -> list[Any]:
        return [
            report.number(report.spread(m["ms"][label]).median) if label in m["ms"] else None for m in found.values()
        ]

    def first_call(label: str) -> list[Any]:
        calls = [m["first_call_s"].get(label) for m in found.values()]
        return [x if x is None else report.number(x) for x in calls]

    def medians(ratios: list[report.Spread | None]) -> list[Any]:
        return [r and report.number(r.median) for r in ratios]

    def compared(c: Comparison) -> list[Any]:
        return medians([report.ratio(m["ms"], c.one, c.other) for m in found.values()])

    def scaled(label: str, alone: str) -> list[Any]:
        return medians([report.ratio(m["ms"], alone, (label,)) for m in found.values()])

    sizes = [f"{m['parameters'] / 1e6:.3g}M, {m['leaves']}, {m['rows']}" for m in found.values()]
    worst = max(m["largest_difference"] for m in found.values())
    sections: dict[str, list[list[Any]]] = {
        "Medians of ms a step.": [["parameters, leaves, batch", *sizes], *([x, *times(x)] for x in labels)],
        "Ratios within rounds, medians.": [[c.title, *compared(c)] for c in COMPARISONS if beside in c.other[0]],
        "Weak scaling, 1 → 2 ranks, as large a batch for each: the step of one / that of two, at best 1.": [
            [label, *scaled(label, f"1 rank: {kind}")] for label, kind in SCALING.items()
        ],
        "Strong scaling, 1 → 2 ranks, the same batch in all: the step of one / that of two, at best 2.": [
            [label, *scaled(label, f"1 rank x2: {kind}")] for label, kind in SCALING.items()
        ],
        "Seconds of the first call: trace, compile, run.": [
            [label, *first_call(label)] for label in labels if label in FIRST_CALLS
        ],
    }
    intro = (
        f"Medians of {results['rounds']} rounds. The losses of the first three steps agree between "
        f"all variants to {worst:.1e} (relative; {TOLERANCE:g} is allowed)."
    )
    text = [intro]
    for title, rows in sections.items():
        rows = [row for row in rows if any(cell is not None for cell in row[1:])]
        if rows and title.startswith(only):
            text += [title, report.table(["", *found], rows)]
        if title.startswith("Ratios") and (lines := faster_peers(found)):
            text += ["The other one is faster here (median above 1, smallest–largest):", "\n".join(lines)]
    return "\n\n".join(text)


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot bars of step times, one panel per model."""
    figure.suptitle(f"Time of a step on two ranks, {report.processor(results)} (shorter is better)")
    found = results["models"]
    panels = figure.subplots(-(-len(found) // 2), min(2, len(found)), squeeze=False).flat
    figure.set_size_inches(12, 1 + 2.2 * -(-len(found) // 2))
    for panel, (name, m) in zip(panels, found.items(), strict=False):
        shown = {title: m["ms"][label] for label, title in SHOWN.items() if label in m["ms"]} or m["ms"]
        report.bars(panel, {title: report.spread(times) for title, times in shown.items()}, "ms")
        panel.set_title(name)
    for panel in list(panels):  # an odd number of models leaves one
        panel.set_axis_off()


def draw_scaling(results: dict[str, Any], figure: Any) -> None:
    """Plot the speedup of two ranks: bars per model, with the ideal."""
    figure.suptitle(f"Scaling from one rank to two, {report.processor(results)} (higher is better)")
    found = results["models"]
    titles = {"1 rank: ": "the same batch for each rank", "1 rank x2: ": "the same batch for both together"}
    for best, (panel, (alone, title)) in enumerate(zip(figure.subplots(1, 2), titles.items(), strict=True), 1):
        top = float(best)
        for i, (label, kind) in enumerate(SCALING.items()):
            ratios = [report.ratio(m["ms"], alone + kind, (label,)) for m in found.values()]
            there = [(place + 0.27 * (i - 1), r) for place, r in enumerate(ratios) if r is not None]
            places, spreads = [x for x, _ in there], [r for _, r in there]
            ends = [[r.median - r.least for r in spreads], [r.most - r.median for r in spreads]]
            color = report.TORCH if kind == "torch" else report.OURS
            panel.bar(
                places, [r.median for r in spreads], 0.25, yerr=ends, color=color, alpha=0.5 if "xla" in label else 1,
                label=SHOWN[label], error_kw={"linewidth": 0.8},
            )  # fmt: skip
            top = max([top, *(r.most for r in spreads)])
        panel.axhline(best, color="black", linewidth=1, linestyle="--", label=f"ideal: {best}")
        panel.set_xticks(range(len(found)), list(found), rotation=25)
        panel.grid(visible=False, axis="x")
        panel.set(title=title, ylim=(0, 1.3 * top), ylabel="time of one rank / time of two")
        panel.legend(loc="upper left", ncols=2)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(models.MODELS), choices=[*models.MODELS, *models.TINY])
    parser.add_argument("--variants", nargs="*", default=["*"], help="patterns, such as 'jaxdist mpi *'")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one variant in one round")
    parser.add_argument("--torch", metavar="PYTHON")
    report.add_arguments(parser)
    args = parser.parse_args()
    variants = chosen(VARIANTS, args.variants, args.torch)
    results = {"command": report.command(), "machine": report.machine(args.torch), "rounds": args.rounds, "models": {}}
    for model in args.models:
        results["models"][model] = measure(model, variants, args.rounds, args.seconds, args.torch)
    report.write(args, results, markdown, draw)


if __name__ == "__main__":
    main()
