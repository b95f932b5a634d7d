"""The time of a step on two processes: compute, wire and host.

    python benchmarks/where.py --json where.json --markdown where.md --png where.png

- compute: the same step on one rank, with one rank's batch.
- collectives: from `jaxdist.profile`, including waits for the other rank; as a share of the traced steps' time.
- rest: the step minus compute and collectives: copies, and contention between ranks (caches, memory).
- raw: mpi4py's all-reduce of as many bytes as the gradients have.
- host: time until a call returns, with idle devices. XLA's thread shares the core, so it adds up.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Any

import models
import report
from rounds import Job, build, take_turns

PARTS = ("compute", "collectives", "rest")


def measure(model: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure one model, at level 0, over both wires."""
    with contextlib.ExitStack() as stack:
        two, one = (stack.enter_context(Job(["jax_steps:Steps", model], ranks)) for ranks in (2, 1))
        tasks = {
            "mpi": (two, "jaxdist mpi 0"),
            "xla": (two, "jaxdist xla 0"),
            "raw": (two, "raw allreduce"),
            "compute": (one, "jaxdist auto 0"),
        }
        built = build(tasks, seconds)
        times = take_turns(tasks, built, rounds)
        found: dict[str, Any] = {"ms": times, "host_ms": {}, "share": {}}
        for wire in ("mpi", "xla"):
            job, name = tasks[wire]
            steps = min(built[wire].steps, 50)
            found["host_ms"][wire] = [job.milliseconds("dispatch", name, steps) for _ in range(rounds)]
            replies = job.ask("profile", name, steps=steps)
            found["share"][wire] = statistics.mean(r["collectives"] for r in replies)
    return found


def parts(found: dict[str, Any], wire: str) -> dict[str, float]:
    """Return milliseconds of a step over one wire and of its parts; medians of rounds."""
    times = found["ms"]
    step, compute = (statistics.median(times[name]) for name in (wire, "compute"))
    collectives = step * found["share"][wire]
    return {
        "step": step,
        "compute": compute,
        "collectives": collectives,
        "rest": step - compute - collectives,
        "raw": statistics.median(times["raw"]),
        "host": statistics.median(found["host_ms"][wire]),
    }


def markdown(results: dict[str, Any]) -> str:
    """Return a table with one row per model and wire."""
    rows = []
    for model, found in results["models"].items():
        for wire in ("mpi", "xla"):
            p = parts(found, wire)
            shares = [f"{report.number(p[name])} ({p[name] / p['step']:.0%})" for name in PARTS]
            rows.append([f"{model}, {wire}", report.number(p["step"]), *shares,
                         report.number(p["raw"]), report.number(p["host"])])  # fmt: skip
    head = ["level 0", "step, ms", "compute (1 rank)", "in collectives", "rest", "raw all-reduce", "host, in a call"]
    return f"Medians of {results['rounds']} rounds, ms a step and shares of it.\n\n" + report.table(head, rows)


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot stacked shares of each step."""
    figure.suptitle(f"Where the time of a step goes, two ranks, {report.processor(results)}")
    panel = figure.subplots()
    bars = [(f"{model}, {wire}", parts(f, wire)) for model, f in results["models"].items() for wire in ("mpi", "xla")]
    labels = [label.replace("mpi", "MPI").replace("xla", "gloo") for label, _ in bars]
    reached = [0.0] * len(bars)
    for name, color in zip(PARTS, (report.OURS, report.TORCH, report.OTHERS), strict=True):
        shares = [max(0.0, 100 * p[name] / p["step"]) for _, p in bars]
        panel.barh(labels, shares, left=reached, label=name, color=color)
        reached = [a + b for a, b in zip(reached, shares, strict=True)]
    for row, ((_, p), end) in enumerate(zip(bars, reached, strict=True)):
        panel.text(end + 1, row, f"{report.number(p['step'])} ms", va="center")
    panel.axvline(100, color="black", linewidth=1)
    panel.invert_yaxis()
    panel.grid(visible=False, axis="y")
    panel.set(xlim=(0, 1.15 * max(reached)), xlabel="% of the step")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(models.MODELS), choices=[*models.MODELS, *models.TINY])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one variant in one round")
    report.add_arguments(parser)
    args = parser.parse_args()
    results = {
        "command": report.command(), "machine": report.machine(), "rounds": args.rounds,
        "models": {model: measure(model, args.rounds, args.seconds) for model in args.models},
    }  # fmt: skip
    report.write(args, results, markdown, draw)


if __name__ == "__main__":
    main()
