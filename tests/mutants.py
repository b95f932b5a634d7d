"""Bugs of one line, each of which some test must notice: `python tests/mutants.py [WORD …] [--shard I/N]`.

Each is put into a copy of the project, and the tests that it names are run there until one fails. What survives is a
row that the tests lack, or dead code. WORD: only mutants whose name or file has it. The exit code is the number of
survivors (and of mutants whose line is no longer there).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = "jaxdist", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md"


class Mutant(NamedTuple):
    """A bug that someone could write.

    Attributes:
      name: what goes wrong.
      file: where.
      line: as it stands; occurs once in the file.
      broken: in its place.
      tests: that must fail, as arguments of pytest.
      slow: no quick test can.
    """

    name: str
    file: str
    line: str
    broken: str
    tests: str
    slow: bool = False


MUTANTS: list[Mutant] = []


def survives(mutant: Mutant, suite: str | None = None, root: Path = ROOT) -> str:
    """Why a mutant lives: ``""`` if a test has failed because of it.

    Args:
      mutant: of the table.
      suite: arguments of pytest in place of those that it names.
      root: of a checkout.
    """
    with tempfile.TemporaryDirectory(prefix="jaxdist-mutant-") as folder:
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy(root / name, folder)
        file = Path(folder, mutant.file)
        text = file.read_text() if file.exists() else ""
        if text.count(mutant.line) != 1:
            return f"its line occurs {text.count(mutant.line)} times in {mutant.file}"
        file.write_text(text.replace(mutant.line, mutant.broken))
        chosen = (mutant.tests if suite is None else suite).split(" -k ")
        command = [*chosen[0].split(), *(["-k", chosen[1]] if chosen[1:] else [])]
        command += [] if mutant.slow or "-m" in command else ["-m", "not slow"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "2", *command],
            cwd=folder, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 1:
            return ""
        return "SURVIVED" if done.returncode == 0 else f"pytest ended with {done.returncode}:\n{done.stdout[-1500:]}"


def main() -> int:
    """As a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--shard", default="1/1", help="I/N: the Ith of N equal parts of the table")
    parser.add_argument("--suite", help="arguments of pytest in place of the tests that a mutant names")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    args = parser.parse_args()
    part, parts = map(int, args.shard.split("/"))
    chosen = [m for m in MUTANTS if not args.words or any(word in f"{m.name} {m.file}" for word in args.words)]
    survivors = 0
    for mutant in chosen[part - 1 :: parts]:
        began = time.monotonic()
        why = survives(mutant, args.suite, args.root)
        survivors += bool(why)
        print(f"{time.monotonic() - began:5.0f} s  {mutant.name} ({mutant.file}): {why or 'killed'}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
