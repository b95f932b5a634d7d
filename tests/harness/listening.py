"""The TCP addresses that a process listens at, as the kernel tells them."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

_LISTEN = "0A"


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """(address, port) of each listening TCP socket of a process."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(descriptor.readlink()))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                    address, _, port = fields[1].partition(":")
                    words = struct.pack(f"={len(address) // 8}I", *(int(address[i : i + 8], 16)
                                                                    for i in range(0, len(address), 8)))  # fmt: skip
                    found.add((socket.inet_ntop(family, words), int(port, 16)))
    return found
