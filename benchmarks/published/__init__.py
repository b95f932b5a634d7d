"""Published training steps, unmodified, on small data: one file per source, each entry a training loop.

No code is copied: their files are read from a folder of checkouts (see `published.source`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

SOURCES = ("flax", "optax", "haiku", "numpyro", "equinox", "diffrax", "cleanrl", "nanodo", "vit", "jax")


class Run(NamedTuple):
    """The environment of a training loop.

    Attributes:
      decorate: the decorator that replaces the published one.
      zero: returns a sharded version of an optax transformation, or the same one.
      part: returns this process's rows of a whole batch.
    """

    decorate: Callable[[Any], Any]
    zero: Callable[[Any], Any]
    part: Callable[[Any], Any]


class Entry(NamedTuple):
    """A published step.

    Attributes:
      name: the name in the table and on the command line.
      path: its file: the repository's folder, then the path within.
      function: the step's name in the file.
      style: how it is called, and its decorator.
      loop: trains with it, and yields the values to compare after each step.
      reference: the decorator for the comparison, on one device.
      batch: `batch_argnums`, if the call alone does not determine the batch.
      reason: the reason why it cannot match to the last digits of float64, if any.
      float32: whether float32 is the reason: it is then compared with one device whose state is
      changed in the last digits of float32.
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
    """Return a decorator that adds a training loop to the entries."""

    def add(loop: Callable[[Run], Iterator[Any]]) -> Callable[[Run], Iterator[Any]]:
        name = loop.__name__
        ENTRIES[name] = Entry(name, path, function, style, loop, reference, batch, reason, float32)
        return loop

    return add


def pmapped(axis: str) -> Callable[[Any], Any]:
    """Return `jax.pmap(step, axis_name=axis)` for one device, without the leading axis."""

    def decorate(step: Any) -> Any:
        def whole(*args: Any) -> Any:
            return jax.vmap(step, in_axes=None, out_axes=None, axis_name=axis, axis_size=1)(*args)  # type: ignore[arg-type]

        return jax.jit(whole)

    return decorate


def load_all() -> dict[str, Entry]:
    """Return all entries."""
    for source in SOURCES:
        importlib.import_module(f"published.{source}_steps")
    return ENTRIES
