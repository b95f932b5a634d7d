"""Write zero-optimizers.md: how each transformation of optax runs under `jaxdist.zero`, found from the program itself.

Run it after a change of the placements or of the catalog (tests/support/optimizers.py): ``python docs/zero_table.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_ENABLE_X64"] = "1"

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import jax
import optimizers
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh

import jaxdist
from jaxdist.ir.interpreter import subjaxprs
from jaxdist.ir.primitives import gather_shards_p
from jaxdist.placements.plan import Placed, nbytes

FILE = Path(__file__).with_name("zero-optimizers.md")
DEVICES = 4
SHAPES = {"scalar": (), "one": (1,), "vector": (64,), "matrix": (64, 32), "tensor": (32, 4, 8, 16), "tall": (256, 64)}
HEADER = f"""\
# How each transformation runs in shards

Written by zero_table.py from the programs that jaxdist makes of the transformations in tests/support/optimizers.py:
level 2, {DEVICES} devices, parameters of shapes {", ".join(map(str, SHAPES.values()))}.

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
    found: list[tuple[ClosedJaxpr, Placed]] = []
    step: Any = jaxdist.data_parallel(
        optimizers.step_of([name], [2], SHAPES), mesh=Mesh(jax.devices()[:DEVICES], ("data",)), bucket_bytes=0
    )
    step._traced = lambda *program: found.append(program)
    state = optimizers.start([name], SHAPES)
    step.lower(*state, optimizers.batch(0))
    ((closed, placed),) = found
    parameters = sum(x.nbytes for x in jax.tree.leaves(state[0]))
    reduced = [move.aval for move in placed.moves if move.kind == "all-reduce" and not move.node.backward]
    reduced += _results(closed.jaxpr, "pmax", "pmin")
    ends = {id(node) for node in placed.block.nodes if {*node.outs} & {*placed.block.outputs}}
    new = [move for move in placed.own if id(move.node) in ends and not move.why]  # state, whole for the next step
    gathered = [m for m in placed.moves if m.kind == "all-gather" and m.stored and m not in new]
    own = sum(move.bytes for move in gathered)
    others = sum(map(nbytes, _results(closed.jaxpr, gather_shards_p.name))) - own
    return Row(
        len(reduced),
        sum(map(nbytes, reduced)),
        own / parameters,
        tuple(sorted({move.node.name for move in gathered})),
        others / parameters,
    )


def _results(jaxpr: Jaxpr, *names: str) -> list[Any]:
    """The types of what these primitives make."""
    return [v.aval for eqn in _equations(jaxpr) if eqn.primitive.name in names for v in eqn.outvars]


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from _equations(inner)


def table(names: Iterable[str]) -> str:
    """The lines of some entries."""
    return "".join(f"| {name} | {row(name).line}\n" for name in names)


if __name__ == "__main__":
    FILE.write_text(HEADER + table(optimizers.ENTRIES))
