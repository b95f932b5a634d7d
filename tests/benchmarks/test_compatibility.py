"""The page of published steps is what was measured, and how it is measured finds what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import parity

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import compatibility  # noqa: E402
from published import source  # noqa: E402

FOUND: dict[str, Any] = json.loads(compatibility.RESULTS.read_text())


def test_the_page_is_what_was_measured() -> None:
    assert (ROOT / "docs" / "compatibility.md").read_text() == compatibility.page(FOUND)


def test_each_says_where_it_is_from_and_why_it_is_not_exact() -> None:
    results = FOUND["results"]
    assert {(r["repository"], r["commit"]) for r in results.values()} <= set(source.COMMITS.values())
    assert [name for name, r in results.items() if not r["runs"]] == []
    assert [name for name, r in results.items() if not compatibility.exact(r) and not r["reason"]] == []
    assert sum(map(compatibility.exact, results.values())) >= 37


def test_all_steps_with_a_batch_are_split() -> None:
    """No step has lost its examples, none is computed whole, and the page says how many would be."""
    results = FOUND["results"]
    runs = [run for r in results.values() for where, run in r["runs"].items() if where != "1 device"]
    assert all("split" in run for run in runs)
    others = {name: compatibility.ran(r) for name, r in results.items() if compatibility.ran(r) != "split"}
    assert others == dict.fromkeys(("diffrax_steady_state", "jax_advi"), "no batch")
    assert all("no batch" in results[name]["style"] for name in others)
    shipped = [compatibility.as_shipped(r) for r in results.values()]
    page = " ".join((ROOT / "docs" / "compatibility.md").read_text().split())
    assert f"{len(results) - 2} of {len(results)} steps are split in all runs" in page
    whole, varies = shipped.count("whole"), shipped.count("whole or split")
    assert f"shipped*, {whole} of those that are split would be whole in all these runs, and {varies} in some" in page


@pytest.mark.usefixtures("messages_take_time")
def test_small_steps_are_split_and_told() -> None:
    """One that would be computed whole is not, its numbers are those of one device, and that it would be is known."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            score = x @ w
            for _ in range(4):  # a gather each
                score = jnp.sort(score) * jnp.tanh(score)
            return score.sum()

        return w - 0.1 * jax.grad(loss)(w)

    w, x = jnp.arange(3.0), jnp.arange(48.0).reshape(16, 3) / 48
    shipped = parity.decorated(step, 4)
    shipped(w, x)
    assert shipped.placed(w, x)[-1].whole

    expected = [{"w": np.asarray(jax.jit(step)(w, x))}]
    entry = types.SimpleNamespace(float32=False, reason="")
    seen = []

    def run() -> Any:
        decorated = parity.decorated(step, 4)
        got = [{"w": np.asarray(decorated(w, x))}]
        seen.append(decorated.placed(w, x)[-1].whole)
        return got, False

    known = compatibility.Expected(expected, {"w": 0.0})
    found = compatibility.attempt(entry, known, run)
    assert seen == [False]
    assert found["beyond"] <= 1
    assert found["split"]
    assert found["whole_as_shipped"]
    assert 0 < found["repeated"] < 1
    assert parity.decorated(step, 4).placed(w, x)[-1].whole, "what was shipped is back"

    with compatibility.split() as steps:
        parity.decorated(lambda w, x: w - jnp.mean(jnp.tanh(x @ w)), 4)(w, x)
    assert [(s.split, s.whole) for s in steps] == [(True, False)]


SPLIT, WHOLE = ({"split": True, "whole_as_shipped": whole, "repeated": 0.0} for whole in (False, True))
NO_BATCH = SPLIT | {"split": False}


@pytest.mark.parametrize(
    ("runs", "ran", "shipped"),
    [
        ({"1 device": {}}, "no batch", ""),
        ({"1 device": {}, "2 devices": SPLIT, "4 devices": SPLIT}, "split", "split"),
        ({"1 device": {}, "2 devices": WHOLE}, "split", "whole"),
        ({"2 devices": WHOLE, "4 devices": SPLIT}, "split", "whole or split"),
        ({"2 devices": SPLIT, "2 ranks, mpi": NO_BATCH}, "no batch", ""),
        ({"4 devices": {"error": "it failed"}}, "no batch", ""),
    ],
)
def test_what_is_said_of_a_step(runs: dict[str, Any], ran: str, shipped: str) -> None:
    assert compatibility.ran({"runs": runs}) == ran
    assert compatibility.as_shipped({"runs": runs}) == shipped


SOURCES = os.environ.get("PUBLISHED_SOURCES", "")


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="PUBLISHED_SOURCES names no folder of checkouts")
def test_published_steps_on_a_mesh() -> None:
    """Each is what one device does, with its state cut along its largest dimensions."""
    command = [sys.executable, str(ROOT / "benchmarks" / "compatibility.py"), "--sources", SOURCES]
    names = list(FOUND["results"])[::8]
    command += ["--mesh", "data=2,model=2", *names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert len(lines) == len(names)
    assert [line for line in lines if line.split()[1] != "right:"] == []


def test_layouts_cut_the_largest_even_dimension() -> None:
    leaves = [np.zeros((3, 8, 4)), np.zeros((3, 5)), 1.0, jax.random.key(0), np.zeros((2, 0))]
    found = [compatibility.halved(["a", "b", "c", "d", "e"], leaves, str(seed)) for seed in range(20)]
    assert {tuple(one.items()) for one in found} <= {(), (("^a$", 1),), (("^e$", 0),), (("^a$", 1), ("^e$", 0))}
    assert any("^a$" in one for one in found)


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
