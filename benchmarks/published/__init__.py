"""Published training steps as they stand, on small data: one file a source, each entry a training loop.

Nothing of them is copied: their files are read from a folder of checkouts (see `published.source`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

SOURCES = ("flax", "optax", "haiku", "numpyro", "equinox", "diffrax", "cleanrl", "nanodo", "vit", "jax")


class Run(NamedTuple):
    """What a training loop runs with.

    Attributes:
      decorate: the decorator, in place of the published one.
      zero: of an optax transformation, the same in shards, or as it is.
      part: of a whole batch, the rows that this process passes.
    """

    decorate: Callable[[Any], Any]
    zero: Callable[[Any], Any]
    part: Callable[[Any], Any]


class Entry(NamedTuple):
    """A published step.

    Attributes:
      name: in the table and on the command line.
      path: of its file: the repository's folder, then the path within.
      function: the step's name there.
      style: how it is called, and by which decorator.
      loop: trains with it, and yields what is compared after each step.
      reference: the decorator it is compared with, on one device.
      batch: `batch_argnums`, where the call alone does not say which arguments are the batch.
      reason: why it can't be compared to the last digits of float64, if so.
      float32: whether float32 is the reason: it is compared with what one device makes of a state that was changed in
        the last digits of float32.
    """

    name: str
    path: str
    function: str
    style: str
    loop: Callable[[Run], Iterator[Any]]
    reference: Callable[[Any], Any]
    batch: tuple[Any, ...] | None
    reason: str
    float32: bool


ENTRIES: dict[str, Entry] = {}


def published(
    path: str,
    function: str,
    style: str,
    *,
    reference: Callable[[Any], Any] = jax.jit,
    batch: tuple[Any, ...] | None = None,
    reason: str = "",
    float32: bool = False,
) -> Callable[[Callable[[Run], Iterator[Any]]], Callable[[Run], Iterator[Any]]]:
    """Adds a training loop to the entries."""

    def add(loop: Callable[[Run], Iterator[Any]]) -> Callable[[Run], Iterator[Any]]:
        name = loop.__name__
        ENTRIES[name] = Entry(name, path, function, style, loop, reference, batch, reason, float32)
        return loop

    return add


def pmapped(axis: str) -> Callable[[Any], Any]:
    """What `jax.pmap(step, axis_name=axis)` is on one device, without the leading axis."""

    def decorate(step: Any) -> Any:
        def whole(*args: Any) -> Any:
            return jax.vmap(step, in_axes=None, out_axes=None, axis_name=axis, axis_size=1)(*args)  # type: ignore[arg-type]

        return jax.jit(whole)

    return decorate


def load_all() -> dict[str, Entry]:
    """All entries."""
    for source in SOURCES:
        importlib.import_module(f"published.{source}_steps")
    return ENTRIES
