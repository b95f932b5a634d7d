"""What the subcommands write: tables for a person, JSON for a program."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

WIDTH = 120


def console() -> Console:
    """On standard output. Where that is no terminal (as under mpirun) 80 columns would fold cells and cut commands."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def write_json(content: Any) -> None:
    """On standard output, in one piece."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
    sys.stdout.flush()


def complain(command: str, what: object) -> None:
    """A line on standard error."""
    print(f"jaxdist {command}: {what}", file=sys.stderr, flush=True)


def check_plot(path: Path, option: str) -> None:
    """Raises ValueError if nothing could be drawn there: better now than after the work."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{option} {path}: the name must end in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("to draw needs matplotlib: pip install 'jaxdist[plots]'")
