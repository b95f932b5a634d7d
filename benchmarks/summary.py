"""docs/performance.md: the main results on two screens. benchmarks/results/tables.md has the rest."""

from __future__ import annotations

from typing import Any

import report
import where

COLUMNS = {
    "jaxdist mpi 0": "jaxdist, MPI", "jaxdist xla 0": "jaxdist, gloo", "gloo flat": "JAX by hand, gloo",
    "torch DDP": "torch DDP", "jaxdist mpi 3": "jaxdist, MPI, level 3", "torch FSDP2": "torch FSDP2",
}  # fmt: skip
PEERS = [
    ("DDP", "jaxdist mpi 0", "torch DDP"), ("DDP over gloo", "jaxdist xla 0", "torch DDP"),
    ("ZeroRedundancyOptimizer", "jaxdist mpi 1", "torch ZeRO"), ("FSDP2", "jaxdist mpi 3", "torch FSDP2"),
    ("one rank alone", "1 rank: jaxdist", "1 rank: torch"),
    ("one rank with both batches", "1 rank x2: jaxdist", "1 rank x2: torch"),
    ("DDP, fused Adam", "jaxdist mpi 0", "torch DDP fused"),
]  # fmt: skip
"""Comparisons with torch, and their two variants."""


def page(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the Markdown page.

    Args:
      found: each benchmark's results, one item per processor.
    """
    sections = [START]
    for name, section in (("step_time", _steps), ("where", _parts), ("step_time", _scaling)):
        if name in found:
            sections.append(section(found[name]))
    return "\n".join([*sections, END])


START = """# Performance

Two processes ran on two cores of one CPU, with one thread each. Nobody has measured jaxdist on several GPUs. The models
are small, so communication weighs more than in large ones.

All variants train the same weights on the same batches in float32 with Adam, and their losses agree. They take turns;
each number is the median of 7 rounds.
"""
END = """## What else to expect

- **The first call compiles**, in 1 to 8 seconds for these models; torch takes about one.
- **Each call** costs the host 15 to 70 µs more than a call of `jax.jit`, for 10 to 200 arrays of state.

[All tables](../benchmarks/results/tables.md) cover every variant, memory, collectives, and estimates. To
measure yours: `python benchmarks --torch PYTHON`.
"""


def _steps(found: list[dict[str, Any]]) -> str:
    first = found[0]
    rows = []
    for name, m in first["models"].items():
        medians = {v: report.spread(m["ms"][v]).median for v in COLUMNS if v in m["ms"]}
        rows.append([f"{name}", *(report.number(medians[v]) if v in medians else None for v in COLUMNS)])
    slower = []
    for results in found:
        note = f" {results['note']}" if "note" in results else ""
        slower.append(f"\n**{report.processor(results)}.**{note}\n")
        for title, mine, peer in PEERS:
            ratios = {name: report.ratio(m["ms"], mine, (peer,)) for name, m in results["models"].items()}
            there = [f"{name} {ratio}" for name, ratio in ratios.items() if ratio and ratio.median > 1]
            if there:
                slower.append(f"- {title}: {', '.join(there)}")
    return f"""## Step time

Milliseconds per step on an {report.processor(first)}. Level 3 shards parameters and optimizer state, as FSDP2 does.

{report.table(["", *COLUMNS.values()], rows)}

![Time of a step on two ranks](img/step_time.png)

"JAX by hand" sends all gradients in one buffer. MLP-deep has 100 layers. LeNet's convolutions are matrix products,
LeNet-conv's are XLA's.

PyTorch was faster here (jaxdist's time divided by PyTorch's, with the range; over MPI unless noted):
{chr(10).join(slower)}
"""


def _parts(found: list[dict[str, Any]]) -> str:
    shares = {name: where.parts(m, "mpi") for name, m in found[0]["models"].items()}
    compute, collectives = (
        sorted((p[part] / p["step"], name) for name, p in shares.items()) for part in ("compute", "collectives")
    )
    return f"""## Where the time goes

![Where the time of a step goes](img/where.png)

*Compute* is the same step on one rank with that rank's batch. *Collectives* includes waiting for the other rank.
Over MPI, compute is {compute[0][0]:.0%} ({compute[0][1]}) to {compute[-1][0]:.0%} ({compute[-1][1]}), and
collectives are {collectives[0][0]:.0%} ({collectives[0][1]}) to {collectives[-1][0]:.0%} ({collectives[-1][1]}).
"""


def _scaling(found: list[dict[str, Any]]) -> str:
    def between(alone: str) -> str:
        ratios = [report.ratio(m["ms"], alone, ("jaxdist mpi 0",)) for m in found[0]["models"].values()]
        medians = sorted(r.median for r in ratios if r)
        return f"{report.number(medians[0])} to {report.number(medians[-1])}" if medians else "not measured"

    return f"""## Scaling

![Scaling from one rank to two](img/scaling.png)

Over MPI, two ranks reach {between("1 rank: jaxdist")} of ideal throughput with a fixed batch per rank (left), and are
{between("1 rank x2: jaxdist")} times as fast as one with a fixed total batch (right).
"""
