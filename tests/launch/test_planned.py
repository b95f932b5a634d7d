"""`jaxdist plan`: a function by file or module, tables and JSON, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.commands import command, refused
from harness.errors import missing
from harness.started import Jaxdist

SCRIPT = Path(__file__).parent / "scripts" / "planned.py"


def plan(*words: object) -> dict[str, Any]:
    code, text = command("plan", *words, "--json")
    assert code == 0, text
    return json.loads(text)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the folder where the test works."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(SCRIPT, tmp_path / "script.py"))


@pytest.mark.slow
def test_a_script_that_reads_its_own_arguments(jaxdist: Jaxdist) -> None:
    done = jaxdist("plan", "script.py:make", "--topology=2x4xcpu", "--levels=0,1,2,3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["topology"]["hosts"] == 2
    assert [one["level"] for one in found["candidates"]] == [None]


def test_a_module(script: Path) -> None:
    Path("planned_module.py").write_text(script.read_text().replace("parse_args()", "parse_args([])"))
    code, text = command("plan", "planned_module:make", "width=16", "name=x", "--topology=2xcpu")
    assert code == 0, text
    assert missing(("'step'", "2xcpu", "64 B"), text) == []


def test_a_mesh_and_what_fits() -> None:
    assert plan("script.py:make", "--topology=2x2xcpu", "--mesh=data=2,model=-1")["mesh"] == {"data": 2, "model": 2}
    found = plan("script.py:make", "--topology=4xcpu", "--mesh=auto", "--fit")
    assert {one["mesh"] for one in found["candidates"]} >= {"data=4", "data=2, model=2", "model=4"}
    assert "jaxdist.parallel(step, mesh=" in found["code"]
    code, text = command("plan", "script.py:make", "--topology=2xcpu", "--fit")
    assert (code, "chosen" in text) == (0, True), text


REFUSED = [
    (["make"], ["MODULE:FUNCTION"]),
    (["missing.py:make"], ["missing.py"]),
    (["script.py:other"], ["'other'"]),
    (["script.py:nothing"], ["(step, *args)"]),
    (["script.py:make", "4"], ["NAME=VALUE"]),
    (["script.py:make", "size=4"], ["'size'"]),
    (["script.py:make", "--topology=8xTPU"], ["TPU", "A100-40", "H100", "cpu"]),
    (["script.py:make", "--mesh=data"], ["AXIS=SIZE"]),
    (["script.py:make", "--topology=4xcpu", "--mesh=data=3,model=2"], ["4xcpu", "4 devices"]),
    (["script.py:make", "--mesh=auto"], ["--mesh auto", "--fit"]),
    (["script.py:make", "--topology=2xcpu", "--fit", "--levels=7"], ["--levels 7", "0 to 3"]),
]


@pytest.mark.parametrize(("words", "tokens"), REFUSED, ids=lambda words: " ".join(words)[:60])
def test_what_is_refused(words: list[str], tokens: list[str]) -> None:
    refused(tokens, "plan", *words)


@pytest.mark.parametrize(
    ("name", "more", "line", "tokens"),
    [
        ("makes_no_number", [], 'int("four")', ["invalid literal", "'four'"]),
        ("multiplies_within", ["--fit"], "jnp.ones(3) @ jnp.ones(4)", ["contracting", "'multiplies'"]),
    ],
)
def test_an_error_of_the_users_comes_with_its_line(
    name: str, more: list[str], line: str, tokens: list[str], script: Path
) -> None:
    (number,) = (i for i, text in enumerate(script.read_text().splitlines(), 1) if text.strip() == line)
    refused([*tokens, f"script.py:{number})"], "plan", f"script.py:{name}", "--topology=2xcpu", *more)
