"""The scripts of examples/, run in this process."""

import contextlib
import functools
import importlib
import io
import sys
from pathlib import Path
from unittest import mock

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import digits  # noqa: E402 # pyright: ignore[reportMissingImports]

all_scans = functools.cache(digits._load_scans)


def few_scans() -> list[tuple[np.ndarray, np.ndarray]]:
    """In place of `digits._load_scans`: enough for some steps."""
    return [(image[:count], label[:count]) for (image, label), count in zip(all_scans(), (320, 60), strict=True)]


def script(name: str, *arguments: object) -> tuple[str, str]:
    """What `python NAME.py ARGUMENT…` prints, and what it logs."""
    with (
        mock.patch.object(sys, "argv", [f"{name}.py", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as log,
    ):
        importlib.import_module(name).main()
    return out.getvalue(), log.getvalue()
