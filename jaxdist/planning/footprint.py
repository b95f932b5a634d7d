"""The memory that a device needs for a state, by kind."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.table import Table

from jaxdist.placements.model.layouts import HOST, Padded, physical
from jaxdist.text import text_of


@dataclass(frozen=True)
class Row:
    """The bytes of one kind of state."""

    kind: str  # the part of the tree: ``params``, ``opt_state``, …
    leaves: int  # number of arrays
    whole: int  # bytes of the arrays as you see them
    device: int  # bytes of them on one device
    replicated: int  # bytes of arrays that every device holds whole
    padding: int  # bytes that only make a dimension divisible
    host: int = 0  # bytes in host memory for one device (`jaxdist.zero`, ``offload=True``)


@dataclass(frozen=True)
class Memory:
    """A table of bytes per device; prints as a table."""

    rows: tuple[Row, ...]  # one per kind
    compiled: dict[str, int]  # XLA's figures for a compiled step: name -> bytes per device

    @property
    def total(self) -> Row:
        """Return the sum of the rows."""
        names = [field.name for field in dataclasses.fields(Row) if field.name != "kind"]
        return Row("total", *(sum(getattr(row, name) for row in self.rows) for name in names))

    def __str__(self) -> str:
        table = Table(title="bytes on one device")
        table.add_column("")
        away = bool(self.total.host)
        for name in ("leaves", "whole", "on a device", "replicated", "padding", *["in host memory"] * away):
            table.add_column(name, justify="right")
        for row in (*self.rows, self.total):
            if row.kind == "total":
                table.add_section()
            sizes = map(readable, (row.whole, row.device, row.replicated, row.padding, *[row.host] * away))
            table.add_row(row.kind, str(row.leaves), *sizes)
        if self.compiled:
            table.add_section()
        for name, size in self.compiled.items():
            table.add_row(f"compiled step: {name}", "", "", readable(size), "", "")
        return text_of(table, width=100)


def memory(tree: Any, compiled: Any = None) -> Memory:
    """Measure the bytes of a state on each device, for each entry or attribute of the tree's root.

    Args:
      tree: a pytree of arrays, such as a state that a decorated step returned.
      compiled: the step, ``step.lower(*args).compile()``, to add XLA's figures.

    Returns:
      A table. ``print`` it, or use its `rows` and `total`.

    Example:
      >>> import jax.numpy as jnp, jaxdist
      >>> state = {"params": jnp.ones((4, 5), jnp.float32), "step": jnp.zeros((), jnp.int32)}
      >>> jaxdist.planning.memory(state).total.whole
      84
    """
    kinds: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kinds.setdefault(jax.tree_util.keystr(path[:1], simple=True) or "all", []).append(leaf)
    figures: dict[str, int] = {}
    if compiled is not None:
        analysis = compiled.memory_analysis()
        figures = {
            "arguments": analysis.argument_size_in_bytes,
            "new results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            "temporaries": analysis.temp_size_in_bytes,
        }
        if analysis.host_argument_size_in_bytes:
            figures["arguments in host memory"] = analysis.host_argument_size_in_bytes
    return Memory(tuple(_row(kind, leaves) for kind, leaves in kinds.items()), figures)


def _row(kind: str, leaves: list[Any]) -> Row:
    whole = device = replicated = padding = host = 0
    for leaf in leaves:
        array = physical(leaf)
        itemsize = getattr(array, "dtype", np.asarray(0).dtype).itemsize
        size = math.prod(np.shape(leaf)) * itemsize
        held = size
        if isinstance(array, jax.Array):
            held = math.prod(array.sharding.shard_shape(array.shape)) * itemsize
        whole += size
        if isinstance(leaf, Padded):
            padding += held - round(size * held / (math.prod(array.shape) * itemsize))
        if isinstance(array, jax.Array) and array.sharding.memory_kind == HOST:
            host += held
            continue
        device += held
        if held == size:
            replicated += held
    return Row(kind, len(leaves), whole, device, replicated, padding, host)


def readable(size: float) -> str:
    """Format bytes with three digits."""
    power = next((k for k in range(3) if size < 999.5 * 1024**k), 3)
    return f"{digits(size / 1024**power, 3)} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def digits(x: float, count: int = 2) -> str:
    """Format a number with this many significant digits."""
    if x:
        x = round(x, count - 1 - math.floor(math.log10(abs(x))))
    return f"{x:,.0f}" if abs(x) >= 10 ** (count - 1) and x < 1e9 else f"{x:g}".replace("e+", "e")
