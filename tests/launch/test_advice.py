"""What `jaxdist run` says beforehand: options after the script, more ranks than there is room for."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.launch import advice


@pytest.mark.parametrize(
    ("script", "command"),
    [
        (["a.py", "-n", "2"], "-n 2 a.py"),
        (["a.py", "-n2", "--lr", "1"], "-n2 a.py --lr 1"),
        (["-m", "mod", "--np=4"], "--np=4 -m mod"),
        (["a.py", "--lr", "1", "--np", "2", "--launcher", "env"], "--np 2 --launcher env a.py --lr 1"),
        (["a.py", "--shrink"], "--shrink a.py"),
    ],
)
def test_options_after_the_script(script: list[str], command: str) -> None:
    assert advice.misplaced_options(script, ranks_given=False).endswith(f": jaxdist run {command}")


@pytest.mark.parametrize(
    "rest", [[], ["-n"], ["-n", "name"], ["--nproc", "2"], ["--communicator", "xla"], ["--path", "a -n"], ["x-n", "2"]]
)
def test_options_of_the_scripts_own(rest: list[str]) -> None:
    assert advice.misplaced_options(["a.py", *rest], ranks_given=False) == ""


def test_run_hints_and_goes_on(jaxdist, tmp_path) -> None:
    (tmp_path / "a.py").write_text("import sys; print(sys.argv[1:])")
    done = jaxdist("run", "--launcher", "env", "a.py", "-n", "2")
    assert (done.returncode, done.stdout) == (0, "['-n', '2']\n")
    assert "jaxdist: -n 2 stands after a.py and is its own argument. For 2 ranks: jaxdist run -n 2 a.py" in done.stderr
    assert "stands after" not in jaxdist("run", "-n", "1", "--launcher", "env", "a.py", "-n", "2").stderr


def test_many_ranks_on_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "cores", lambda: 2)
    monkeypatch.setattr(advice, "_free_mib", lambda: 20 << 10)
    python = [sys.executable, "a.py"]
    assert advice.crowded(8, python) == ""
    assert advice.crowded(100, ["/bin/echo"]) == ""
    assert "100 ranks share 2 cores" in advice.crowded(100, python)
    monkeypatch.setattr(advice, "_free_mib", lambda: None)
    assert "100 ranks share 2 cores" in advice.crowded(100, python)


def test_more_ranks_than_memory_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(advice, "_free_mib", lambda: 4 << 10)
    script = tmp_path / "a.py"
    script.write_text("")
    done = CliRunner().invoke(app, ["run", "-n", "1000", "--launcher", "env", str(script)])
    assert done.exit_code == 2
    assert "at most 51 ranks here" in " ".join(done.output.split())


def test_free_memory_is_that_of_this_machine() -> None:
    free = advice._free_mib()
    assert free is None or 0 < free < 1 << 30
