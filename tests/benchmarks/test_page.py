"""The pages about performance are what was measured, name the processor, and say where others are faster."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402
import step_time  # noqa: E402


@pytest.fixture(scope="module")
def maker() -> Any:
    """`python benchmarks`."""
    spec = importlib.util.spec_from_file_location("benchmarks_main", ROOT / "benchmarks" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_was_measured(maker: Any) -> None:
    """`python benchmarks --only` makes it anew."""
    results = ROOT / "benchmarks" / "results"
    assert (ROOT / "docs" / "performance.md").read_text() == maker.summarised(results)
    assert (ROOT / "docs" / "performance-details.md").read_text() == maker.page(results)


def test_each_processor_has_its_tables(maker: Any, tmp_path: Path) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "step_time.json").read_text())
    (tmp_path / "step_time.json").write_text(json.dumps(found))
    found["machine"]["processor"] = "another one"
    (tmp_path / "step_time-other.json").write_text(json.dumps(found))
    assert [stem for stem, _ in maker.measured(tmp_path, "step_time")] == ["step_time", "step_time-other"]
    text = maker.page(tmp_path)
    assert text.count("\n## Step time and scaling\n") == 1
    first, second = text.partition("\n### Step time and scaling: another one\n")[::2]
    assert first.count("| jaxdist mpi 0 / torch DDP |") == second.count("| jaxdist mpi 0 / torch DDP |") == 1
    assert second.startswith("\nanother one, 2 cores, torch ")
    assert "\n- another one, " in first  # among the machines
    assert "img/step_time.png" in first
    assert "img/step_time-other.png" in second


def test_where_others_are_faster() -> None:
    ms = {"jaxdist mpi 0": [3.0, 3.0, 5.0], "torch DDP": [2.0, 4.0, 4.0], "jaxdist mpi 1": [1.0] * 3}
    lines = step_time.faster_peers({"A": {"ms": ms}, "B": {"ms": ms | {"torch DDP": [9.0] * 3}}})
    assert lines == ["- jaxdist mpi 0 / torch DDP: A 1.25 (0.75–1.50)"]  # and not that level 1 is


def test_of_all_that_was_measured_none_is_left_out(maker: Any) -> None:
    page = (ROOT / "docs" / "performance-details.md").read_text()
    short = (ROOT / "docs" / "performance.md").read_text()
    for _, found in maker.measured(ROOT / "benchmarks" / "results", "step_time"):
        for c in step_time.COMPARISONS:
            for model, m in found["models"].items():
                ratio = report.ratio(m["ms"], c.one, c.other)
                if ratio and ratio.median > 1 and "jaxdist" not in c.other[0]:
                    assert f"{model} {ratio}" in page
                    assert c.other[0] not in ("torch DDP", "torch ZeRO", "torch FSDP2") or f"{model} {ratio}" in short
