"""What the subcommands write: tables for a person, JSON for a program."""

import json
import sys
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
