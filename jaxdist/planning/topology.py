"""Hypothetical devices: their number, kind, memory and links."""

from __future__ import annotations

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
    def parse(cls, text: str) -> Topology:
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
