"""Trace a step, written for one device, to the jaxpr of what each device runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

_inside: ContextVar[bool] = ContextVar("jaxdist_inside_step", default=False)


def inside_step() -> bool:
    """Whether the code that runs is being traced as part of a decorated step."""
    return _inside.get()


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def capture(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    specs: Sequence[P],
    mesh: Mesh | AbstractMesh,
    *,
    check: bool,
) -> ClosedJaxpr:
    """The jaxpr of `fun` as the body of a ``shard_map`` over `mesh`, with the types that JAX gives it there.

    Args:
      fun: takes and returns flat sequences of arrays.
      avals: global shape and dtype of each argument.
      specs: how each argument is split over the mesh.
      mesh: one axis, ``"data"``; no device is touched.
      check: type each value as replicated or varying (``check_vma``).
    """
    captured: list[ClosedJaxpr] = []

    def body(*args: Any) -> tuple[()]:
        with _marked():
            captured.append(jax.make_jaxpr(lambda *xs: list(fun(*xs)))(*args))
        return ()

    mapped = jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=(), check_vma=check)
    jax.eval_shape(mapped, *avals)
    return captured[0]
