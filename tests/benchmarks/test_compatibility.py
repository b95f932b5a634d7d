"""The page of published steps is what was measured, and how it is measured finds what differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import compatibility  # noqa: E402
from published import source  # noqa: E402

FOUND: dict[str, Any] = json.loads(compatibility.RESULTS.read_text())


def test_the_page_is_what_was_measured() -> None:
    assert (ROOT / "docs" / "compatibility.md").read_text() == compatibility.page(FOUND)


def test_what_is_not_exact_says_why() -> None:
    results = FOUND["results"]
    assert [name for name, r in results.items() if not compatibility.exact(r) and not r["reason"]] == []
    assert sum(map(compatibility.exact, results.values())) >= 37


@pytest.mark.parametrize("name", FOUND["results"])
def test_each_says_where_it_is_from(name: str) -> None:
    result = FOUND["results"][name]
    assert (result["repository"], result["commit"]) in source.COMMITS.values()
    assert result["runs"]


def test_differences() -> None:
    steps = lambda **leaves: [{k: np.asarray(x, float) for k, x in leaves.items()}]
    compare = lambda a, b: compatibility.compare(steps(x=a), steps(x=b))["x"]
    assert compare([1.0, 2.0], [1.0, 2.0]) == 0
    assert compare([1.0, 2.0], [1.0, 2.2]) == pytest.approx(0.1)
    assert compare([np.nan, np.inf], [np.nan, np.inf]) == 0
    assert compare([1.0, 2.0], [1.0, np.nan]) == compare([1.0, np.inf], [1.0, 2.0]) == np.inf
    assert compare([0.0], [1e-12]) == pytest.approx(1e-6)  # what should be zero
    with pytest.raises(ValueError, match=r"x: shape \(1,\) for \(2,\)"):
        compare([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="other leaves"):
        compatibility.compare(steps(x=1), steps(y=1))


def test_definitions_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        "import math\nimport torch\n%matplotlib inline",
        "def main():\n    def step(x):\n        return scale * math.floor(x)",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": [text]} for text in cells]}
    (tmp_path / "flax").mkdir()
    (tmp_path / "flax" / "one.ipynb").write_text(json.dumps(notebook))
    monkeypatch.setenv("PUBLISHED_SOURCES", str(tmp_path))
    module = source.grab("flax/one.ipynb", "step", scale=2)
    assert module.step(3.5) == 6
    assert "torch" not in sys.modules or sys.modules["torch"] is not module.torch
    with pytest.raises(source.MissingSourceError, match=r"no flax/two.ipynb in .*github.com/google/flax at 18f8f311c2"):
        source.grab("flax/two.ipynb", "step")
