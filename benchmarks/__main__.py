"""All benchmarks, one after another, and docs/performance.md with its pictures made of what they measured.

    python benchmarks --torch PYTHON

PYTHON is an interpreter that has torch (CPU); without it torch is left out. On a quiet machine with two cores it takes
about an hour. What was measured before stays in --results: `--only where` measures that again and
makes the page anew of all, `--only` with no name measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent
TITLES = {
    "step_time": "Step time and scaling",
    "where": "Where the time of a step goes",
    "collectives": "Collectives",
    "memory": "Memory by ZeRO level",
    "overhead": "What the host pays",
    "buckets": "Buckets",
}
BESIDE_TORCH = ("step_time", "collectives")
INTRO = """# Performance

Made by `{command}`: every number in a table comes from a file that its benchmark wrote (`benchmarks/`); what is said
at the end is written by hand. What is compared takes turns on the same cores, one for each rank with one thread; ratios
are taken within a round, and their median and range shown. The machine: {machine}.
"""


def page(results: Path, pictures: Path) -> str:
    """The Markdown, and its pictures, of the results that there are."""
    sections, machine = [], ""
    for name, title in TITLES.items():
        path = results / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        module = importlib.import_module(name)
        report.picture(found, module.draw, pictures / f"{name}.png")
        about = (module.__doc__ or "").partition("\n\n")[0]
        rest = (module.__doc__ or "").split("\n\n", 2)[2].strip()
        sections.append(
            f"## {title}\n\n{about}\n\n```bash\n{found['command']}\n```\n\n{rest}\n\n{module.markdown(found)}\n\n"
            f"![{title}](img/{name}.png)\n"
        )
        machine = machine or report.said(found["machine"])
    if not sections:
        raise SystemExit(f"there are no results in {results}")
    notes = (HERE / "notes.md").read_text()
    return "\n".join([INTRO.format(command="python benchmarks --torch PYTHON", machine=machine), *sections, notes])


def main() -> None:
    """Measure, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--only", nargs="*", choices=list(TITLES), help="these; default: all")
    parser.add_argument("--rounds", type=int, help="default: each benchmark's own")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "performance.md")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    pictures = args.page.parent / "img"
    pictures.mkdir(parents=True, exist_ok=True)
    for name in TITLES if args.only is None else args.only:
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(args.results / f"{name}.json")]
        if args.torch and name in BESIDE_TORCH:
            command += ["--torch", args.torch]
        if args.rounds and name != "memory":
            command += ["--rounds", str(args.rounds)]
        print(f"== {name}", flush=True)
        subprocess.run(command, check=True)
    args.page.write_text(page(args.results, pictures))


if __name__ == "__main__":
    main()
