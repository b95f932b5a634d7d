"""Run all benchmarks, and write their pages (docs/performance.md, and tables.md next to the
results) and pictures.

    python benchmarks --torch PYTHON

PYTHON is an interpreter with torch (CPU); without it, torch is left out. On a quiet two-core
machine this takes about an hour. Earlier results stay in --results: `--only memory` measures that
again and rewrites the pages from all results; `--only` without a name measures nothing.
`--processor xeon` stores results separately from those of other processors; the pages show both.
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


def measured(results: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a benchmark's results on each processor, with the name of their file."""
    for path in [results / f"{name}.json", *sorted(results.glob(f"{name}-*.json"))]:
        if path.exists():
            yield path.stem, json.loads(path.read_text())


def page(results: Path) -> str:
    """Return the Markdown of all results."""
    sections = []
    for name, title in TITLES.items():
        module = importlib.import_module(name)
        about, _, rest = (module.__doc__ or "").split("\n\n", 2)
        everywhere = list(measured(results, name))
        if everywhere:
            command = " \\\n    ".join(textwrap.wrap(everywhere[0][1]["command"], 84, break_on_hyphens=False))
            sections.append(f"## {title}\n\n{about}\n\n```bash\n{command}\n```\n\n{rest.strip()}\n")
        for stem, found in everywhere:
            if len(everywhere) > 1:
                sections.append(f"### {title}: {report.processor(found)}\n")
            tables = module.markdown(found) if stem == name else getattr(module, "shorter", module.markdown)(found)
            sections.append(f"{report.used(found)}. {found.get('note', '')}".rstrip() + f"\n\n{tables}\n")
            if hasattr(module, "draw"):
                sections.append(f"![{title}, {report.processor(found)}](../../docs/img/{stem}.png)\n")
    if not sections:
        raise SystemExit(f"there are no results in {results}")
    machines = dict.fromkeys(f"- {report.said(found)}" for name in TITLES for _, found in measured(results, name))
    return "\n".join([INTRO, *machines, "", *sections, (HERE / "notes.md").read_text()])


def draw(results: Path, pictures: Path) -> None:
    """Draw the pictures of the pages."""
    pictures.mkdir(parents=True, exist_ok=True)
    for name in TITLES:
        module = importlib.import_module(name)
        for stem, found in measured(results, name) if hasattr(module, "draw") else ():
            report.picture(found, module.draw, pictures / f"{stem}.png")
    for _, found in [*measured(results, "step_time")][:1]:
        report.picture(found, step_time.draw_scaling, pictures / "scaling.png")


def main() -> None:
    """Measure, then write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--only", nargs="*", choices=list(TITLES), help="these; default: all")
    parser.add_argument("--rounds", type=int, help="default: each benchmark's own")
    parser.add_argument("--processor", metavar="NAME", help="results go beside those of other processors")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "performance.md", help="the short one")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    for name in TITLES if args.only is None else args.only:
        stem = f"{name}-{args.processor}" if args.processor else name
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(args.results / f"{stem}.json")]
        if args.torch and name in BESIDE_TORCH:
            command += ["--torch", args.torch]
        if args.rounds and name != "memory":
            command += ["--rounds", str(args.rounds)]
        print(f"== {name}", flush=True)
        subprocess.run(command, check=True)
    args.page.write_text(summary.page([found for _, found in measured(args.results, "step_time")]))
    (args.results / "tables.md").write_text(page(args.results))
    draw(args.results, args.page.parent / "img")


if __name__ == "__main__":
    main()
