"""Write zero-optimizers.md: how each transformation of optax runs under `jaxdist.zero`, found from the program itself.

Run it after a change of the shards pass or of the catalog (tests/optimizers.py): ``python docs/zero_table.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_ENABLE_X64"] = "1"

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import optimizers
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh

import jaxdist
from jaxdist.step.interpreter import subjaxprs
from jaxdist.step.passes.shards import Gathered
from jaxdist.step.primitives import all_reduce_p, gather_shards_p

FILE = Path(__file__).with_name("zero-optimizers.md")
DEVICES = 4
SHAPES = {"scalar": (), "one": (1,), "vector": (64,), "matrix": (64, 32), "tensor": (32, 4, 8, 16), "tall": (256, 64)}
HEADER = f"""\
# How each transformation runs in shards

Written by zero_table.py from the programs that jaxdist makes of the transformations in tests/optimizers.py: level 2,
{DEVICES} devices, parameters of shapes {", ".join(map(str, SHAPES.values()))}.

- *reductions*: sums, maxima and the like over the devices beyond those of the gradients, and their bytes altogether.
  They travel together where one does not wait for another.
- *gathers*: what a device needs whole besides the new parameters, as a share of the bytes of the parameters, and for
  which operations. In a loop: of one turn.

| transformation | runs on | reductions | gathers |
|---|---|---|---|
"""


class Row(NamedTuple):
    """How a transformation runs.

    Attributes:
      reductions: over the devices, other than of gradients.
      bytes: of them.
      gathers: share of the parameters' bytes.
      operations: for which.
      others: gathers that nothing asked for by name, as a share: those of the new parameters.
    """

    reductions: int
    bytes: int
    gathers: float
    operations: tuple[str, ...]
    others: float

    @property
    def line(self) -> str:
        """The cells of its line, but for the name."""
        if not self.reductions and not self.gathers:
            return "slices, elementwise | | |"
        runs = "slices" if not self.gathers else "slices, part of it whole"
        reduced = f"{self.reductions} ({self.bytes} B)" if self.reductions else ""
        gathered = f"{self.gathers:.0%}: {', '.join(self.operations)}" if self.gathers else ""
        return f"{runs} | {reduced} | {gathered} |"


def row(name: str) -> Row:
    """Of one entry of the catalog."""
    found: list[tuple[ClosedJaxpr, Sequence[Gathered]]] = []
    step: Any = jaxdist.data_parallel(
        optimizers.step_of([name], [2], SHAPES), mesh=Mesh(jax.devices()[:DEVICES], ("data",)), bucket_bytes=0
    )
    step._traced = lambda *program: found.append(program)
    state = optimizers.start([name], SHAPES)
    step.lower(*state, optimizers.batch(0))
    ((closed, gathered),) = found
    parameters = sum(x.nbytes for x in jax.tree.leaves(state[0]))
    equations = list(_equations(closed.jaxpr))
    reductions = [eqn for eqn in equations if _is_reduction(eqn)]
    return Row(
        len(reductions),
        _bytes(reductions),
        sum(g.bytes for g in gathered) / parameters,
        tuple(sorted({g.primitive for g in gathered})),
        (_bytes(e for e in equations if e.primitive is gather_shards_p) - sum(g.bytes for g in gathered)) / parameters,
    )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from _equations(inner)


def _is_reduction(eqn: JaxprEqn) -> bool:
    return (eqn.primitive is all_reduce_p and eqn.params["op"] == "sum") or eqn.primitive.name in ("pmax", "pmin")


def _bytes(eqns: Iterable[JaxprEqn]) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for eqn in eqns for v in eqn.outvars)  # type: ignore[attr-defined]


def table(names: Iterable[str]) -> str:
    """The lines of some entries."""
    return "".join(f"| {name} | {row(name).line}\n" for name in names)


if __name__ == "__main__":
    FILE.write_text(HEADER + table(optimizers.ENTRIES))
