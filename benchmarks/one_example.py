"""Step time of one example of 1024 tokens, which data parallelism can't divide: two ranks, a core each.

    python benchmarks/one_example.py --torch PYTHON --json one_example.json --markdown one_example.md

A GPT of 10M parameters, float32, Adam. Its sequence or its layers are divided by `jaxdist.parallel`, by `jit` with
sharding constraints over gloo, and by torch's `parallelize_module` (gloo), the layers as Megatron does: heads and
columns, then rows. One rank alone is what they are to be faster than. What is compared takes turns in each round; the
losses of the first three steps must agree between all variants, or it fails. PYTHON is an interpreter that has torch
(CPU); without it torch is left out.
"""

from __future__ import annotations

import argparse
from typing import Any

import models
import report
from step_time import TOLERANCE, Comparison, chosen, measure, said

AXES = ("sequence", "model")
VARIANTS: dict[str, tuple[str, str]] = {
    **{f"jaxdist {wire} {axis}": ("jax 2", f"jaxdist {wire} {axis}") for axis in AXES for wire in ("mpi", "xla")},
    **{f"constraints {axis}": ("jax 2", f"constraints {axis}") for axis in AXES},
    "torch parallelize_module": ("torch 2", "parallelize_module"),
    "1 rank: jit": ("jax 1", "jit"),
    "1 rank: torch": ("torch 1", "plain"),
}
ALONE = {"sequence": 0.57, "model": 0.6}
"""What a step on two ranks must not exceed, of that on one."""


def _comparisons(model: str) -> list[Comparison]:
    """Each of jaxdist's variants beside one rank, and what divides the same in another way."""
    found = [Comparison("1 rank: jit", ("1 rank: torch",)), Comparison("torch parallelize_module", ("1 rank: torch",))]
    for axis in AXES:
        found.append(Comparison(f"constraints {axis}", ("1 rank: jit",)))
        for mine in (f"jaxdist {wire} {axis}" for wire in ("mpi", "xla")):
            found.append(Comparison(mine, ("1 rank: jit",), {model: ALONE[axis]}))
            found.append(Comparison(mine, (f"constraints {axis}",), {model: 0.95}))
            if axis == "model":
                found.append(Comparison(mine, ("torch parallelize_module",), {model: 0.9}))
    return found


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    model, found = results["model"], results["found"]
    ms = found["ms"]
    ratios = [
        [c.title, said(report.ratio(ms, c.one, c.other), c.limits.get(model))]
        for c in _comparisons(model)
        if report.ratio(ms, c.one, c.other)
    ]
    times = [[label, report.spread(each), report.number(found["first_call_s"][label])] for label, each in ms.items()]
    intro = (
        f"Medians of {results['rounds']} rounds (smallest–largest). The losses of the first three steps agree between "
        f"all variants to {found['largest_difference']:.1e} (relative; {TOLERANCE:g} is allowed)."
    )
    return "\n\n".join(
        [
            intro,
            report.table(["", "ms a step", "first call, s"], times),
            "Ratios within rounds, and what they must not exceed.",
            report.table(["", model], ratios),
        ]
    )


def draw(results: dict[str, Any], figure: Any) -> None:
    """Bars of step times."""
    spreads = {label: report.spread(each) for label, each in reversed(results["found"]["ms"].items())}
    middle = [s.median for s in spreads.values()]
    ends = [[s.median - s.least for s in spreads.values()], [s.most - s.median for s in spreads.values()]]
    colors = ["C0" if "jaxdist" in label else "C1" if "torch" in label else "C7" for label in spreads]
    panel = figure.subplots()
    panel.barh(list(spreads), middle, xerr=ends, color=colors, error_kw={"linewidth": 0.8})
    panel.set_title(results["model"])
    panel.set_xlabel("ms a step")
    panel.grid(axis="x", alpha=0.3)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=next(iter(models.ONE_EXAMPLE)), choices=list(models.ONE_EXAMPLE))
    parser.add_argument("--variants", nargs="*", default=["*"], help="patterns, such as 'jaxdist * model'")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one variant in one round")
    parser.add_argument("--torch", metavar="PYTHON")
    report.add_arguments(parser)
    args = parser.parse_args()
    variants = chosen(VARIANTS, args.variants, args.torch)
    results = {
        "command": report.command(), "machine": report.machine(args.torch), "rounds": args.rounds, "model": args.model,
        "found": measure(args.model, variants, args.rounds, args.seconds, args.torch, apart=""),
    }  # fmt: skip
    report.write(args, results, markdown, draw)


if __name__ == "__main__":
    main()
