"""Run all benchmarks, and write their pages (docs/performance.md, and tables.md next to the
results) and pictures.

    python benchmarks --torch PYTHON

PYTHON is an interpreter with torch (CPU); without it, torch is left out. On a quiet two-core
machine this takes about an hour. Earlier results stay in --results: `--only memory` measures that
again and rewrites the pages from all results; `--only` without a name measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import step_time
import summary

HERE = Path(__file__).resolve().parent
TITLES = {
    "step_time": "Step time and scaling",
    "collectives": "Collectives",
    "memory": "Memory by ZeRO level",
    "overhead": "What the host pays",
    "estimates": "Estimates",
}
BESIDE_TORCH = ("step_time", "collectives")
INTRO = """# Performance: all tables

`python benchmarks --torch PYTHON` writes this page. [Performance](../../docs/performance.md) is the short one. What is
compared takes turns on the same cores, one for each rank with one thread; ratios are taken within a round. PYTHON is an
interpreter that has torch (CPU).

The machines:
"""


def measured(results: Path) -> Iterator[tuple[str, Any]]:
    """Yield the stored results of each benchmark, after its name."""
    for name in TITLES:
        if (path := results / f"{name}.json").exists():
            yield name, json.loads(path.read_text())


def page(results: Path) -> str:
    """Return the Markdown of all results."""
    sections = []
    for name, found in measured(results):
        module, title = importlib.import_module(name), TITLES[name]
        about, _, rest = (module.__doc__ or "").split("\n\n", 2)
        command = " \\\n    ".join(textwrap.wrap(found["command"], 84, break_on_hyphens=False))
        sections.append(f"## {title}\n\n{about}\n\n```bash\n{command}\n```\n\n{rest.strip()}\n")
        sections.append(f"{report.used(found)}.\n\n{module.markdown(found)}\n")
        if hasattr(module, "draw"):
            sections.append(f"![{title}, {report.processor(found)}](../../docs/img/{name}.png)\n")
    if not sections:
        raise SystemExit(f"there are no results in {results}")
    machines = dict.fromkeys(f"- {report.said(found)}" for _, found in measured(results))
    return "\n".join([INTRO, *machines, "", *sections, (HERE / "notes.md").read_text()])


def draw(results: Path, pictures: Path) -> None:
    """Draw the pictures of the pages."""
    pictures.mkdir(parents=True, exist_ok=True)
    for name, found in measured(results):
        if draws := getattr(importlib.import_module(name), "draw", None):
            report.picture(found, draws, pictures / f"{name}.png")
        if name == "step_time":
            report.picture(found, step_time.draw_scaling, pictures / "scaling.png")


def main() -> None:
    """Measure, then write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--only", nargs="*", choices=list(TITLES), help="these; default: all")
    parser.add_argument("--rounds", type=int, help="default: each benchmark's own")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "performance.md", help="the short one")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    for name in TITLES if args.only is None else args.only:
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(args.results / f"{name}.json")]
        if args.torch and name in BESIDE_TORCH:
            command += ["--torch", args.torch]
        if args.rounds and name != "memory":
            command += ["--rounds", str(args.rounds)]
        print(f"== {name}", flush=True)
        subprocess.run(command, check=True)
    args.page.write_text(summary.page(dict(measured(args.results)).get("step_time")))
    (args.results / "tables.md").write_text(page(args.results))
    draw(args.results, args.page.parent / "img")


if __name__ == "__main__":
    main()
