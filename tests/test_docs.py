"""The documentation says what is so: pages, links, names, variables, options; and its snippets parse or run."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness import jobs, run_docs
from harness.quick import XLA_FLAGS
from typer.main import get_command

import jaxdist
from jaxdist.cli import app

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = {"README.md": (ROOT / "README.md").read_text()} | {f"docs/{name}": text for name, text in PAGES.items()}
FENCE = run_docs.FENCE
BLOCKS = {path: list(run_docs.blocks(text)) for path, text in TEXTS.items()}
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)


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
    for inline, defined in LINK.findall(FENCE.sub("", TEXTS[path])):
        link = (inline or defined).removeprefix(f"{REPOSITORY}/blob/main/")
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT if link != (inline or defined) else (ROOT / path).parent) / name if name else ROOT / path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert not broken


def test_links_of_the_readme_work_on_a_package_index():
    """It has no other files of the repository: a relative link leads nowhere there."""
    links = [inline or defined for inline, defined in LINK.findall(FENCE.sub("", TEXTS["README.md"]))]
    assert links
    assert [link for link in links if not link.startswith(f"{REPOSITORY}/")] == []
    used = set(re.findall(r"\]\[([^\]]+)\]", TEXTS["README.md"]))
    assert used == set(re.findall(r"^\[([^\]]+)\]: ", TEXTS["README.md"], re.MULTILINE))


@pytest.mark.parametrize("path", PAGES)
def test_code_is_read_without_scrolling(path: str):
    """Tables that a command prints are blocks of text."""
    code = [
        line for _, language, block in FENCE.findall(PAGES[path]) if language != "text" for line in block.splitlines()
    ]
    assert [line for line in code if len(line) > 88] == []


def test_the_address_of_the_repository_is_one():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    for name, key in (("mkdocs.yml", "repo_url"), ("CITATION.cff", "repository-code")):
        assert re.search(rf"^{key}: {re.escape(REPOSITORY)}$", (ROOT / name).read_text(), re.MULTILINE), name


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


def documented() -> dict[str, str]:
    """The pages, and the docstring of each public thing and its public members."""
    texts = dict(TEXTS)
    for name in jaxdist.__all__:
        thing = getattr(jaxdist, name)
        texts[name] = thing.__doc__ or ""
        if isinstance(thing, type):
            members = {member: x for member, x in vars(thing).items() if not member.startswith("_")}
            texts |= {f"{name}.{member}": getattr(x, "__doc__", "") or "" for member, x in members.items()}
    return texts


def test_only_public_names_are_named():
    """A dotted path beyond them may be another one in the next version."""
    found = {where: set(re.findall(r"\bjaxdist\.([A-Za-z_]\w*)", text)) for where, text in documented().items()}
    modules = re.findall(r"^from jaxdist import (\w+)", (ROOT / "jaxdist" / "__init__.pyi").read_text(), re.MULTILINE)
    private = {where: names - {*jaxdist.__all__, *modules, "__version__", "py", "md"} for where, names in found.items()}
    assert {where: sorted(names) for where, names in private.items() if names} == {}


def test_variables_are_those_of_the_code():
    variable = re.compile(r"\bJAXDIST_[A-Z]+\b")
    code = {name for file in (ROOT / "jaxdist").rglob("*.py") for name in variable.findall(file.read_text())}
    assert set(variable.findall(PAGES["commands.md"])) == code
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
            assert name in commands, f"{path}: jaxdist {name}"
            own = re.split(r"\S+\.py\b| -m ", arguments)[0]  # what follows the script is the script's
            assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", own)) <= commands[name], f"{path}: jaxdist {name}{own}"


@pytest.mark.parametrize("path", [path for path, found in BLOCKS.items() if found])
def test_python_blocks_parse_and_say_why_they_are_not_run(path: str):
    for block in BLOCKS[path]:
        ast.parse(block.code)
        if block.runs and block.program:  # else a reader who starts several processes gets an error
            assert "jaxdist.init(" in block.code, f"{path}:{block.line}: no jaxdist.init()"
        reason = re.match(r"# not run(.*)", block.code)
        assert reason is None or re.fullmatch(r": \w.*", reason[1]), f"{path}:{block.line}: say why: # not run: REASON"


@pytest.mark.slow
def test_all_other_python_blocks_run(tmp_path: Path):
    pages = [path for path, found in BLOCKS.items() if any(block.runs for block in found)]
    command = [sys.executable, str(Path(run_docs.__file__)), *(str(ROOT / path) for path in pages)]
    flags = f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"
    env = jobs.environment({"XLA_FLAGS": flags, "JAX_ENABLE_X64": None})
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^RAN (.*)$", done.stdout, re.MULTILINE) == [Path(path).name for path in pages]
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) >= 9  # of the programs
    assert all(loss < 2 for loss in losses)
