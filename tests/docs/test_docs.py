"""The snippets of the README and the documentation run, and the examples in docstrings print what they say."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from harness import jobs, run_docs
from harness.quick import XLA_FLAGS

import jaxdist

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# private: examples of every module are run, but of these: the first two import MPI
OPTIONAL = {"jaxdist.communicators.mpi", "jaxdist.connectors.mpi", "jaxdist.__main__"}


@pytest.mark.slow
def test_python_blocks_run(tmp_path: Path) -> None:
    """Each page's in one process, on two devices; what a page says is not run has its reason in its first line."""
    pages = [page for page in PAGES if any(run_docs.blocks(page.read_text()))]
    flags = f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"
    done = subprocess.run(
        [sys.executable, run_docs.__file__, *map(str, pages)],
        env=jobs.environment({"XLA_FLAGS": flags, "JAX_ENABLE_X64": None}),
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^RAN (.*)$", done.stdout, re.MULTILINE) == [page.name for page in pages]
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]
    assert losses
    assert all(loss < 2 for loss in losses)


def test_examples_in_docstrings_print_what_they_say() -> None:
    names = [m.name for m in pkgutil.walk_packages(jaxdist.__path__, "jaxdist.") if m.name not in OPTIONAL]
    tests = failed = 0
    for name in names:
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        tests, failed = tests + result.attempted, failed + result.failed
    assert failed == 0
    assert tests > 100


def test_everything_public_has_an_example() -> None:
    public = {name: thing for name in jaxdist.__all__ if not isinstance(thing := getattr(jaxdist, name), ModuleType)}
    for kind in (jaxdist.Context, jaxdist.data.Loader):
        methods = {name: x for name, x in vars(kind).items() if callable(x) and not name.startswith("_")}
        public |= {f"{kind.__name__}.{name}": x for name, x in methods.items()}
    without = {name for name, thing in public.items() if ">>>" not in (thing.__doc__ or "")}
    # Not for users; the errors take a machine that computes wrongly, and several ranks.
    assert without == {"Context.only", "SyncError", "ControlError"}
