"""Step time on two ranks of a single 1024-token example, which data parallelism cannot divide.

    python benchmarks/one_example.py --torch PYTHON --json one_example.json --markdown one_example.md

A GPT of 10M parameters, one core per rank. `jaxdist.parallel`, `jit` with sharding constraints over gloo, and torch's
`parallelize_module` (gloo) divide its sequence or its layers, the layers like Megatron: heads and
columns, then rows. They should be faster than one rank alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import models
import report
from step_time import TOLERANCE, Comparison, chosen, measure

AXES = ("sequence", "model")
VARIANTS: dict[str, tuple[str, str]] = {
    **{f"jaxdist {wire} {axis}": ("jax 2", f"jaxdist {wire} {axis}") for axis in AXES for wire in ("mpi", "xla")},
    **{f"constraints {axis}": ("jax 2", f"constraints {axis}") for axis in AXES},
    "torch parallelize_module": ("torch 2", "parallelize_module"),
    "1 rank: jit": ("jax 1", "jit"),
    "1 rank: torch": ("torch 1", "plain"),
}


def _comparisons() -> list[Comparison]:
    """Compare jaxdist's variants with one rank, and with alternatives that divide equally."""
    found = [Comparison("1 rank: jit", ("1 rank: torch",)), Comparison("torch parallelize_module", ("1 rank: torch",))]
    for axis in AXES:
        found.append(Comparison(f"constraints {axis}", ("1 rank: jit",)))
        for mine in (f"jaxdist {wire} {axis}" for wire in ("mpi", "xla")):
            found.append(Comparison(mine, ("1 rank: jit",)))
            found.append(Comparison(mine, (f"constraints {axis}",)))
            if axis == "model":
                found.append(Comparison(mine, ("torch parallelize_module",)))
    return found


def markdown(results: dict[str, Any]) -> str:
    """Return the tables."""
    model, found = results["model"], results["found"]
    ms = found["ms"]
    ratios = [[c.title, report.ratio(ms, c.one, c.other)] for c in _comparisons() if report.ratio(ms, c.one, c.other)]
    times = [[label, report.spread(each), report.number(found["first_call_s"][label])] for label, each in ms.items()]
    intro = (
        f"Medians of {results['rounds']} rounds (smallest–largest). The losses of the first three steps agree between "
        f"all variants to {found['largest_difference']:.1e} (relative; {TOLERANCE:g} is allowed)."
    )
    return "\n\n".join(
        [
            intro,
            report.table(["", "ms a step", "first call, s"], times),
            "Ratios within rounds.",
            report.table(["", model], ratios),
        ]
    )


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot bars of step times."""
    figure.suptitle(f"Time of a step with one example on two ranks, {report.processor(results)} (shorter is better)")
    figure.set_size_inches(11, 4.5)
    found = {x.replace("mpi", "MPI").replace("xla", "gloo"): each for x, each in results["found"]["ms"].items()}
    report.bars(figure.subplots(), {x: report.spread(each) for x, each in found.items()}, "ms")


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
