"""docs/architecture.md names files and folders that there are, and the layers in their order."""

from __future__ import annotations

import re
from pathlib import Path

from test_layers import LAYERS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_its_files_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "jaxdist" / name).is_file() and not (ROOT / name).is_file()] == []


def test_the_stages_of_a_call_are_modules() -> None:
    (call,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    named = []
    for folder, names in re.findall(r"^ +(\w+)/([\w/, ]+?)  ", call, re.MULTILINE):
        first, *others = names.split(", ")
        named += [f"{folder}/{first}", *(name if "/" in name else f"{folder}/{name}" for name in others)]
    assert len(named) > 12
    assert [name for name in named if not (ROOT / "jaxdist" / f"{name}.py").is_file()] == []


def test_its_layers_are_those_of_the_package() -> None:
    table = PAGE[PAGE.index("\n| layer |") : PAGE.index("\n## Where is")]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == [names for names in LAYERS if names != ("__main__",)]
