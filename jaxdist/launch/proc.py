"""The processes of this machine, as /proc has them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Name(NamedTuple):
    """A process, told from a later one that got its number."""

    pid: int  # its number
    born: int  # when it started, in ticks since the machine did


class Seen(NamedTuple):
    """What /proc says of a process."""

    name: Name  # of it
    parent: int  # its number
    session: int  # its session
    stopped: bool  # whether it is, by a signal


def look(pid: int) -> Seen | None:
    """A process that runs; None: it has ended."""
    try:
        # The name of the program, in parentheses, may have spaces and parentheses in it.
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else Seen(Name(pid, int(rest[18])), int(rest[0]), int(rest[2]), state == "T")


def running() -> list[Seen]:
    """All processes of this machine."""
    return [seen for entry in Path("/proc").glob("[0-9]*") if (seen := look(int(entry.name))) is not None]
