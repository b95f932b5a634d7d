"""MPI's communicators: of all ranks, and of groups of them."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxdist.connectors.mpi import in_environment
from jaxdist.mesh import Groups


@functools.cache
def library() -> Any:
    """mpi4py's MPI, with mpi4jax's FFI targets registered."""
    with in_environment({"MPI4JAX_NO_WARN_JAX_VERSION": "1"}):  # our tests say which versions work
        import mpi4jax  # noqa: F401
        from mpi4py import MPI

    return MPI


@functools.cache
def world(rank: int) -> Any:
    """A communicator of our own over all processes, in the order of their ranks; every rank calls it together."""
    _parent(rank)
    return library().COMM_WORLD.Split(0, key=rank)


@functools.cache
def _parent(rank: int) -> Any:
    """Where groups are made: not on `world`, in which a step may be under way."""
    return library().COMM_WORLD.Split(0, key=rank)


@functools.cache
def _group(rank: int, members: tuple[int, ...]) -> Any:
    """The communicator of some ranks, in that order; its members call it together."""
    parent = _parent(rank)
    return parent.Create_group(parent.Get_group().Incl(members))


def of_group(ranks: tuple[int, ...], groups: Groups | None) -> Any:
    """The communicator of one's own group, which its members make together when they first ask for it."""
    rank = jax.process_index()
    if groups is None:
        every = world(rank)
        return every if ranks == tuple(range(every.Get_size())) else _group(rank, ranks)
    return _group(rank, next(own for one in groups if rank in (own := tuple(ranks[i] for i in one))))
