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
    """And classes of a module are found beside the function of its name."""
    out = _run("""
import sys, jaxdist
jaxdist.init, jaxdist.data_parallel
print('optax' in sys.modules)
print(jaxdist.plan.Plan.__name__, jaxdist.memory.Memory.__name__, jaxdist.__version__)
""")
    assert out == f"False\nPlan Memory {jaxdist.__version__}\n"


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
    out = _run("""
import sys
for first in ("", "from jaxdist.grad import grad", "import jaxdist.zero, jaxdist.grad", "from jaxdist import *"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "jaxdist"]:
        del sys.modules[name]
    import jaxdist
    exec(first)
    print(type(jaxdist.grad).__name__, type(jaxdist.zero).__name__, jaxdist.data.__name__)
""")
    assert out == "function function jaxdist.data\n" * 4


def test_only_public_names_are_shown() -> None:
    assert [name for name in dir(jaxdist) if not name.startswith("__")] == sorted(jaxdist.__all__)
    assert not hasattr(jaxdist, "nothing_of_this_name")
