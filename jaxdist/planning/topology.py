"""Devices that need not be here: how many, of which kind, with how much memory and how they are linked."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass

from jaxdist.machine import KINDS, Kind, Machine


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
            kind = dataclasses.replace(kind, memory=own).of_host(per_host)
        return cls(hosts, per_host, kind)

    @property
    def devices(self) -> int:
        """The number of devices of all hosts."""
        return self.hosts * self.per_host

    @property
    def on(self) -> tuple[int, ...]:
        """The number of the host of each device."""
        return tuple(i // self.per_host for i in range(self.devices))

    @property
    def machine(self) -> Machine:
        """The devices as placements are priced for them."""
        return Machine(self.kind, self.on)

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
