"""What the package itself shows, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import jaxdist


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_command_starts_without_jax() -> None:
    out = _run("import sys, jaxdist.cli; print([m for m in ('jax', 'numpy', 'flax', 'optax') if m in sys.modules])")
    assert out == "[]\n"


def test_what_is_used_is_imported() -> None:
    out = _run("import sys, jaxdist; jaxdist.init, jaxdist.data_parallel; print('optax' in sys.modules)")
    assert out == "False\n"


def test_an_import_changes_nothing() -> None:
    """In JAX, in the environment, in Python's hooks: docs/sharp-bits.md says what `init` does."""
    out = _run("""
import os, signal, sys, threading, jax
hooks = lambda: [sys.excepthook, sys.unraisablehook, sys.exit, threading.excepthook, signal.getsignal(signal.SIGINT)]
state = lambda: [dict(jax.config.values), dict(os.environ), hooks(), dict(SystemExit.__dict__), threading.enumerate()]
before = state()
import jaxdist
for name in jaxdist.__all__:
    getattr(jaxdist, name)
print([a == b for a, b in zip(before, state())])
""")
    assert out == f"{[True] * 5}\n"


def test_a_function_is_not_taken_for_the_module_of_its_name() -> None:
    code = "import jaxdist\n{}\nprint(type(jaxdist.grad).__name__, type(jaxdist.zero).__name__, jaxdist.data.__name__)"
    for first in ("", "from jaxdist.grad import grad", "import jaxdist.zero, jaxdist.grad", "from jaxdist import *"):
        assert _run(code.format(first)) == "function function jaxdist.data\n", first


def test_only_public_names_are_shown() -> None:
    assert [name for name in dir(jaxdist) if not name.startswith("__")] == sorted(jaxdist.__all__)
    assert not hasattr(jaxdist, "nothing_of_this_name")


def test_classes_of_a_module_are_found_beside_the_function_of_its_name() -> None:
    code = "import jaxdist; print(jaxdist.plan.Plan.__name__, jaxdist.memory.Memory.__name__, jaxdist.__version__)"
    assert _run(code) == f"Plan Memory {jaxdist.__version__}\n"
