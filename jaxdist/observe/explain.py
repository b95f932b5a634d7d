"""`explain`: what a step moves between devices, what every device computes again, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdist.placements.report import Row, choices, rows, table
from jaxdist.step.data_parallel import data_parallel
from jaxdist.step.decorated import DataParallel


@dataclass(frozen=True)
class Explanation:
    """A table of what moves, for a person as text."""

    rows: tuple[Row, ...]  # most bytes first, then what is repeated
    # the leaves of the state that the model axis cuts, by name, and the dimension
    cut: Mapping[str, int] = field(default_factory=dict)
    # the ten options that matter most, of operations and of leaves that the model axis may cut: which are taken, and
    # what the other way would take more of the time of a step and of the bytes that a device sends, as estimated for
    # these devices
    choices: tuple[str, ...] = ()
    mesh: str = ""  # which was chosen, and why; "": it was given

    def __str__(self) -> str:
        cut = [f"{name} is cut along dimension {dim}" for name, dim in self.cut.items()]
        parts = {"the axis 'model':": cut, "estimated for these devices:": self.choices}
        said = [line for title, lines in parts.items() if lines for line in (title, *(f"  {line}" for line in lines))]
        return "\n".join([*[f"mesh: {self.mesh}"] * bool(self.mesh), table(self.rows), *said])

    __repr__ = __str__


def explain(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say what a step moves between devices; nothing is sent or compiled, and no arrays are needed.

    Reductions of gradients and losses are what data parallelism is. What couples examples otherwise (a similarity
    matrix, a sort, a shuffle) moves activations, or is computed by every device: the table names the operation, the
    line of your code, the bytes and what would avoid it. ``JAXDIST_LOG=placements`` prints it for each step that is
    compiled. On a mesh with a model axis it lists the leaves of the state that this one cuts; with ``mesh="auto"`` it
    says which mesh was chosen. Where an operation can run in several ways (few examples travel in place of a large
    weight, heads in place of keys and values), it says which is taken, and what the other one would cost.

    Args:
      step: decorated, or a plain step, which is decorated with the defaults.
      *args: as of the step; `jax.ShapeDtypeStruct` will do.
      **kwargs: likewise.

    Returns:
      An `Explanation`; ``print`` it.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> step = lambda w, batch: w - 0.1 * jnp.mean(batch, 0)
      >>> isinstance(str(jaxdist.explain(step, jnp.ones(3), jnp.ones((8, 3)))), str)
      True
    """
    decorated: DataParallel = step if isinstance(step, DataParallel) else data_parallel(step)  # type: ignore[assignment]
    placed = decorated.placed(*args, **kwargs)
    cut = decorated.program(*args, **kwargs).placed.cut_by_model()
    return Explanation(tuple(rows(placed)), cut, tuple(choices(placed)), decorated.why)
