"""Communicators: how arrays move. Each is a table of lowering rules for the collectives of a step."""

from __future__ import annotations

from typing import Any, Protocol

from jax.sharding import Mesh


class Lowering(Protocol):
    """What a communicator makes of a step: an interpreter of its jaxpr, used once, in program order."""

    def run(self, closed: Any, *args: Any) -> list[Any]: ...


def lowering(communicator: str, mesh: Mesh) -> Lowering:
    """The lowering rules of a communicator.

    Args:
      communicator: ``"xla"`` or ``"mpi"``.
      mesh: the devices.

    Raises:
      ValueError: for any other name.
    """
    if communicator == "xla":
        from jaxdist.communicators.xla import GlooLowering, XlaLowering

        return GlooLowering() if _over_gloo(mesh) else XlaLowering()
    if communicator == "mpi":
        from jaxdist.communicators.mpi import MpiLowering

        return MpiLowering()
    raise ValueError(f"unknown communicator {communicator!r}; there are 'xla' and 'mpi'")


def default_bucket_bytes(communicator: str, mesh: Mesh) -> int:
    """How many bytes of gradients travel together if the user does not say.

    Measured on CPU processes (``benchmarks/buckets.py``): a message costs gloo 0.2 ms and more, so that copying pays at
    any size; it costs MPI 0.01 ms, and from 1 MiB a tensor the copy costs more. Between virtual devices of one process
    it costs little as well, and large buckets make XLA compile long: what it unpacks from one place for each of many
    alike layers is another kernel each. On GPUs XLA's own combiner does it: it merges the reductions without copying
    them (see ``docs/communication.md``).

    Args:
      communicator: ``"xla"`` or ``"mpi"``.
      mesh: the devices.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return 0
    if communicator == "mpi":
        return 1 << 20
    return 32 << 20 if _over_gloo(mesh) else 1 << 18


def _over_gloo(mesh: Mesh) -> bool:
    devices = list(mesh.devices.flat)
    return devices[0].platform == "cpu" and any(d.process_index != devices[0].process_index for d in devices)
