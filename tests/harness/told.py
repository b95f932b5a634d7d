"""What the ranks of a job tell the test that has started it."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import jobs
from harness.errors import missing

TESTS = Path(__file__).parents[1]
PATH = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}  # for a script to import the harness, and jaxdist of this checkout
_LINE = "TOLD "


def say(rank: int, found: Any) -> None:
    """To the test, as JSON; one write, or lines of two ranks mix."""
    sys.stdout.write(f"{_LINE}{json.dumps([rank, found])}\n")
    sys.stdout.flush()


def error_of(call: Callable[..., Any], *args: Any, **settings: Any) -> list[str]:
    """The class and the message of the error that a call raises."""
    try:
        call(*args, **settings)
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def found_in(output: str) -> list[Any]:
    """What each rank has said last, in their order."""
    lines = (line.removeprefix(_LINE) for line in output.splitlines() if line.startswith(_LINE))
    return [found for _, found in sorted(dict(map(json.loads, lines)).items())]


def run(
    ranks: int, script: Path, *words: object, mpi: bool = False, env: Mapping[str, str | None] | None = None,
    code: int = 0, timeout: float = 120.0,
) -> tuple[list[Any], str]:  # fmt: skip
    """Run a script on several ranks to its end: what each has said, and all that they printed."""
    args, own = [str(script), *map(str, words)], {**PATH, **(env or {})}
    done = [jobs.mpirun(ranks, args, own, timeout)] if mpi else jobs.spawn_env(ranks, args, own, timeout)
    output = "".join(one.output for one in done)
    assert {one.returncode for one in done} == {code}, output
    return found_in(output), output


def check(told: Mapping[str, list[str]], expected: Mapping[str, tuple[str, ...]]) -> None:
    """Of each case: the class of the error, and what its message names."""
    assert told.keys() == expected.keys()
    for name, (kind, *tokens) in expected.items():
        got, message = told[name]
        assert (got, missing(tokens, message)) == (kind, []), f"{name}: {got}: {message}"
