"""Names, tables as text, and warnings."""

import functools
import io
import logging
from typing import Any


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of an object without one, without the functions that define it."""
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]


@functools.cache
def say_once(text: str, level: int = logging.WARNING) -> None:
    """Log a text, if it was not said before."""
    logging.getLogger("jaxdist").log(level, "%s", text)


def text_of(*parts: Any, width: int) -> str:
    """Render with rich as plain text: no colors, no markup, no spaces at the ends of lines."""
    from rich.console import Console  # here: each rank would import it at its start

    out = io.StringIO()
    # In a notebook rich would display the parts there; under FORCE_COLOR it would color them.
    console = Console(
        file=out, width=width, markup=False, emoji=False, highlight=False, color_system=None, force_jupyter=False
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
