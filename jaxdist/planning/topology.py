"""Devices that need not be here: how many, of which kind, with how much memory and how they are linked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

REACHED = 0.4
"""Of a device's FLOPs: what a step of large matrix products takes for granted, its other operations included."""

_ACCELERATED = "feature_extension: ACCELERATED_FEATURES"


@dataclass(frozen=True)
class Kind:
    """A kind of device.

    Attributes:
      name: as in a topology.
      model: the vendor's name.
      memory: bytes.
      link: bytes a second that a device sends to another one of its host.
      network: bytes a second that a device sends to another host, if all devices of its host do.
      latency: seconds that a collective takes at least, within a host.
      network_latency: seconds that it takes at least between hosts.
      flops: that it does in a second, by its data sheet: in bfloat16, without sparsity.
      bandwidth: bytes a second that it reads or writes of its memory.
      host: bytes a second between it and its host's memory, each way.
      target: what XLA's compiler has to know of a GPU, as its text proto; "": a CPU.
    """

    name: str
    model: str
    memory: int
    link: float
    network: float
    latency: float = 10e-6
    network_latency: float = 30e-6
    flops: float = 0
    bandwidth: float = 0
    host: float = 0
    target: str = ""


def _gpu(
    name: str, model: str, memory: int, link: float, network: float, *,
    capability: int, cores: int, fpus: int, shared: int, l2: int, clock: float, bandwidth: float, flops: float,
    host: float,
) -> Kind:  # fmt: skip
    extension = _ACCELERATED if capability >= 9 else ""
    target = f"""
      gpu_device_info {{
        cuda_compute_capability {{ major: {capability} {extension} }}
        core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock} l2_cache_size: {l2}
        memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory}
        shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024} shared_memory_per_core: {shared}
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{model}"
    """
    return Kind(name, model, memory, link, network, flops=flops, bandwidth=bandwidth, host=host, target=target)


_AMPERE = {
    "flops": 312e12, "capability": 8, "cores": 108, "fpus": 64, "shared": 167936, "l2": 41943040, "clock": 1.41,
    "host": 32e9,
}  # fmt: skip
_HOPPER = {
    "flops": 989e12, "capability": 9, "cores": 132, "fpus": 128, "shared": 233472, "l2": 52428800, "clock": 1.98,
    "host": 64e9,
}  # fmt: skip
_BLACKWELL = {
    "flops": 2250e12, "capability": 10, "cores": 148, "fpus": 128, "shared": 233472, "l2": 132644864, "clock": 1.965,
    "host": 64e9,
}  # fmt: skip

# Memory: as the driver reports it. Links: one way, from the data sheets of NVIDIA's DGX A100, H100, H200 and B200:
# NVLink through NVSwitch, and one network adapter for each GPU (HDR 200 Gb/s, NDR 400 Gb/s). FLOPs: of tensor cores.
# To the host: 16 lanes of PCIe 4 or 5.
KINDS = {
    kind.name.lower(): kind
    for kind in (
        _gpu("A100-40", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 300e9, 25e9, bandwidth=1.5552e12, **_AMPERE),
        _gpu("A100-80", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 300e9, 25e9, bandwidth=2.03904e12, **_AMPERE),
        _gpu("H100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 450e9, 50e9, bandwidth=3.35232e12, **_HOPPER),
        _gpu("H200", "NVIDIA H200 141GB HBM3e", 151_397_597_184, 450e9, 50e9, bandwidth=4.8e12, **_HOPPER),
        _gpu("B200", "NVIDIA B200", 191_514_411_008, 900e9, 50e9, bandwidth=7.67232e12, **_BLACKWELL),
        # Through memory as between two processes over MPI (benchmarks), and ten Gb/s for each host, whose devices share
        # what eight cores and two channels of memory do.
        Kind("cpu", "CPU", 0, 3e9, 1.25e9, 1e-4, 3e-4, flops=1e12, bandwidth=40e9),
    )
}


@dataclass(frozen=True)
class Topology:
    """Hosts with devices of one kind; made by `Topology.parse`.

    Attributes:
      hosts: number of them.
      per_host: devices of each.
      kind: of the devices.

    Example:
      >>> str(Topology.parse("4x8xh100"))
      '4x8xH100'
    """

    hosts: int
    per_host: int
    kind: Kind

    @classmethod
    def parse(cls, text: str) -> Topology:
        """The topology that a text names.

        Args:
          text: ``"8xH100"``: devices of one host; ``"4x8xH100"``: hosts, and devices of each.

        Raises:
          ValueError: it is none; names the kinds that there are.

        Example:
          >>> Topology.parse("4x8xh100").devices
          32
        """
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z][\w-]*)", text.strip().lower())
        names = ", ".join(kind.name for kind in KINDS.values())
        if match is None:
            raise ValueError(
                f"topology {text!r}: expected DEVICESxKIND or HOSTSxDEVICESxKIND, such as 8xH100 or 4x8xH100; kinds: "
                f"{names}"
            )
        hosts, per_host, name = int(match[1] or 1), int(match[2]), match[3]
        if name not in KINDS:
            raise ValueError(f"topology {text!r}: there is no kind {name!r}; valid: {names}")
        if not hosts or not per_host:
            raise ValueError(f"topology {text!r}: needs at least one host and one device")
        kind = KINDS[name]
        if name == "cpu":
            own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            kind = Kind(
                "cpu", kind.model, own // per_host, kind.link, kind.network / per_host,
                kind.latency, kind.network_latency, kind.flops / per_host, kind.bandwidth / per_host,
            )  # fmt: skip
        return cls(hosts, per_host, kind)

    @property
    def devices(self) -> int:
        """Of all hosts."""
        return self.hosts * self.per_host

    def speed(self, groups: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Of the slowest link of a ring through each group of devices.

        Between hosts there are as many rings as a host has devices of the group, each through a network adapter of
        its own.

        Args:
          groups: positions of devices, those of one host one after another.

        Returns:
          Bytes a second that each device sends and receives; seconds that a collective takes at least.

        Example:
          >>> two_hosts = Topology.parse("2x8xH100")
          >>> two_hosts.speed([range(8)])[0] / 1e9, two_hosts.speed([range(16)])[0] / 1e9
          (450.0, 400.0)
        """
        slowest, latency = self.kind.link, self.kind.latency
        for group in groups:
            on_host: dict[int, int] = {}
            for device in group:
                on_host[device // self.per_host] = on_host.get(device // self.per_host, 0) + 1
            if len(on_host) > 1:
                slowest = min(slowest, self.kind.network * min(on_host.values()))
                latency = self.kind.network_latency
        return slowest, latency

    def crossings(self, groups: Sequence[Sequence[int]]) -> int:
        """How many rings leave the first host, if there is one through each group of devices.

        Example:
          >>> two_hosts = Topology.parse("2x2xH100")
          >>> two_hosts.crossings([(0, 1), (2, 3)]), two_hosts.crossings([(0, 2), (1, 3)])
          (0, 2)
        """
        hosts = [{device // self.per_host for device in group} for group in groups]
        return sum(0 in on and len(on) > 1 for on in hosts)

    @property
    def links(self) -> str:
        """The speeds, for a person."""
        link, network = self.kind.link / 1e9, self.kind.network / 1e9
        within = f"{link:g} GB/s each way between the devices of a host"
        if self.hosts == 1:
            return within
        ring = min(link, network * self.per_host)
        return f"{within}, {network:g} GB/s a device between hosts (a ring through all of them: {ring:g} GB/s)"

    def __str__(self) -> str:
        return (
            f"{self.hosts}x{self.per_host}x{self.kind.name}" if self.hosts > 1 else f"{self.per_host}x{self.kind.name}"
        )
