"""Hypothetical devices: their number, kind, memory and links."""

import dataclasses
import math
import os
import re
from dataclasses import dataclass

from jaxdist.machine import KINDS, Kind, Machine, named


@dataclass(frozen=True)
class Topology:
    """Hosts with devices of one kind, or slices of TPUs."""

    hosts: int  # or slices
    per_host: int  # devices per host, or per slice
    kind: Kind
    slice_shape: str = ""  # of TPUs, such as ``"4x4"``

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parse ``"8xH100"``, ``"4x8xH100,network=25e9"`` (hosts first), ``"v5e:4x4"`` or ``"2x v5e:4x4"``."""
        gpus = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-zA-Z].*)", text.strip())
        tpus = re.fullmatch(r"(?:(\d+)x *)?(v\w+):(\d+(?:x\d+){1,2})((?:,.*)?)", text.strip())
        given = f"topology {text!r}"
        kinds = {name: kind for name, kind in KINDS.items() if (kind.platform == "tpu") == bool(tpus)}
        if tpus:
            hosts, per_host, shape = int(tpus[1] or 1), math.prod(map(int, tpus[3].split("x"))), tpus[3]
            kind = named(tpus[2] + tpus[4], given, kinds)
        elif gpus:
            hosts, per_host, shape = int(gpus[1] or 1), int(gpus[2]), ""
            kind = named(gpus[3], given, kinds)
        else:
            raise ValueError(
                f"{given}: expected DEVICESxKIND or HOSTSxDEVICESxKIND, such as 8xH100 or 4x8xH100; for TPUs, "
                "KIND:SHAPE or SLICESxKIND:SHAPE, such as v5e:4x4 or 2xv5e:4x4"
            )
        if tpus and not _exists(kind, shape):
            largest = "x".join(map(str, _LARGEST[kind.name]))
            raise ValueError(f"{given}: expected a slice of {kind.name}, which is a part of a pod of {largest} chips")
        if not hosts or not per_host:
            raise ValueError(f"{given}: needs at least one host and one device")
        if kind.is_cpu:
            own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            kind = dataclasses.replace(kind, memory=own).of_host(per_host)
        return cls(hosts, per_host, kind, shape)

    @property
    def devices(self) -> int:
        """Return the number of devices of all hosts."""
        return self.hosts * self.per_host

    @property
    def on(self) -> tuple[int, ...]:
        """Return the host number of each device."""
        return tuple(i // self.per_host for i in range(self.devices))

    @property
    def machine(self) -> Machine:
        """Return the machine that placements are priced for."""
        return Machine(self.kind, self.on)

    @property
    def group(self) -> str:
        """Return what devices with fast links between them share."""
        return "slice" if self.slice_shape else "host"

    def __str__(self) -> str:
        devices = f"{self.kind.name}:{self.slice_shape}" if self.slice_shape else f"{self.per_host}x{self.kind.name}"
        return f"{self.hosts}x" * (self.hosts > 1) + devices


# The shape of a pod: Austin et al., *How to Scale Your Model*, 2025, part 2. XLA ends the process for larger ones.
_LARGEST = {"v4": (16, 16, 16), "v5e": (16, 16), "v5p": (16, 20, 28), "v6e": (16, 16)}


def _exists(kind: Kind, shape: str) -> bool:
    """Check whether a slice of this shape may be a part of a pod, turned as it may be."""
    sizes, most = sorted(map(int, shape.split("x"))), _LARGEST[kind.name]
    return len(sizes) == len(most) and all(0 < size <= limit for size, limit in zip(sizes, most, strict=True))


# Compute capability, cores, FPUs of a core, bytes of shared memory of a core and of the L2 cache, and GHz.
_AMPERE, _HOPPER = (8, 108, 64, 167936, 41943040, 1.41), (9, 132, 128, 233472, 52428800, 1.98)
_CHIPS = {
    "A100-40": _AMPERE, "A100-80": _AMPERE, "H100": _HOPPER, "H200": _HOPPER,
    "B200": (10, 148, 128, 233472, 132644864, 1.965),
}  # fmt: skip


def target(kind: Kind) -> str:
    """Return the description of a GPU for XLA's compiler, a text proto."""
    capability, cores, fpus, shared, l2, clock = _CHIPS[kind.name]
    extension = "feature_extension: ACCELERATED_FEATURES" if capability >= 9 else ""
    return f"""
      gpu_device_info {{
        cuda_compute_capability {{ major: {capability} {extension} }}
        core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock} l2_cache_size: {l2}
        memory_bandwidth: {kind.bandwidth:.0f} device_memory_size: {kind.memory}
        shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024} shared_memory_per_core: {shared}
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{kind.model}"
    """
