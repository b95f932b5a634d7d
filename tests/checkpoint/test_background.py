"""Saves in the background: their failures are told, at the latest by the exit code, and the last one is waited for."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from harness import jobs
from states import there

import jaxdist
from jaxdist import CheckpointError
from jaxdist.checkpoint import orbax_writer

FULL = """
import sys, time, jaxdist, numpy as np
from jaxdist.checkpoint import writing

def full(*args):
    raise OSError(28, "No space left on device")

path = sys.argv[1]
jaxdist.save(path, {"w": np.ones(3)}, 1)
written, writing._write = writing._write, full
saving = jaxdist.save(path, {"w": np.ones(3)}, 2, wait=False)
"""


def run(path: Path, script: str) -> jobs.Result:
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, timeout=120, check=False)
    return jobs.Result(done.returncode, done.stdout, done.stderr, 0)


@pytest.mark.slow
def test_a_failure_of_the_last_save_fails_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, FULL + "print('the end')")
    assert done.returncode == 1, done.output
    assert done.stdout == "the end\n"
    assert "the script has ended, and its last save had failed: checkpoint" in done.stderr
    assert "2 was not written (earlier ones are as they were), on rank 0: " in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["1"]  # and no lock


@pytest.mark.slow
def test_a_failure_that_the_script_has_seen_does_not_and_the_last_save_is_complete(tmp_path: Path) -> None:
    """Python forbids new work for executors before it waits for threads, and orbax's need them."""
    late = textwrap.dedent("""
        def late(*args):
            time.sleep(0.5)  # the script has ended
            return written(*args)

        try:
            saving.wait()
        except jaxdist.CheckpointError:
            writing._write = late
            jaxdist.save(path, {f"w{i}": np.full(1000, i) for i in range(20)}, 2, wait=False)
    """)
    done = run(tmp_path, FULL + late)
    assert done.returncode == 0, done.output
    assert done.output == ""
    assert there(tmp_path) == ["1", "2"]
    got = jaxdist.restore(tmp_path, {f"w{i}": np.zeros(1000, int) for i in range(20)})
    assert all((got[f"w{i}"] == i).all() for i in range(20))


@pytest.mark.parametrize("call", ["save", "restore", "latest_step", "wait"])
def test_the_next_call_raises_it(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    jaxdist.save(tmp_path, {"w": np.ones(3)}, 1)
    calls = {
        "save": lambda: jaxdist.save(tmp_path, {"w": np.ones(3)}, 3),
        "restore": lambda: jaxdist.restore(tmp_path, {"w": np.ones(3)}),
        "latest_step": lambda: jaxdist.latest_step(tmp_path),
        "wait": lambda: saving.wait(),
    }
    with monkeypatch.context() as patch:
        patch.setattr("jaxdist.checkpoint.writing._write", full)
        saving = jaxdist.save(tmp_path, {"w": np.ones(3)}, 2, wait=False)
        with pytest.raises(CheckpointError, match=r"2 was not written.*No space left"):
            calls[call]()
    assert jaxdist.latest_step(tmp_path) == 1  # told once
    calls["save"]()


def test_what_orbax_leaves_to_asyncio_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    orbax_writer._show_one_error()
    logger = logging.getLogger("asyncio")
    code = compile("raise OSError('full')", "/site-packages/orbax/checkpoint/serialization.py", "exec")
    for what in (code, "raise OSError('of the script')"):
        try:
            exec(what)
        except OSError as error:
            logger.error("Task exception was never retrieved\nfuture: <Task>", exc_info=error)
    assert "of the script" in caplog.text
    assert "full" not in caplog.text
