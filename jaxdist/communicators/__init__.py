"""Communicators: how arrays move. Each is a table of lowering rules for the collectives of a step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxdist import compat
from jaxdist.ir.interpreter import Interpreter
from jaxdist.machine import Machine
from jaxdist.mesh import axes_of_mesh, ranks_of

Rule = Callable[..., Any]
Rules = Mapping[str, Rule]
"""A communicator of one's own, for `jaxdist.init`: how some collectives of a step are lowered, the others as by XLA.

Each rule is traced into the step's program on each device, inside a ``shard_map`` over the mesh axis ``"data"``:

| name | called with | returns |
|---|---|---|
| ``all_reduce`` | ``(x, wire=dtype or None)`` | the sum over the devices |
| ``reduce_scatter`` | ``(x, dim=, devices=, wire=)`` | this device's slice of the sum along `dim`, then zeros |
| ``all_gather`` | ``(x, dim=, size=, devices=)`` | the slices along `dim` together, the first `size` entries |
| ``all_to_all`` | ``(x, split_axis=, concat_axis=)`` | as of ``lax.all_to_all(..., tiled=True)`` |
| ``max``, ``min`` | ``(x,)`` | over the devices; NaN if one has it |
| ``permute`` | ``(x, perm=)`` | as of ``lax.ppermute`` |

Collectives over other axes stay XLA's; with ``zero(..., within=)``, the axis ``"data"`` spans one group.
"""

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "max", "min", "permute")


def check(rules: Rules) -> None:
    """Refuse what is no table of rules."""
    for name, rule in rules.items():
        if name not in NAMES:
            raise ValueError(f"communicator={{{name!r}: ...}}: there is no such collective; valid: {', '.join(NAMES)}")
        if not callable(rule):
            raise ValueError(f"communicator={{{name!r}: {rule!r}}}: expected a function")


def lowering(communicator: str | Rules, mesh: Mesh) -> Interpreter:
    """What a communicator makes of a step: an interpreter of its jaxpr, used once, in program order."""
    if not isinstance(communicator, str) or communicator == "xla":
        from jaxdist.communicators.xla import GlooLowering, XlaLowering

        own = GlooLowering() if _over_gloo(mesh) else XlaLowering()
        return own if isinstance(communicator, str) else own.with_rules(communicator)
    if communicator == "mpi":
        from jaxdist.communicators.mpi import MpiLowering

        return MpiLowering(axes_of_mesh(mesh), ranks_of(mesh))
    if communicator == "lanes":
        from jaxdist.communicators.lanes import LanesLowering

        return LanesLowering()
    raise ValueError(f"unknown communicator {communicator!r}; there are 'xla', 'lanes' and 'mpi'")


def default_bucket_bytes(communicator: str | Rules, mesh: Mesh, machine: Machine) -> int:
    """How many bytes of gradients travel together if the user does not say.

    Measured on CPU processes (``benchmarks/buckets.py``): a message costs gloo about 0.1 ms and MPI 0.01 ms, and from 1
    MiB a tensor the copy costs more. Between virtual devices of one process it costs little as well. On GPUs XLA's own
    combiner does it: it merges the reductions without copying them (see ``docs/per-device.md``).
    """
    if not machine.kind.is_cpu:
        return 0
    return 1 << 20 if communicator in ("mpi", "lanes") or _over_gloo(mesh) else 1 << 18


# Seen in the schedules that it makes for 8 H100s of a 12-layer transformer (`jaxdist plan`, see docs/plan.md).
_FOR_GPUS: dict[str, Any] = {
    # On the A100 and older it is off, and nothing is hidden.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # A reduction at the end of a loop's body runs beside the next turn. (XLA does it for reduce-scatters by itself.)
    compat.PIPELINED_ALL_REDUCE[0]: compat.PIPELINED_ALL_REDUCE[1],
    # 30 MB by default: gathers of two layers become one, that starts when the second may and ends before the first is
    # used. Reductions may wait for each other.
    "xla_gpu_all_gather_combine_threshold_bytes": 4 << 20,
}


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """What XLA is told so that messages travel while GPUs compute, but for what the user says in ``XLA_FLAGS``."""
    if mesh.devices.flat[0].platform == "cpu":
        return {}
    own = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in _FOR_GPUS.items() if not re.search(rf"\b{name}\b", own)}


def _over_gloo(mesh: Mesh) -> bool:
    devices = list(mesh.devices.flat)
    return devices[0].platform == "cpu" and any(d.process_index != devices[0].process_index for d in devices)
