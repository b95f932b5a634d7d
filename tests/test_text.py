"""Tables as text."""

from __future__ import annotations

import builtins

import pytest
from rich.table import Table

from jaxdist.text import text_of


def _table() -> Table:
    table = Table(title="a title", box=None, pad_edge=False)
    table.add_column("file")
    table.add_row("a.py:key:[0]")
    return table


WANTED = "  a title\nfile\na.py:key:[0]"


def test_lines_and_tables() -> None:
    assert text_of("words that are wrapped", _table(), width=12) == f"words that\nare wrapped\n{WANTED}"


def test_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert text_of(_table(), width=40) == WANTED


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is returned, not displayed."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert text_of(_table(), width=40) == WANTED
