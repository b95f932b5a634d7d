"""Step time of jaxdist, torch, and hand-written JAX: two ranks, one core each, equal weights and batches.

    python benchmarks/step_time.py --torch PYTHON --json step_time.json

"jaxdist mpi 3" is jaxdist over MPI at ZeRO level 3; xla is gloo. In hand-written JAX, "per leaf" sends each
gradient, "flat" sends all in one buffer, and "constraints" is `jax.jit` with sharding constraints over gloo. "1
rank x2" has the batch of both ranks. It fails unless all variants agree in the losses of the first three steps.
"""

from __future__ import annotations

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
      peer: what the other one is on the short page, which has the comparisons with torch.
    """

    one: str
    other: tuple[str, ...]
    peer: str = ""

    @property
    def title(self) -> str:
        """Return the label of a row."""
        return f"{self.one} / {self.other[0]}" if len(self.other) == 1 else f"{self.one} / ({' + '.join(self.other)})"

    def ratios(self, found: dict[str, Any]) -> dict[str, report.Spread | None]:
        """Return the ratio for each model."""
        return {name: report.ratio(m["ms"], self.one, self.other) for name, m in found.items()}

    def medians(self, found: dict[str, Any]) -> list[float | None]:
        """Return the median of the ratio for each model."""
        return [ratio and ratio.median for ratio in self.ratios(found).values()]

    def slower(self, found: dict[str, Any]) -> str:
        """List the models for which the median is above 1, in words."""
        return ", ".join(f"{name} {ratio}" for name, ratio in self.ratios(found).items() if ratio and ratio.median > 1)


COMPARISONS = [
    Comparison("jaxdist mpi 0", ("torch DDP",), "DDP"),
    Comparison("jaxdist mpi 0", ("torch DDP fused",), "DDP, fused Adam"),
    Comparison("jaxdist mpi 1", ("torch ZeRO",), "ZeroRedundancyOptimizer"),
    Comparison("jaxdist mpi 3", ("torch FSDP2",), "FSDP2"),
    Comparison("jaxdist mpi 0", ("gloo per leaf",)),
    Comparison("jaxdist mpi 0", ("gloo flat",)),
    Comparison("jaxdist mpi 0", ("mpi4jax per leaf",)),
    Comparison("jaxdist mpi 0", ("mpi4jax flat",)),
    Comparison("jaxdist mpi 0", ("1 rank: jaxdist", "raw allreduce")),
    Comparison("jaxdist xla 0", ("torch DDP",), "DDP over gloo"),
    Comparison("jaxdist xla 0", ("gloo per leaf",)),
    Comparison("jaxdist xla 0", ("gloo flat",)),
    Comparison("jaxdist xla 0", ("constraints 0",)),
    Comparison("jaxdist xla 1", ("constraints 1",)),
    Comparison("jaxdist xla 3", ("constraints 3",)),
    Comparison("1 rank: jaxdist", ("1 rank: jit",)),
    Comparison("1 rank: jaxdist", ("1 rank: torch",), "one rank alone"),
    Comparison("1 rank x2: jaxdist", ("1 rank x2: torch",), "one rank with both batches"),
]
SCALING = {"jaxdist mpi 0": "jaxdist", "jaxdist xla 0": "jaxdist", "torch DDP": "torch"}
SHOWN = {
    "jaxdist mpi 0": "jaxdist, MPI", "jaxdist xla 0": "jaxdist, gloo", "gloo flat": "JAX by hand, gloo",
    "torch DDP": "torch DDP, gloo", "1 rank: jit": "JAX, one rank alone", "1 rank: torch": "torch, one rank alone",
}  # fmt: skip
"""Models in the picture. All have equally many examples per rank."""
FIRST_CALLS = ("jaxdist mpi 0", "jaxdist mpi 3", "gloo flat", "torch DDP", "1 rank: jit")


def check_losses(losses: dict[str, list[float]]) -> float:
    """Return the largest relative difference between variants that train on the same examples.

    Args:
      losses: losses of each variant's first steps. Those of "1 rank:" have other examples.

    Raises:
      SystemExit: the difference is larger than `TOLERANCE`, or a loss is NaN.
    """
    worst = 0.0
    references: dict[bool, str] = {}
    for label, mine in losses.items():
        reference = references.setdefault(label.startswith("1 rank:"), label)
        for a, b in zip(mine, losses[reference], strict=True):
            difference = abs(a - b) / abs(b)
            if not difference <= TOLERANCE:
                raise SystemExit(f"{label} does not compute what {reference} does: losses {mine}, {losses[reference]}")
            worst = max(worst, difference)
    return worst


def chosen(patterns: Sequence[str], torch: str | None) -> dict[str, tuple[str, str]]:
    """Return the variants whose labels have one of these patterns, without torch's if there is no such interpreter.

    Raises:
      SystemExit: there are none.
    """
    found = {
        label: how
        for label, how in VARIANTS.items()
        if any(fnmatch.fnmatch(label, pattern) for pattern in patterns) and (torch or "torch" not in how[0])
    }
    if not found:
        raise SystemExit(f"no variant is like {patterns}; there are {list(VARIANTS)}")
    return found


def measure(
    model: str, variants: dict[str, tuple[str, str]], rounds: int, seconds: float, torch: str | None
) -> dict[str, Any]:
    """Measure all variants with one model.

    Args:
      model: its name.
      variants: label -> job, and name there.
      rounds: the number of rounds.
      seconds: time per variant and round.
      torch: an interpreter.
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
        leaves = models.leaves(models.init(models.find(model)))
        return {
            "parameters": sum(x.size for x in leaves),
            "leaves": len(leaves),
            "rows": models.find(model).rows,
            "losses": losses,
            "largest_difference": check_losses(losses),
            "first_call_s": {label: round(b.first_call_s, 3) for label, b in built.items()},
            "ms": take_turns(tasks, built, rounds),
        }


def markdown(results: dict[str, Any]) -> str:
    """Return the tables."""
    found = results["models"]
    labels = [label for label in VARIANTS if any(label in m["ms"] for m in found.values())]
    sizes = [f"{m['parameters'] / 1e6:.3g}M, {m['leaves']}, {m['rows']}" for m in found.values()]
    medians = {x: [report.spread(m["ms"][x]).median if x in m["ms"] else None for m in found.values()] for x in labels}
    first_calls = {x: [m["first_call_s"].get(x) for m in found.values()] for x in labels if x in FIRST_CALLS}

    def scaled(alone: str) -> dict[str, list[float | None]]:
        return {label: Comparison(alone + kind, (label,)).medians(found) for label, kind in SCALING.items()}

    weak = "Weak scaling, 1 → 2 ranks, as large a batch for each: the step of one / that of two, at best 1."
    strong = "Strong scaling, 1 → 2 ranks, the same batch in all: the step of one / that of two, at best 2."
    text = [
        _agreement(results),
        *_section("Medians of ms a step.", found, medians, ["parameters, leaves, batch", *sizes]),
        *_ratios(found),
        *_section(weak, found, scaled("1 rank: ")),
        *_section(strong, found, scaled("1 rank x2: ")),
        *_section("Seconds of the first call: trace, compile, run.", found, first_calls),
    ]
    return "\n\n".join(text)


def _agreement(results: dict[str, Any]) -> str:
    worst = max(m["largest_difference"] for m in results["models"].values())
    return (
        f"Medians of {results['rounds']} rounds. The losses of the first three steps agree between "
        f"all variants to {worst:.1e} (relative; {TOLERANCE:g} is allowed)."
    )


def _ratios(found: dict[str, Any]) -> list[str]:
    """Return the ratios, and where any peer is faster."""
    ratios = {c.title: c.medians(found) for c in COMPARISONS}
    slower = {c.title: c.slower(found) for c in COMPARISONS if "jaxdist" not in c.other[0]}
    lines = "\n".join(f"- {title}: {models}" for title, models in slower.items() if models)
    faster = ["The other one is faster here (median above 1, smallest–largest):", lines] if lines else []
    return [*_section("Ratios within rounds, medians.", found, ratios), *faster]


def _section(title: str, found: dict[str, Any], rows: dict[str, list[float | None]], *first: list[str]) -> list[str]:
    """Return the title and a table with a column per model, without empty rows; nothing if all are."""
    cells = [[x, *(n and report.number(n) for n in row)] for x, row in rows.items() if any(n is not None for n in row)]
    return [title, report.table(["", *found], [*first, *cells])] if cells else []


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
    parser = report.arguments(__doc__, rounds=7, seconds=0.5, torch=True)
    parser.add_argument("--models", nargs="*", default=list(models.MODELS), choices=[*models.MODELS, *models.TINY])
    parser.add_argument("--variants", nargs="*", default=["*"], help="patterns, such as 'jaxdist mpi *'")
    args = parser.parse_args()
    variants = chosen(args.variants, args.torch)
    found = {model: measure(model, variants, args.rounds, args.seconds, args.torch) for model in args.models}
    report.write(args, {"rounds": args.rounds, "models": found}, markdown)


if __name__ == "__main__":
    main()
