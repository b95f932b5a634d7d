"""What `jaxdist run` says about a command line before it starts it."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist.launch.ranks import cores

# Options of `run` that hardly any script has. (Not --communicator and --connector, which are the script's as well.)
_OPTION = re.compile(
    r"(?<!\S)(?:(?:-n ?|--np[= ])(?P<ranks>\d+)"
    r"|--(?:launcher|hosts|hostfile|only-rank|max-restarts|lanes)[= ]\S+|--elastic)(?!\S)"
)

_RANK_MIB = 80  # of its own, of a Python with JAX that has done nothing yet
_CROWDED = 8  # ranks a core from which on the start takes minutes


def misplaced_options(script: Sequence[str], *, ranks_given: bool) -> str:
    """A hint about options of `run` that stand after the script, and so are the script's; "": there are none."""
    start = 2 if script[0] == "-m" else 1
    program, rest = shlex.join(script[:start]), shlex.join(script[start:])
    found = [option for option in _OPTION.finditer(rest) if not (ranks_given and option["ranks"])]
    if not found:
        return ""
    options = " ".join(option[0] for option in found)
    for option in found:
        rest = rest.replace(option[0], "", 1)
    ranks = next((f"{option['ranks']} ranks" for option in found if option["ranks"]), "`run`")
    command = " ".join(f"jaxdist run {options} {program} {rest}".split())
    return f"{options} stands after {program} and is its own argument. For {ranks}: {command}"


def ranks_and_hosts(ranks: int, hosts: int, mpirun: str) -> str:
    """What is about to be started."""
    where = f"{hosts or 1} host{'s' * (hosts > 1)}"
    how = f"through {mpirun}" if mpirun else "without mpirun"
    return f"{ranks} rank{'s' * (ranks > 1)} on {where}, {how}"


def crowded(ranks: int, command: Sequence[str]) -> str:
    """A word about more ranks than this machine starts soon; "": they are not too many."""
    if ranks <= _CROWDED * cores() or command[0] != sys.executable:
        return ""
    need, free = ranks * _RANK_MIB, _free_mib()
    if free is not None and need > free:
        raise ValueError(
            f"-n {ranks}: that many Pythons with JAX take {need / 1024:.0f} GiB before they have done anything, and "
            f"{free / 1024:.1f} GiB are free. Expected: at most {max(1, free // _RANK_MIB)} ranks here, or more hosts "
            "(--hosts). Devices of one process take far less: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={ranks}"
        )
    return (
        f"{ranks} ranks share {cores()} core{'s' * (cores() > 1)}: to start that many Pythons with JAX takes minutes, "
        f"and at least {need / 1024:.0f} GiB"
    )


def _free_mib() -> int | None:
    """What this machine, or the container, can still give; None: it does not say."""
    found = []
    try:
        line = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if line is not None:
            found.append(int(line[1]) >> 10)
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit != "max":
            found.append(max(0, int(limit) - int(used)) >> 20)
    except OSError:
        pass
    return min(found, default=None)
