"""docs/performance.md: the main results on two screens. benchmarks/results/tables.md has the rest."""

from __future__ import annotations

from typing import Any

import report
from step_time import COMPARISONS, Comparison

COLUMNS = {
    "jaxdist mpi 0": "jaxdist, MPI", "jaxdist xla 0": "jaxdist, gloo", "gloo flat": "JAX by hand, gloo",
    "torch DDP": "torch DDP", "jaxdist mpi 3": "jaxdist, MPI, level 3", "torch FSDP2": "torch FSDP2",
}  # fmt: skip


# The time of a step, divided by its indispensable parts (processors change this little), or by torch.
RATIOS = {
    "`jax.jit` and a bare all-reduce": Comparison("jaxdist mpi 0", ("1 rank: jit", "raw allreduce")),
    "torch DDP": Comparison("jaxdist mpi 0", ("torch DDP",)),
    "torch FSDP2": Comparison("jaxdist mpi 3", ("torch FSDP2",)),
}


def page(found: dict[str, Any] | None) -> str:
    """Return the Markdown page of the step times."""
    parts = [_steps(found), _scaling(found["models"]), _first_calls(found["models"])] if found else []
    return "\n".join([START, *parts, END])


START = """# Performance

Two processes ran on two cores of one CPU, with one thread each. The models are small, so communication weighs more than
in large ones.

All variants train the same weights on the same batches in float32 with Adam, and take turns; numbers are medians.
"""
END = """- **Each call** costs the host 25 to 140 µs more than a call of `jax.jit`, for 10 to 200 arrays of state.

[All tables](../benchmarks/results/tables.md) cover every variant, memory, collectives, and estimates.
"""


def _steps(found: dict[str, Any]) -> str:
    models = found["models"]
    cell = lambda m, label: report.number(report.spread(m["ms"][label]).median) if label in m["ms"] else None
    rows = [[name, *(cell(m, label) for label in COLUMNS)] for name, m in models.items()]
    spreads = zip(models, *(comparison.ratios(models).values() for comparison in RATIOS.values()), strict=True)
    slower = [f"- {c.peer}: {names}" for c in COMPARISONS if c.peer and (names := c.slower(models))]
    return f"""## Step time

Milliseconds per step on an {report.processor(found)}. Level 3 shards parameters and optimizer state, as FSDP2 does.

{report.table(["", *COLUMNS.values()], rows)}

![Time of a step on two ranks](img/step_time.png)

"JAX by hand" sends all gradients in one buffer. MLP-deep has 100 layers.

As multiples, with ranges over rounds (the first depends least on the processor):

{report.table(["", *RATIOS], spreads)}

PyTorch was faster here:

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


def _first_calls(found: dict[str, Any]) -> str:
    def seconds(label: str) -> str:
        times = sorted(m["first_call_s"][label] for m in found.values() if label in m["first_call_s"])
        return f"{report.number(times[0])} to {report.number(times[-1])} s" if times else "not measured"

    return f"""## What else to expect

- **The first call compiles**: over MPI in {seconds("jaxdist mpi 0")} for these models, at level 3 in
  {seconds("jaxdist mpi 3")}; `jax.jit` on one rank takes {seconds("1 rank: jit")},
  torch's DDP {seconds("torch DDP")}."""
