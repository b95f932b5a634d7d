"""MPI communicators for all ranks and for groups."""

import functools
from typing import Any

import jax

from jaxdist.connectors.mpi import in_environment
from jaxdist.mesh import Groups


@functools.cache
def library() -> Any:
    """mpi4py's MPI, with mpi4jax's FFI targets registered."""
    with in_environment({"MPI4JAX_NO_WARN_JAX_VERSION": "1"}):  # our tests tell which versions work
        import mpi4jax  # noqa: F401
        from mpi4py import MPI

    return MPI


@functools.cache
def world(rank: int) -> Any:
    """Return our communicator over all processes, in rank order; all ranks call this together."""
    _parent(rank)
    return library().COMM_WORLD.Split(0, key=rank)


@functools.cache
def _parent(rank: int) -> Any:
    """Return the communicator to make groups from, since `world` may be in use by a step."""
    return library().COMM_WORLD.Split(0, key=rank)


@functools.cache
def _group(rank: int, members: tuple[int, ...]) -> Any:
    """Make the communicator of some ranks, in that order; its members call this together."""
    parent = _parent(rank)
    return parent.Create_group(parent.Get_group().Incl(members))


def of_group(ranks: tuple[int, ...], groups: Groups | None) -> Any:
    """Return the communicator of this rank's group; its members make it on first use, together."""
    rank = jax.process_index()
    if groups is None:
        every = world(rank)
        return every if ranks == tuple(range(every.Get_size())) else _group(rank, ranks)
    return _group(rank, next(own for one in groups if rank in (own := tuple(ranks[i] for i in one))))
