"""`jaxdist plan`: a function by file or module, tables, JSON and a picture, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


def plan(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *map(str, args)])
    return done.exit_code, " ".join(done.output.replace("│", "").split())


def test_the_example():
    code, text = plan(f"{GPT}:planned", "layers=1", "width=32", "bf16=true", "--topology=2xcpu", "--levels=", "--json")
    assert code == 0, text
    (found,) = json.loads(text)["levels"]
    assert (found["level"], found["own"]) == (1, True)
    weights = 12 * 32**2 + 3 * 32 + (256 + 128) * 32  # of the layer, of norms, of bytes and places
    assert found["bytes"]["parameters"] == 2 * weights


def test_as_a_program(jaxdist, tmp_path: Path):
    """Of a script that reads its own arguments."""
    (tmp_path / "script.py").write_text("import argparse; argparse.ArgumentParser().parse_args()\n" + SCRIPT)
    done = jaxdist("plan", "script.py:make", "--topology=2x4xcpu", "--levels=0,1,2,3", "--json", "--plot", "plan.png")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["topology"]["hosts"] == 2
    assert [one["level"] for one in found["levels"]] == [None]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n")


SCRIPT = """
import jax, jax.numpy as jnp, jaxdist
@jaxdist.data_parallel
def step(w, x):
    return w - jax.grad(lambda w: jnp.mean(x @ w))(w)
def make(width=4, name="w"):
    return step, jax.ShapeDtypeStruct((width,), jnp.float32), jax.ShapeDtypeStruct((8, width), jnp.float32)
def nothing(width=4):
    return step
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the folder where the test works."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_a_module(script: Path):
    script.rename("planned_module.py")
    code, text = plan("planned_module:make", "width=16", "name=x", "--topology=2xcpu")
    assert code == 0, text
    assert "step 'step' on 2xcpu" in text
    assert "64 B" in text


@pytest.mark.usefixtures("script")
def test_a_mesh_and_the_best_one():
    code, text = plan("script.py:make", "--topology=2x2xcpu", "--mesh=data=2,model=-1", "--json")
    assert code == 0, text
    assert json.loads(text)["mesh"] == {"data": 2, "model": 2}
    code, text = plan("script.py:make", "--topology=4xcpu", "--mesh=auto", "--fit", "--json")
    assert code == 0, text
    found = json.loads(text)
    assert {one["mesh"] for one in found["candidates"]} >= {"data=4", "data=2, model=2", "model=4"}
    assert "jaxdist.parallel(step, mesh=" in found["code"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["make"], "expected MODULE:FUNCTION"),
        (["missing.py:make"], "no such file: missing.py"),
        (["missing_module:make"], "no such module: missing_module"),
        (["script.py:other"], "has no function 'other'"),
        (["script.py:nothing"], "expected a tuple (step, *args)"),
        (["script.py:make", "4"], "expected NAME=VALUE"),
        (["script.py:make", "size=4"], "unexpected keyword argument 'size'"),
        (["script.py:make", "--topology=8xTPU"], "valid: A100-40, A100-80, H100, H200, B200, cpu"),
        (["script.py:make", "--mesh=data"], "expected AXIS=SIZE,..., such as data=8,model=8"),
        (["script.py:make", "--mesh=data=a"], "expected AXIS=SIZE,..., such as data=8,model=8"),
        (["script.py:make", "--topology=4xcpu", "--mesh=data=3,model=2"], "4xcpu has 4 devices, which these sizes"),
        (["script.py:make", "--mesh=auto"], "--mesh auto is for --fit"),
        (["script.py:make", "--levels=a"], "expected numbers from 0 to 3"),
        (["script.py:make", "--topology=2xcpu", "--fit", "--levels=7"], "there is no ZeRO level 7"),
        (["script.py:make", "--topology=2xTPU", "--fit"], "there is no kind"),
        (["script.py:make", "--vary=width=4,8"], "--vary is for --fit"),
        (["script.py:make", "--fit", "--vary=width=4,8", "width=4"], "'width' is given as an argument and to --vary"),
        (["script.py:make", "--fit", "--vary=size=4,8"], "make takes no argument 'size'; it takes name, width"),
        (["script.py:make", "--fit", "--vary=width="], "no values for 'width'"),
        (["script.py:make", "--fit", "--vary=width"], "expected NAME=VALUE,VALUE"),
        (["script.py:make", "--fit", "--vary=width=4", "--vary=width=8"], "'width' is given twice"),
        (["script.py:nothing", "--fit", "--vary=width=4"], "nothing(width=4) returned DataParallel, expected a tuple"),
        (["script.py:make", "--fit", "--vary=width=4", "size=4"], "unexpected keyword argument 'size'"),
        (["script.py:make", "--topology=2xcpu", "--plot=x.txt"], "--plot"),
    ],
)
@pytest.mark.usefixtures("script")
def test_what_is_refused(args: list[str], said: str):
    code, text = plan(*args)
    assert code == 2
    assert said in text


@pytest.mark.parametrize(
    ("inside", "more", "line", "said"),
    [
        # Where the function makes the arguments, or within the step.
        (False, [], "int('four')", "invalid literal for int() with base 10: 'four'"),
        (False, ["--fit", "--vary=width=4,8"], "open('missing.json')", "No such file or directory: 'missing.json'"),
        (True, [], "open('missing.json')", "No such file or directory: 'missing.json'"),
        (True, ["--fit", "--vary=width=4,8"], "jnp.ones(3) @ jnp.ones(4)", "contracting dimensions to have the same"),
    ],
)
def test_an_error_of_the_users_comes_with_its_line(inside: bool, more: list[str], line: str, said: str, script: Path):
    before = "    return w - " if inside else "    return step"
    text = SCRIPT.replace(before, f"    {line}\n{before}", 1)
    script.write_text(text)
    number = text.splitlines().index(f"    {line}") + 1
    code, text = plan("script.py:make", "--topology=2xcpu", *more)
    assert code == 2
    assert "".join(said.split()) in "".join(text.split())
    assert f"script.py:{number})" in "".join(text.split())
    assert ("in the step 'step'" in text) == inside
    assert "JAX_TRACEBACK_FILTERING" not in text  # of a traceback that is not shown


@pytest.mark.usefixtures("script")
def test_what_fits():
    code, text = plan("script.py:make", "--topology=2xcpu", "--fit", "--plot", "fit.png")
    assert code == 0, text
    assert "chosen: the step as it is written" in text
    assert "jax.checkpoint" in text
    assert Path("fit.png").read_bytes().startswith(b"\x89PNG\r\n")
    code, text = plan("script.py:make", "--topology=2xcpu", "--fit", "--json")
    assert json.loads(text)["chosen"] == 0


@pytest.mark.usefixtures("script")
def test_what_is_varied():
    vary = ["--fit", "--vary", "width=16,4", "--vary", "name=w,true", "--topology=2xcpu"]
    code, text = plan("script.py:make", *vary, "--plot", "fit.png")
    assert code == 0, text
    assert "chosen: make(width=16, name='w')" in text
    assert "the time of as much data" in text
    assert Path("fit.png").read_bytes().startswith(b"\x89PNG\r\n")
    code, text = plan("script.py:make", *vary, "--json")
    choices = [one["choice"] for one in json.loads(text)["candidates"]]
    assert choices == [{"width": width, "name": name} for width in (16, 4) for name in ("w", True)]
    remat = [f"{GPT}:planned", "layers=1", "width=32", "--fit", "--vary=remat=true,false", "--levels=1"]
    code, text = plan(*remat, "--topology=2xcpu")
    assert code == 0, text
    assert "chosen: planned(remat=False); tx = jaxdist.zero(tx, level=1)" in text
