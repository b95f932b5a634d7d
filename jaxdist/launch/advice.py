"""What `jaxdist run` says about a command line before it starts it."""

import re
import shlex
from collections.abc import Sequence

# Options of `run` that hardly any script has. (Not --communicator and --connector, which are the script's as well.)
_OPTION = re.compile(
    r"(?<!\S)(?:(?:-n ?|--np[= ])(?P<ranks>\d+)"
    r"|--(?:launcher|hosts|hostfile|only-rank|max-restarts|lanes)[= ]\S+|--elastic)(?!\S)"
)


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
