"""Step time by bucket size and wire dtype, compared with sending each gradient alone.

    python benchmarks/buckets.py --json buckets.json --markdown buckets.md --png buckets.png

Two ranks with one core each; compared variants take turns, as in step_time.py. The values of
`jaxdist.communicators.default_bucket_bytes` come from this.
"""

from __future__ import annotations

import argparse
from typing import Any

import models
import report
import step_time

MODELS = ("MLP-10M", "MLP-0.4M", "MLP-deep", "GPT-10M")
KIB = (0, 64, 256, 1024, 4096, 16384, 65536)


def variants(communicators: list[str], kib: list[int], compress: list[str]) -> dict[str, tuple[str, str]]:
    """Map labels to a job and its name there."""
    options = [f"bucket={k << 10}" for k in kib] + [f"compress={c}" for c in compress]
    return {f"{c} {option}": ("jax 2", f"jaxdist {c} 0 {option}") for c in communicators for option in options}


def _said(label: str) -> str:
    communicator, option = label.split()
    kind, value = option.split("=")
    what = value if kind == "compress" else f"{int(value) >> 10} KiB" if value != "0" else "each alone"
    return f"{communicator}, {what}"


def _ratios(results: dict[str, Any], label: str) -> list[Any]:
    """Return ratios to sending each gradient alone over the same wire, by model."""
    alone = f"{label.split()[0]} bucket=0"
    return [report.ratio(m["ms"], label, (alone,)) for m in results["models"].values()]


def markdown(results: dict[str, Any]) -> str:
    """Return a table of times and ratios, one row per setting."""
    found = results["models"].values()
    labels = list(next(iter(found))["ms"])
    rows = []
    for label in labels:
        cells = zip(found, _ratios(results, label), strict=True)
        rows.append([_said(label), *(f"{report.number(report.spread(m['ms'][label]).median)}; {r}" for m, r in cells)])
    return (
        f"ms a step, median of {results['rounds']} rounds; and the ratio to each gradient alone (smallest–largest).\n\n"
        + report.table(["", *results["models"]], rows)
    )


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot the ratio over the bucket size, one panel per wire."""
    figure.suptitle(f"Time of a step by bucket size, {report.processor(results)} (lower is better)")
    labels = [x for x in next(iter(results["models"].values()))["ms"] if "bucket=" in x]
    wires = list(dict.fromkeys(label.split()[0] for label in labels))
    for panel, wire in zip(figure.subplots(1, len(wires), sharey=True, squeeze=False)[0], wires, strict=True):
        mine = [label for label in labels if label.split()[0] == wire and not label.endswith("=0")]
        sizes = [int(label.partition("=")[2]) / 2**20 for label in mine]
        for i, name in enumerate(results["models"]):
            panel.plot(sizes, [_ratios(results, label)[i].median for label in mine], "o-", label=name)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("bucket, MiB")
        panel.set_title(wire)
    figure.axes[0].set_ylabel("step time / that with each gradient alone")
    figure.axes[0].legend()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=[*models.MODELS, *models.TINY])
    parser.add_argument("--communicator", dest="communicators", nargs="*", default=["mpi", "xla"])
    parser.add_argument("--kib", nargs="*", type=int, default=list(KIB), help="must have 0, which is compared to")
    parser.add_argument("--compress", nargs="*", default=[], help="of: bf16, fp16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one variant in one round")
    report.add_arguments(parser)
    args = parser.parse_args()
    chosen = variants(args.communicators, args.kib, args.compress)
    tolerance = 0.05 if args.compress else step_time.TOLERANCE
    results = {"command": report.command(), "machine": report.machine(), "rounds": args.rounds, "models": {}}
    for model in args.models:
        results["models"][model] = step_time.measure(model, chosen, args.rounds, args.seconds, tolerance=tolerance)
    report.write(args, results, markdown, draw)


if __name__ == "__main__":
    main()
