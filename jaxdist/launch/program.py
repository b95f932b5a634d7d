"""What the user asked to start, as the command line of one rank."""

import importlib.machinery
import importlib.util
import shutil
import sys
from pathlib import Path


def program_command(script: list[str]) -> list[str]:
    """The command of one rank for `script.py args`, `-m module args` or `executable args`."""
    if not script or script == ["-m"]:
        raise ValueError("nothing to start: expected a script, `-m module` or an executable")
    first = script[0]
    if first == "-m":
        _check_module(script[1])
        return [sys.executable, *script]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise ValueError(f"no such script: {first} (looked in {Path.cwd()})")
        return [sys.executable, *script]
    if first in ("python", "python3"):
        # The interpreter of this environment, not another one that comes first on PATH.
        return [sys.executable, *script[1:]]
    found = shutil.which(first)
    if found is None:
        raise ValueError(f"no such command: {first}; expected a .py file, `-m module` or an executable on PATH")
    return [found, *script[1:]]


def _check_module(name: str) -> None:
    """Says once what each rank would. Imports nothing: of `package.module` only the package is looked for."""
    top = name.partition(".")[0]
    local = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])  # where `python -m` looks first
    if name.endswith(".py") or not top or (local is None and importlib.util.find_spec(top) is None):
        hint = "; for a script leave out -m" if name.endswith(".py") else ""
        raise ValueError(f"no such module: {name} (looked in {Path.cwd()} and in this environment{hint})")
