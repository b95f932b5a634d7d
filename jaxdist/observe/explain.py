"""`explain`: the communication of a step, work that every device repeats, and the reasons."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxdist.compilation.placed import PlacedStep
from jaxdist.placements.report import Row, rows, text
from jaxdist.sources import OURS
from jaxdist.step.data_parallel import data_parallel
from jaxdist.step.decorated import DataParallel


@dataclass(frozen=True)
class Explanation:
    """The communication of a step; prints as text."""

    rows: tuple[Row, ...]  # communication, most bytes first, then repeated work
    cut: Mapping[str, int]  # state leaves that the model axis cuts, by name, with the dimension
    mesh: str  # the chosen mesh and the reason, or "" if it was given
    verbose: bool
    _placed: PlacedStep

    @property
    def program(self) -> str:
        """The program of one device as a jaxpr, with your lines, after the arguments and how each lies on the mesh."""
        names, types = self._placed.signature.names, self._placed.physical_types
        text = self._placed.emitted.program.jaxpr.pretty_print(source_info=True)
        text = re.sub(rf" *# *({re.escape(OURS)}.*)?$", "", text, flags=re.MULTILINE)  # lines of ours
        arguments = re.search(r"^{ lambda [^;]*;(.*?)\. let", text, re.MULTILINE | re.DOTALL)
        variables = re.findall(r"(\w+):", arguments[1] if arguments else "")
        triples = zip(variables, names, types, strict=True)
        lines = [f"# {v} = {name}: {x.dtype}{[*x.shape]}, {x.sharding.spec}" for v, name, x in triples]
        return "\n".join([f"# one device of {dict(self._placed.run_mesh.shape)}", *lines, text])

    def __str__(self) -> str:
        mesh = [f"mesh: {self.mesh}"] * bool(self.mesh)
        if not self.verbose:
            cut = [f"the axis 'model' cuts {len(self.cut)} leaves of the state"] * bool(self.cut)
            return "\n".join([*mesh, text(self.rows, False), *cut, "explain(..., verbose=True) shows everything"])
        cut = [f"the axis 'model' cuts {name} along dimension {dim}" for name, dim in self.cut.items()]
        return "\n".join([*mesh, text(self.rows, True), *cut])

    __repr__ = __str__


def explain(step: Callable[..., Any], *args: Any, verbose: bool = False, **kwargs: Any) -> Explanation:
    """List the communication of a step, without sending or compiling anything.

    The text shows the bytes per mesh axis, and for the largest ones the operation, your line, and how to avoid them.

    Args:
      step: a decorated step, or a plain step, which is decorated with the defaults.
      *args: arguments of the step; `jax.ShapeDtypeStruct` works.
      verbose: list everything, including the leaves that the model axis cuts.
      **kwargs: keyword arguments of the step.

    Returns:
      An `Explanation`; ``print`` it. Its `program` is the program of one device, as text.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> step = lambda w, batch: w - 0.1 * jnp.mean(batch, 0)
      >>> isinstance(str(jaxdist.explain(step, jnp.ones(3), jnp.ones((8, 3)))), str)
      True
    """
    decorated: DataParallel = step if isinstance(step, DataParallel) else data_parallel(step)  # type: ignore[assignment]
    placed = decorated.program(*args, **kwargs).placed
    return Explanation(tuple(rows(placed.emitted.propagations)), placed.cut_by_model(), decorated.why, verbose, placed)
