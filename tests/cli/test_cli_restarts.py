"""`jaxdist run --max-restarts`: a job that starts again, from its last checkpoint."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import training
from typer.testing import CliRunner, Result

from jaxdist.cli import app
from jaxdist.cli.run import _found_again, _what_remains
from jaxdist.launch.hosts import Host, parse_hosts
from jaxdist.launch.processes import Failed

pytestmark = pytest.mark.slow  # together

TRAINING = training.__file__


def found(output: str) -> dict[str, Any]:
    line = re.search(r"FOUND (.*)", output)
    assert line, output
    return json.loads(line[1])


@pytest.mark.mpi
def test_a_killed_rank_costs_not_a_bit(jaxdist, mpirun_there, tmp_path):
    run = ["run", "-n", 2, "--launcher", "mpirun"]
    straight = jaxdist(*run, TRAINING, tmp_path / "straight", 12, 3, timeout=120)
    assert straight.returncode == 0, straight.stderr
    args = [TRAINING, tmp_path / "cut", 12, 3, "--die-at", 7, "--rank", 1]
    done = jaxdist(*run, "--max-restarts", 1, *args, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, with 2 ranks" in done.stderr
    assert found(done.stdout)["bits"] == found(straight.stdout)["bits"]


def test_with_the_ranks_that_remain(jaxdist, tmp_path):
    args = [TRAINING, tmp_path / "cut", 12, 2, "--x64", "--die-at", 7, "--rank", 1]
    done = jaxdist("run", "-n", 2, "--launcher", "env", "--max-restarts", 2, "--shrink", *args, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 2, with 1 rank\n" in done.stderr
    got = found(done.stdout)
    assert got["devices"] == 1
    alone = training.run(str(tmp_path / "alone"), 12, 0)
    assert max(np.abs(np.subtract(got["params"][k], v)).max() for k, v in alone["params"].items()) <= 1e-10


def test_no_more_than_asked_for(jaxdist, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nprint('TRY', os.environ['JAXDIST_RESTARTS'], flush=True)\nsys.exit(3)\n")
    done = jaxdist("run", "--launcher", "env", "--max-restarts", 2, script)
    assert done.returncode == 3
    assert re.findall(r"TRY (\d)", done.stdout) == ["0", "1", "2"]


def _run_with(results: Iterator[tuple[float, int]], monkeypatch: pytest.MonkeyPatch) -> tuple[Result, list[float]]:
    """`jaxdist run --max-restarts 20` of a job whose starts take so many seconds and end with such exit codes."""
    module = importlib.import_module("jaxdist.cli.run")
    clock, pauses = [0.0], list[float]()

    def launch(*_: Any, on_failure: Callable[[Failed], None], **__: Any) -> int:
        seconds, code = next(results)
        clock[0] += seconds
        if code:
            on_failure(Failed("rank 1", code))
        return code

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    return CliRunner().invoke(app, ["run", "--launcher", "env", "--max-restarts", "20", "echo"]), pauses


def test_a_loop_that_fails_at_once_slows_down_and_gives_up(monkeypatch):
    done, pauses = _run_with(itertools.repeat((2.0, 7)), monkeypatch)
    assert done.exit_code == 7
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    said = "each of the last 6 starts failed within 15 s, the last one when rank 1 ended with exit code 7"
    assert said in done.output
    assert "although 15 of --max-restarts 20 are left" in done.output


def test_failures_far_apart_have_all_the_restarts(monkeypatch):
    done, pauses = _run_with(iter([(2.0, 7), (2.0, 7), (60.0, 7)] * 6 + [(60.0, 0)]), monkeypatch)
    assert (done.exit_code, pauses) == (0, [1.0] * 6)


def test_not_after_the_user_has_ended_it(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('TRY', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "jaxdist", "run", "--launcher", "env", "--max-restarts", "3", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "TRY\n"
        job.send_signal(signal.SIGINT)
        rest, _ = job.communicate(timeout=60)
    assert job.returncode == 130
    assert rest == ""


@pytest.mark.parametrize(
    ("hosts", "silent", "left"),
    [
        ("a:2,b:2", "a", [Host("b", 2)]),
        ("a:2,b:2", "", [Host("a", 2), Host("b", 1)]),
        ("a:2,b:1", "", [Host("a", 2)]),
    ],
)
def test_hosts_that_remain(hosts, silent, left, monkeypatch):
    module = importlib.import_module("jaxdist.cli.run")  # `jaxdist.cli.run` is the function
    monkeypatch.setattr(module, "that_answer", lambda hosts: [h for h in hosts if h.name != silent])
    assert _what_remains(parse_hosts(hosts)) == left


@pytest.mark.parametrize(
    ("placed", "size", "silent", "found"),
    [
        ([], 3, "", ([], 4)),
        ([], 4, "", None),
        (parse_hosts("b:2"), 2, "a", None),
        (parse_hosts("b:2"), 2, "", (parse_hosts("a:2,b:2"), 4)),
        (parse_hosts("a:2,b:1"), 3, "", (parse_hosts("a:2,b:2"), 4)),
    ],
)
def test_places_that_are_there_again(placed, size, silent, found, monkeypatch):
    module = importlib.import_module("jaxdist.cli.run")
    monkeypatch.setattr(module, "that_answer", lambda hosts: [h for h in hosts if h.name != silent])
    assert _found_again(placed, size, parse_hosts("a:2,b:2") if placed else [], 4) == found


def test_in_lanes_a_killed_rank_costs_not_a_bit_on_fewer_and_on_more_ranks(jaxdist, tmp_path):
    """4 lanes: alone; and on 3 ranks, without the one that is killed on 2, after another kill on 3 again."""
    run = ["run", "--lanes", 4, "--launcher", "env"]
    alone = jaxdist(*run, TRAINING, tmp_path / "alone", 17, 3, timeout=180)
    assert alone.returncode == 0, alone.stderr
    args = [TRAINING, tmp_path / "cut", 17, 3, "--die-at", 7, 12, "--rank", 1]
    more = ["-n", 3, "--max-restarts", 2, "--shrink", "--grow"]
    done = jaxdist(*run, *more, *args, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 2, with 2 ranks\n" in done.stderr
    assert "restart 2 of 2, with 3 ranks\n" in done.stderr
    assert found(done.stdout)["bits"] == found(alone.stdout)["bits"]
