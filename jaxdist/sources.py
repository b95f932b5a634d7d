"""Distinguish the user's own source files from libraries' files."""

import functools
import sysconfig
from pathlib import Path

OURS = f"{Path(__file__).resolve().parent}/"
_PYTHON = f"{sysconfig.get_path('stdlib')}/"


def is_ours(file: str) -> bool:
    """Check whether a file is one of this library."""
    return file.startswith(OURS)


@functools.lru_cache(maxsize=4096)
def of_the_user(file: str) -> bool:
    """Check whether a file is code of the user's own: not this library's, not Python's, and not installed."""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    installed |= file.endswith(".pyx")  # compiled code names it as on the machine that compiled it
    return not (installed or is_ours(file) or file.startswith(("<frozen", _PYTHON)))
