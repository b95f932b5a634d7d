"""Write zero-optimizers.md: how each transformation of optax runs under `jaxdist.zero`, found from the program itself.

Run it after a change of the placements or of the catalog (tests/harness/optimizers.py): ``python docs/zero_table.py``.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_ENABLE_X64"] = "1"

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
from catalogue import optimizers
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh

import jaxdist
from jaxdist.ir.interpreter import subjaxprs
from jaxdist.ir.primitives import gather_shards_p
from jaxdist.placements.owners import owners_p
from jaxdist.placements.strategy import Placed, nbytes

FILE = Path(__file__).with_name("zero-optimizers.md")
DEVICES = 4
SHAPES = {"scalar": (), "one": (1,), "vector": (64,), "matrix": (64, 32), "tensor": (32, 4, 8, 16), "tall": (256, 64)}
HEADER = f"""\
# How each optimizer runs in shards

Every optax transformation works under [`jaxdist.zero`](zero.md). Most treat each entry of a parameter by itself, and
send only gradients and new parameters. The table says what the others send besides.

The table is made from their programs, at level 2 on {DEVICES} devices, with parameters of the shapes
{", ".join(map(str, SHAPES.values()))}.

- *reductions*: sums and maxima over the devices, and their bytes. They travel together if none waits for another.
- *gathers*: what a device needs in full, as a share of the parameters' bytes, and for which operations; in a loop per
  iteration.
- *owners*: [whole matrices](zero.md#whole-matrices-owners), each of which travels to one device and back.

| transformation | runs on | reductions | gathers |
|---|---|---|---|
"""
ELEMENTWISE = "slices, elementwise | | |"


class Row(NamedTuple):
    """How a transformation runs.

    Attributes:
      reductions: over the devices, other than of gradients.
      bytes: of them.
      gathers: share of the parameters' bytes.
      operations: for which.
      others: gathers that nothing asked for by name, as a share: those of the new parameters.
      owners: whether matrices have them.
    """

    reductions: int
    bytes: int
    gathers: float
    operations: tuple[str, ...]
    others: float
    owners: bool

    @property
    def line(self) -> str:
        """The cells of its line, but for the name."""
        if not self.reductions and not self.gathers and not self.owners:
            return ELEMENTWISE
        runs = "slices" + ", partly gathered" * bool(self.gathers) + ", owners" * self.owners
        reduced = f"{self.reductions} ({self.bytes} B)" if self.reductions else ""
        gathered = f"{self.gathers:.0%}: {', '.join(self.operations)}" if self.gathers else ""
        return f"{runs} | {reduced} | {gathered} |"


def row(name: str) -> Row:
    """Of one entry of the catalog."""
    found: list[tuple[ClosedJaxpr, Placed]] = []
    step: Any = jaxdist.data_parallel(
        optimizers.step_of([name], [2], SHAPES), mesh=Mesh(jax.devices()[:DEVICES], ("data",)), bucket_bytes=0
    )
    step._traced = lambda _, closed, placed: found.append((closed, placed))
    state = optimizers.start([name], SHAPES)
    step.lower(*state, optimizers.batch(0))
    ((closed, (placed,)),) = found
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
        any(move.node.name == owners_p.name for move in placed.moves),
    )


def _results(jaxpr: Jaxpr, *names: str) -> list[Any]:
    """The types of what these primitives make."""
    return [v.aval for eqn in _equations(jaxpr) if eqn.primitive.name in names for v in eqn.outvars]


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from _equations(inner)


def page(names: Iterable[str]) -> str:
    """The page: a table of the entries that send something, and the names of the others."""
    lines = {name: row(name).line for name in names}
    rows = "".join(f"| {name} | {line}\n" for name, line in lines.items() if line != ELEMENTWISE)
    others = ", ".join(f"`{name}`" for name, line in lines.items() if line == ELEMENTWISE)
    return f"{HEADER}{rows}\n## Elementwise\n\n{textwrap.fill(others, 120, break_on_hyphens=False)}\n"


if __name__ == "__main__":
    FILE.write_text(page(optimizers.ENTRIES))
