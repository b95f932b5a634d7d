"""docs/performance.md: the main results on two screens. benchmarks/results/tables.md has the rest."""

from __future__ import annotations

from typing import Any

import report
from step_time import COMPARISONS, Comparison

COLUMNS = {
    "jaxdist mpi 0": "jaxdist, MPI", "jaxdist xla 0": "jaxdist, gloo", "gloo flat": "JAX by hand, gloo",
    "torch DDP": "torch DDP", "jaxdist mpi 3": "jaxdist, MPI, level 3", "torch FSDP2": "torch FSDP2",
}  # fmt: skip


def page(found: list[dict[str, Any]]) -> str:
    """Return the Markdown page of the step times on each processor."""
    return "\n".join([START, *([_steps(found), _scaling(found[0]["models"])] if found else []), END])


START = """# Performance

Two processes ran on two cores of one CPU, with one thread each. Nobody has measured jaxdist on several GPUs. The models
are small, so communication weighs more than in large ones.

All variants train the same weights on the same batches in float32 with Adam, and their losses agree. They take turns;
each number is the median of 7 rounds.
"""
END = """## What else to expect

- **The first call compiles**, in 1 to 8 seconds for these models; torch takes about one.
- **Each call** costs the host 15 to 70 µs more than a call of `jax.jit`, for 10 to 200 arrays of state.
- **Over MPI**, the same step on one rank takes 49% (MLP-0.4M) to 94% (MLP-deep) of the time, and collectives 4% (LeNet)
  to 23% (MLP-deep), which includes waiting for the other rank.

[All tables](../benchmarks/results/tables.md) cover every variant, memory, collectives, and estimates. To
measure yours: `python benchmarks --torch PYTHON`.
"""


def _steps(found: list[dict[str, Any]]) -> str:
    first = found[0]
    rows = []
    for name, m in first["models"].items():
        rows.append(
            [name, *(report.number(report.spread(m["ms"][v]).median) if v in m["ms"] else None for v in COLUMNS)]
        )
    slower = []
    for results in found:
        note = f" {results['note']}" if "note" in results else ""
        slower.append(f"\n**{report.processor(results)}.**{note}\n")
        slower += [f"- {c.peer}: {models}" for c in COMPARISONS if c.peer and (models := c.slower(results["models"]))]
    return f"""## Step time

Milliseconds per step on an {report.processor(first)}. Level 3 shards parameters and optimizer state, as FSDP2 does.

{report.table(["", *COLUMNS.values()], rows)}

![Time of a step on two ranks](img/step_time.png)

"JAX by hand" sends all gradients in one buffer. MLP-deep has 100 layers. LeNet's convolutions are matrix products,
LeNet-conv's are XLA's.

PyTorch was faster here (jaxdist's time divided by PyTorch's, with the range; over MPI unless noted):
{chr(10).join(slower)}
"""


def _scaling(found: dict[str, Any]) -> str:
    def between(alone: str) -> str:
        medians = sorted(r for r in Comparison(alone, ("jaxdist mpi 0",)).medians(found) if r is not None)
        return f"{report.number(medians[0])} to {report.number(medians[-1])}" if medians else "not measured"

    return f"""## Scaling

![Scaling from one rank to two](img/scaling.png)

Over MPI, two ranks reach {between("1 rank: jaxdist")} of ideal throughput with a fixed batch per rank (left), and are
{between("1 rank x2: jaxdist")} times as fast as one with a fixed total batch (right).
"""
