"""The devices that a step is placed for: how fast they compute, and the links between them.

Speeds are from the table or from `JAXDIST_MACHINE`; nothing is measured. Whatever weighs computing again against
sending, or a few messages against many bytes, asks a `Machine` for seconds.
"""

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from jaxdist.mesh import GROUP, Axis, along, axes_of_mesh

REACHED = 0.4  # the part of a device's FLOPs that a step of large products reaches, its other operations included
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Time per byte of an exchange relative to an all-reduce on CPUs, since parts are copied: the geometric mean over Open
# MPI and gloo of 0.25, 1.6 and 8 MB, two ranks with a core each.
_REARRANGED = 1.7
_FOLD = 8  # devices of a host of CPUs


def ring_factor(kind: str, devices: int) -> float:
    """Return the bytes that a ring's device sends, relative to the whole array (in an all-to-all, to its part)."""
    if kind == "all-reduce":
        # Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, JPDC 2009.
        return 2 * (devices - 1) / devices
    if kind in ("reduce-scatter", "all-gather", "all-to-all"):
        return (devices - 1) / devices
    return 1.0


@dataclass(frozen=True)
class Link:
    """The connection between the devices of a ring."""

    devices: int  # how many
    bandwidth: float  # bytes per second that a device sends and receives
    latency: float  # seconds that a collective takes at least
    # seconds of a collective, besides its bytes, that the computation waits for: its latency, and messages that it
    # delays
    stall: float
    # how many times as long as in an all-reduce a byte takes in an all-to-all or a reduce-scatter
    exchanged: float = 1.0

    def sent(self, kind: str, nbytes: float) -> float:
        """The bytes that a device sends."""
        return nbytes * ring_factor(kind, self.devices) / (self.devices if kind == "all-to-all" else 1)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the seconds that the bytes of a collective take, without its latency (see `sent`)."""
        slower = self.exchanged if kind in ("all-to-all", "reduce-scatter") else 1.0
        return self.sent(kind, nbytes) * slower / self.bandwidth


Platform = Literal["gpu", "tpu", "cpu"]


@dataclass(frozen=True)
class Kind:
    """A kind of device."""

    name: str  # as in a topology
    model: str  # the vendor's name
    memory: int  # bytes
    link: float  # bytes per second from one device to the next on a host
    network: float  # bytes per second from a device to other hosts, if all devices of its host send
    latency: float = 10e-6  # seconds that a collective takes at least, within a host
    network_latency: float = 30e-6  # seconds that it takes at least between hosts
    stall: float = 0  # as of `Link`; at least the latency
    # that it does in a second, by its data sheet: of GPUs and TPUs in bfloat16, without sparsity; of CPUs in float32
    flops: float = 0
    bandwidth: float = 0  # bytes per second that it reads or writes in its memory
    host: float = 0  # bytes per second between it and its host's memory, each way
    platform: Platform = "gpu"

    @property
    def is_cpu(self) -> bool:
        """Check whether it uses its host's memory, and sends sums of 16-bit floats in 32 bits."""
        return self.platform == "cpu"

    @property
    def usable(self) -> int:
        """Bytes of its memory that JAX takes, or 0 if unknown."""
        return int(self.memory * (fraction() if self.platform == "gpu" else 1))

    def of_host(self, devices: int) -> "Kind":
        """Return the kind of one of several devices that share a host, given the host's."""
        return dataclasses.replace(
            self, memory=self.memory // devices, network=self.network / devices,
            flops=self.flops / devices, bandwidth=self.bandwidth / devices,
        )  # fmt: skip

    def rate(self, dtype: Any) -> float:
        """FLOPs of products that it does in a second."""
        bits = 8 * np.dtype(dtype).itemsize if np.dtype(dtype).kind in "fcV" else 32
        return REACHED * self.flops * _RATES_BY_BITS[self.platform].get(bits, 1.0)


# Relative to `Kind.flops`, by bits. Of NVIDIA's data sheets: products of float32 run as TF32. TPUs round the factors of
# float32 products to bfloat16 (JAX's default precision). CPUs make float32 of 16 bits.
_RATES_BY_BITS: dict[Platform, dict[int, float]] = {
    "gpu": {32: 1 / 2, 64: 1 / 15, 128: 1 / 15},
    "tpu": {},
    "cpu": {64: 1 / 2, 128: 1 / 2},
}


_AMPERE: dict[str, Any] = {"stall": 75e-6, "flops": 312e12, "host": 32e9}
_HOPPER: dict[str, Any] = {"stall": 75e-6, "flops": 989e12, "host": 64e9}
_BLACKWELL: dict[str, Any] = {"stall": 75e-6, "flops": 2250e12, "host": 64e9}
_TPU: dict[str, Any] = {"stall": 1e-5, "platform": "tpu"}
_GIB = 1 << 30

# Memory: as the driver reports it. Links: one way, from the data sheets of NVIDIA's DGX A100, H100, H200 and B200:
# NVLink through NVSwitch, and one network adapter for each GPU (HDR 200 Gb/s, NDR 400 Gb/s). FLOPs: of tensor cores.
# To the host: 16 lanes of PCIe 4 or 5.
KINDS = {
    kind.name.lower(): kind
    for kind in (
        Kind("A100-40", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 300e9, 25e9, bandwidth=1.5552e12, **_AMPERE),
        Kind("A100-80", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 300e9, 25e9, bandwidth=2.03904e12, **_AMPERE),
        Kind("H100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 450e9, 50e9, bandwidth=3.35232e12, **_HOPPER),
        Kind("H200", "NVIDIA H200 141GB HBM3e", 151_397_597_184, 450e9, 50e9, bandwidth=4.8e12, **_HOPPER),
        Kind("B200", "NVIDIA B200", 191_514_411_008, 900e9, 50e9, bandwidth=7.67232e12, **_BLACKWELL),
        # Memory: as XLA's compiler for TPUs counts it. FLOPs, memory bandwidth and links (the interconnect of a slice:
        # all ports of a chip, one way): the key specifications in Google's pages on TPU v4, v5e, v5p and v6e
        # (docs.cloud.google.com/tpu/docs). Between slices (a chip's part of its host's adapters) and to the host:
        # Austin et al., *How to Scale Your Model*, 2025, part 2 (jax-ml.github.io/scaling-book/tpus).
        Kind("v4", "TPU v4", int(30.75 * _GIB), 300e9, 6.25e9, flops=275e12, bandwidth=1.2e12, host=16e9, **_TPU),
        Kind(
            "v5e", "TPU v5 lite", int(15.75 * _GIB), 200e9, 3.125e9, flops=197e12, bandwidth=8.19e11, host=16e9, **_TPU
        ),
        Kind("v5p", "TPU v5", int(95.74 * _GIB), 600e9, 6.25e9, flops=459e12, bandwidth=2.765e12, host=16e9, **_TPU),
        Kind(
            "v6e", "TPU v6 lite", int(31.25 * _GIB), 400e9, 1.25e10, flops=918e12, bandwidth=1.638e12, host=32e9, **_TPU
        ),
        # A host: eight cores and two channels of memory; between processes through memory as over MPI (benchmarks), and
        # ten Gb/s between hosts. Over MPI an empty message takes 2 us, but a call in the midst of a program, which is
        # copied to and from, some more.
        Kind("cpu", "CPU", 0, 3e9, 1.25e9, 4e-5, 3e-4, stall=1e-5, flops=1e12, bandwidth=40e9, platform="cpu"),
    )
}


def fraction() -> float:
    """The part of a GPU's memory that JAX's allocator may take."""
    return float(os.environ.get(FRACTION) or 0.75)


@dataclass(frozen=True)
class Machine:
    """Devices of one kind on hosts."""

    kind: Kind  # of the devices
    # For each device of a mesh, in order, the group that shares fast links: its host, or a TPU's slice. Empty if
    # all share one.
    hosts: tuple[Any, ...] = ()
    links: tuple[tuple[str, Link], ...] = ()  # by the name of an axis (see `over`)

    @property
    def has_own_memory(self) -> bool:
        """Check whether the devices have their own memory, which CPUs do not."""
        return not self.kind.is_cpu

    def over(self, mesh: Mesh) -> "Machine":
        """Return the same with the link of each axis of a mesh."""
        axes = axes_of_mesh(mesh)
        everyone = (tuple(range(mesh.size)),)
        links = tuple(
            (axis.name, self._link(axis, *self.speed(along(axes, [axis.name]) or everyone)))
            for axis in axes if axis.name != GROUP  # far apart, so the user says: always the network
        )  # fmt: skip
        return dataclasses.replace(self, links=links)

    def link(self, axis: Axis) -> Link:
        """The link of an axis: as `over` found it, else that within a host, or between groups that between hosts."""
        kind = self.kind
        bandwidth, latency = (kind.network, kind.network_latency) if axis.name == GROUP else (kind.link, kind.latency)
        return dict(self.links).get(axis.name) or self._link(axis, bandwidth, latency)

    def speed(self, groups: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Return bandwidth and latency of the slowest link of a ring through each group of devices."""
        kind = self.kind
        slowest, latency = kind.link, kind.latency
        for group in groups if self.hosts else ():
            on_host = Counter(self.hosts[device] for device in group)
            if len(on_host) > 1:  # a ring, with an adapter of its own, for each device of the host
                slowest = min(slowest, kind.network * min(on_host.values()))
                latency = kind.network_latency
        return slowest, latency

    def crossings(self, groups: Sequence[Sequence[int]]) -> int:
        """Count the rings that leave the first host, with one ring through each group of devices."""
        hosts = [{self.hosts[device] for device in group} for group in groups] if self.hosts else []
        return sum(self.hosts[0] in on and len(on) > 1 for on in hosts)

    def _link(self, axis: Axis, bandwidth: float, latency: float) -> Link:
        stall = max(latency, self.kind.stall)
        return Link(axis.size, bandwidth, latency, stall, _REARRANGED if self.kind.is_cpu else 1.0)

    def seconds(self, flops: float, touched: float, dtype: Any = "float32") -> float:
        """Return the seconds that a device takes for an operation."""
        return flops / self.kind.rate(dtype) + touched / self.kind.bandwidth


VIRTUAL = Machine(KINDS["cpu"].of_host(_FOLD))  # processes, or several devices of one process that stand for others


@functools.cache
def kind_of(device: Any) -> Kind:
    """Return a device's row of the table; for an unknown GPU, the H100's, and for an unknown TPU, the v6e's."""
    if device.platform == "cpu":
        return VIRTUAL.kind
    for kind in KINDS.values():
        if device.device_kind in (kind.model, f"TPU {kind.name}"):  # JAX knows "TPU v5 lite" and "TPU v5e"
            return kind
    like = KINDS["v6e" if device.platform == "tpu" else "h100"]
    return dataclasses.replace(like, name=device.device_kind, model=device.device_kind)


# Numbers of a kind that `named` may change; times may be 0.
_RATES, _TIMES = ("link", "network", "flops", "bandwidth"), ("latency", "network_latency", "stall")


def named(text: str, given: str, kinds: Mapping[str, Kind] = KINDS) -> Kind:
    """Parse a kind and numbers that replace the table's: ``"H100,network=25e9"``."""
    name, *others = text.split(",")
    if name.lower() not in kinds:
        names = ", ".join(kind.name for kind in kinds.values())
        raise ValueError(f"{given}: unknown kind of device {name!r}; valid: {names}")
    numbers: dict[str, Any] = {}
    for field, _, value in (one.partition("=") for one in others):
        try:
            numbers[field] = float(value)
        except ValueError:
            numbers[field] = math.nan
        if not ((field in _RATES and 0 < numbers[field] < math.inf) or (field in _TIMES and 0 <= numbers[field] < 1)):
            raise ValueError(
                f"{given}: after the kind, expected NAME=NUMBER with a name of {', '.join((*_RATES, *_TIMES))} (the "
                "last three in seconds)"
            )
    return dataclasses.replace(kinds[name.lower()], **numbers)


def asked_for(platform: Platform) -> Kind | None:
    """Return the kind that `JAXDIST_MACHINE` names, for devices of this platform, or None."""
    asked = os.environ.get("JAXDIST_MACHINE", "")
    if not asked:
        return None
    kind = named(asked, f"JAXDIST_MACHINE={asked!r}", KINDS | {"cpu": VIRTUAL.kind})
    return dataclasses.replace(kind, platform=platform)
