"""Which hosts a job runs on, with how many ranks each: `--hosts`, and the host files of Open MPI and of MPICH."""

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxdist.control.keys import is_loopback

_FORMS = "`node1 slots=2` (Open MPI), `node1:2` (MPICH) or `node1` (one rank)"
_LINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(\d+))?((?:\s+\S+)*)")


@dataclass(frozen=True)
class Host:
    """A host and the number of its ranks."""

    name: str
    slots: int

    @property
    def local(self) -> bool:
        """Whether it is this machine."""
        own_name = socket.gethostname()
        return is_loopback(self.name) or self.name.split(".")[0] == own_name.split(".")[0]


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `node1:2,node2:2`, in that order."""
    return _collect((f"--hosts, entry {i}", entry.strip()) for i, entry in enumerate(text.split(","), 1))


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file: a line each, `#` starts a comment."""
    lines = path.read_text().splitlines()
    plain = ((f"{path}, line {i}", line.partition("#")[0].strip()) for i, line in enumerate(lines, 1))
    hosts = _collect((where, line) for where, line in plain if line)
    if not hosts:
        raise ValueError(f"{path} names no host; expected lines like {_FORMS}")
    return hosts


def total_ranks(hosts: list[Host], asked: int | None) -> int:
    """The number of slots; `asked` may only say the same."""
    slots = sum(host.slots for host in hosts)
    if asked is not None and asked != slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"-n {asked}, but the hosts have {slots} slots ({listed}): leave out -n, or change the slots of the hosts"
        )
    return slots


def _collect(entries: Iterable[tuple[str, str]]) -> list[Host]:
    hosts: dict[str, Host] = {}
    for where, entry in entries:
        host = _host(where, entry)
        if host.name in hosts:
            raise ValueError(f"{where}: {host.name} is there twice; give it once, with all of its slots")
        hosts[host.name] = host
    return list(hosts.values())


def _host(where: str, entry: str) -> Host:
    match = _LINE.fullmatch(entry)
    if match is None:
        raise ValueError(f"{where}: {entry!r} is not a host; expected {_FORMS}")
    name, slots, options = match[1], match[2], match[3].split()
    for option in options:
        key, _, value = option.partition("=")
        if key == "slots" and value.isdigit() and slots is None:
            slots = value
        elif key not in ("max_slots", "max-slots") or not value.isdigit():
            raise ValueError(f"{where}: {option!r} in {entry!r} is not understood; expected {_FORMS}")
    count = int(slots or 1)
    if count < 1:
        raise ValueError(f"{where}: {entry!r} has no slots; leave the host out, or give it at least one")
    return Host(name, count)
