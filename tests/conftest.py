"""Eight virtual CPU devices, float64 and quick compilation for every test; what takes longest starts first."""

import os

if "OMPI_COMM_WORLD_SIZE" not in os.environ and "PMI_SIZE" not in os.environ:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_ENABLE_X64", "1")
# Where tests look at what travels, this may not depend on how busy the machine was. Arrays are small here: where
# messages took their time, whole steps would run on every device instead (oracle/test_idioms.py).
os.environ["JAXDIST_MACHINE"] = "cpu,latency=0,stall=4e-5"
# Unbuffered, a print() is one write for its text and one for the end of its line, and lines of ranks that share a pipe
# mix. Tests that want it so say so.
os.environ.pop("PYTHONUNBUFFERED", None)

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import quick
from harness.started import jaxdist, launcher, mpirun_there, wait_gone  # noqa: F401 (fixtures of several folders)

# JAX makes objects by the million and keeps many: to look through them over and over took a tenth of the time.
gc.set_threshold(100_000)


FIRST = (
    "jobs/test_faults.py", "jobs/test_results.py", "jobs/test_start.py", "examples/test_gallery.py",
    "oracle/test_optimizers.py", "oracle/test_idioms.py", "oracle/test_programs.py", "launch/test_ends.py",
    "examples/test_mnist.py", "program/test_plan.py", "jobs/test_hosts.py", "io/test_checkpoint_jobs.py",
)  # fmt: skip
"""The longest, each of which one worker runs: as the last one it would keep the others waiting."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than cores: tests of jobs wait for these half of their time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of `FIRST`, then those with slow tests, then the others."""
    files = {item.path: item.path.relative_to(Path(__file__).parent).as_posix() for item in items}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = {
        path: FIRST.index(name) if name in FIRST else len(FIRST) + (path not in slow) for path, name in files.items()
    }
    items.sort(key=lambda item: order[item.path])


@pytest.fixture(autouse=True)
def _quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most of what the tests do is XLA's work. Those of a program's text, memory or last bits are marked."""
    with quick.compilation(request.node.get_closest_marker("optimised") is None):
        yield


@pytest.fixture
def messages_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are priced as where `JAXDIST_MACHINE` says nothing and nobody has measured them."""
    from jaxdist import get_context
    from jaxdist.machine import VIRTUAL  # private: a public setting would be one of the process

    monkeypatch.setattr(get_context(), "kind", VIRTUAL.kind)


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    """What is said once in a process is said in each test."""
    if text := sys.modules.get("jaxdist.text"):  # private: a user has one process
        text.say_once.cache_clear()
