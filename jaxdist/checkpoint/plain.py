"""Folders under plain names, for libraries that read more into a path than its letters.

Orbax takes a folder for a pattern (`*`, `[a]`), and tensorstore a backslash for a slash; neither has names that are not
UTF-8. What they are given is the folder that this process has opened, `/proc/self/fd/<number>`, whatever it is called.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jaxdist.errors import CheckpointError


def opened(directory: Path) -> tuple[int, Path]:
    """A folder under a plain name, which it has until the descriptor is closed; a rename doesn't matter."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    name = Path(f"/proc/self/fd/{descriptor}")
    if not name.exists():
        os.close(descriptor)
        raise CheckpointError(f"{directory} can't be opened under a plain name: there is no /proc here")
    return descriptor, name


def as_called(text: str) -> str:
    """What a library said, with the folders that are still open as the user calls them."""
    return re.sub(r"/proc/self/fd/\d+", lambda name: _called(Path(name[0])), text)


def _called(name: Path) -> str:
    return str(name.readlink() if name.exists() else name)
