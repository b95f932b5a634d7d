"""The documentation says what is so: pages, links, names, variables, options; and its snippets parse or run."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from quick import XLA_FLAGS
from typer.main import get_command

import jaxdist
from jaxdist.cli import app

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = {"README.md": (ROOT / "README.md").read_text()} | {f"docs/{name}": text for name, text in PAGES.items()}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(code, id=f"{path}-{i}")
    for path, text in TEXTS.items()
    for i, (_, language, code) in enumerate(FENCE.findall(text))
    if language == "python"
]


def anchors(text: str) -> set[str]:
    """Of a page's headings, as Python-Markdown and GitHub write them; and those that mkdocstrings makes."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def test_every_page_is_in_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text()
    navigation = settings[settings.index("\nnav:") : settings.index("\nmarkdown_extensions:")]
    assert sorted(re.findall(r"^ +- [^:\n]+: (\S+)$", navigation, re.MULTILINE)) == sorted(PAGES)


@pytest.mark.parametrize("path", TEXTS)
def test_links_lead_somewhere(path: str):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", TEXTS[path])):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / path).parent / name if name else ROOT / path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert not broken


def test_the_reference_has_every_public_name_once_and_no_other():
    directives = re.findall(r"^::: jaxdist\.(\S+)((?:\n    .*)*)", PAGES["api.md"], re.MULTILINE)
    names = [name for name, _ in directives]
    assert sorted(name for name in names if "." not in name) == sorted(jaxdist.__all__)
    assert len(set(names)) == len(names)
    for name, options in directives:
        thing = pkgutil.resolve_name(f"jaxdist.{name}")
        for member in re.findall(r"\w+", "".join(re.findall(r"members: \[(.*)\]", options))):
            assert hasattr(thing, member), f"{name}.{member}"


@pytest.mark.parametrize("path", TEXTS)
def test_names_exist(path: str):
    for name in sorted(set(re.findall(r"\bjaxdist(?:\.[A-Za-z_]\w*)+", TEXTS[path]))):
        if not name.endswith((".py", ".md")):
            pkgutil.resolve_name(name)


def test_variables_are_those_of_the_code():
    variable = re.compile(r"\bJAXDIST_[A-Z]+\b")
    code = {name for file in (ROOT / "jaxdist").rglob("*.py") for name in variable.findall(file.read_text())}
    assert set(variable.findall(PAGES["launching.md"])) == code
    assert {name for text in TEXTS.values() for name in variable.findall(text)} <= code


def test_commands_and_their_options_exist():
    commands = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    for path, text in TEXTS.items():
        code = [line for _, _, block in FENCE.findall(text) for line in block.splitlines()]
        code += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for name, arguments in re.findall(r"^(?:.*&& )?(?:uv run )?jaxdist (\w+)(.*)$", "\n".join(code), re.MULTILINE):
            if f"(`jaxdist {name}`) | not yet |" in text:
                continue
            assert name in commands, f"{path}: jaxdist {name}"
            own = re.split(r"\S+\.py\b| -m ", arguments)[0]  # what follows the script is the script's
            assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", own)) <= commands[name], f"{path}: jaxdist {name}{own}"


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_parse(code: str):
    ast.parse(code)


@pytest.mark.slow
def test_the_program_runs(tmp_path: Path):
    programs = [code for (code,) in (p.values for p in SNIPPETS) if str(code).startswith("# runs\n")]
    assert programs
    flags = f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"
    for i, code in enumerate(programs):
        script = tmp_path / f"program{i}.py"
        script.write_text(str(code))
        done = subprocess.run(
            [sys.executable, str(script)], env=jobs.environment({"XLA_FLAGS": flags}),
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"^loss \d", done.stdout, re.MULTILINE)
