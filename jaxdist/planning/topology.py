"""Hypothetical devices: their number, kind, memory and links."""

import dataclasses
import os
import re
from dataclasses import dataclass

from jaxdist.machine import Kind, Machine, named


@dataclass(frozen=True)
class Topology:
    """Hosts with devices of one kind."""

    hosts: int
    per_host: int  # devices per host
    kind: Kind

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parse ``"8xH100"``, ``"4x8xH100"`` (hosts first), or ``"4x8xH100,network=25e9"``."""
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-zA-Z].*)", text.strip())
        if match is None:
            raise ValueError(
                f"topology {text!r}: expected DEVICESxKIND or HOSTSxDEVICESxKIND, such as 8xH100 or 4x8xH100"
            )
        hosts, per_host = int(match[1] or 1), int(match[2])
        kind = named(match[3], f"topology {text!r}")
        if not hosts or not per_host:
            raise ValueError(f"topology {text!r}: needs at least one host and one device")
        if kind.is_cpu:
            own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            kind = dataclasses.replace(kind, memory=own).of_host(per_host)
        return cls(hosts, per_host, kind)

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

    def __str__(self) -> str:
        return f"{self.hosts}x" * (self.hosts > 1) + f"{self.per_host}x{self.kind.name}"


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
