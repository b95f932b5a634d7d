"""Communicators: tables of lowering rules that send the arrays of a step's collectives."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxdist import compat
from jaxdist.device_map import DeviceMap
from jaxdist.ir.interpreter import Interpreter
from jaxdist.machine import Machine
from jaxdist.mesh import axes_of_mesh

Rule = Callable[..., Any]
Rules = Mapping[str, Rule]
"""A custom communicator for `jaxdist.init`: rules for some collectives; XLA lowers the others.

Each rule is traced into the step's program on each device, inside a ``shard_map`` over the mesh axis ``"data"``:

| name | called with | returns |
|---|---|---|
| ``all_reduce`` | ``(x, wire=dtype or None)`` | the sum over the devices |
| ``reduce_scatter`` | ``(x, dim=, devices=, wire=)`` | this device's slice of the sum along `dim`, then zeros |
| ``all_gather`` | ``(x, dim=, size=, devices=)`` | the slices along `dim` together, the first `size` entries |
| ``all_to_all`` | ``(x, split_axis=, concat_axis=)`` | like ``lax.all_to_all(..., tiled=True)`` |
| ``max``, ``min`` | ``(x,)`` | the extreme over the devices; NaN if one has it |
| ``permute`` | ``(x, perm=)`` | like ``lax.ppermute`` |

Collectives over other axes stay XLA's; with ``zero(..., within=)``, the axis ``"data"`` spans one group.
"""

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "max", "min", "permute")


def check(rules: Rules) -> None:
    """Refuse an invalid table of rules."""
    for name, rule in rules.items():
        if name not in NAMES:
            raise ValueError(f"communicator={{{name!r}: ...}}: unknown collective; valid: {', '.join(NAMES)}")
        if not callable(rule):
            raise ValueError(f"communicator={{{name!r}: {rule!r}}}: expected a function")


def lowering(communicator: str | Rules, mesh: Mesh) -> Interpreter:
    """Return the interpreter with which a communicator runs a step, once, in program order."""
    if communicator == "mpi":
        from jaxdist.communicators.mpi import MpiLowering

        return MpiLowering(axes_of_mesh(mesh), DeviceMap.of(mesh).processes)
    if communicator == "lanes":
        from jaxdist.communicators.lanes import LanesLowering

        return LanesLowering()
    from jaxdist.communicators.xla import GlooLowering, XlaLowering

    own = GlooLowering() if _over_gloo(mesh) else XlaLowering()
    return own if isinstance(communicator, str) else own.with_rules(communicator)


def default_bucket_bytes(communicator: str | Rules, mesh: Mesh, machine: Machine) -> int:
    """Return the default size of gradient buckets in bytes."""
    # On CPU processes (benchmarks/notes.md), a message costs gloo about 0.1 ms and MPI 0.01 ms; from 1 MiB per
    # tensor, the copy costs more. Virtual devices of one process also have cheap messages. On GPUs, XLA's combiner
    # merges reductions without copying (see docs/per-device.md).
    if not machine.kind.is_cpu:
        return 0
    return 1 << 20 if communicator in ("mpi", "lanes") or _over_gloo(mesh) else 1 << 18


# As seen in schedules of a 12-layer transformer for 8 H100s (`jaxdist plan`, docs/plan.md).
_FOR_GPUS: dict[str, Any] = {
    # This is off by default on the A100 and older, where nothing would overlap.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Overlap a reduction at the end of a loop's body with the next turn, like reduce-scatters.
    compat.PIPELINED_ALL_REDUCE[0]: compat.PIPELINED_ALL_REDUCE[1],
    # The default of 30 MB merges the gathers of two layers: the result starts when the second may,
    # and ends before the first is used. Reductions may wait for each other.
    "xla_gpu_all_gather_combine_threshold_bytes": 4 << 20,
}


# Sums of 16-bit numbers are taken in 32 bits: XLA would see that they end in 16, and add those up between devices.
_FOR_TPUS: dict[str, Any] = {"xla_jf_bf16_propagation": False}


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Return XLA options to overlap messages with GPU computation, and for exact sums on TPUs, unless the user's."""
    platform, own = mesh.devices.flat[0].platform, os.environ.get("XLA_FLAGS", "")
    if platform == "cpu":
        return {}
    if platform == "tpu":
        own += os.environ.get("LIBTPU_INIT_ARGS", "")
    options = _FOR_TPUS if platform == "tpu" else _FOR_GPUS
    return {name: value for name, value in options.items() if not re.search(rf"\b{name}\b", own)}


def _over_gloo(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu" and DeviceMap.of(mesh).process_count > 1
