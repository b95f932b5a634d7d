"""What the package itself shows, and what importing it costs."""

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from harness import jobs

import jaxdist


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_command_starts_without_jax() -> None:
    out = _run("import sys, jaxdist.cli; print([m for m in ('jax', 'numpy', 'flax', 'optax') if m in sys.modules])")
    assert out == "[]\n"


def test_an_import_changes_nothing() -> None:
    """In JAX, in the environment, in Python's hooks: docs/rules.md says what `init` does."""
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


def test_only_public_names_are_shown() -> None:
    assert [name for name in dir(jaxdist) if not name.startswith("__")] == sorted(jaxdist.__all__)
    assert not hasattr(jaxdist, "nothing_of_this_name")
    modules = {path.stem for path in Path(jaxdist.__file__).parent.iterdir()}
    assert {type(getattr(jaxdist, name)) for name in modules & set(jaxdist.__all__)} == {types.ModuleType}


WITHOUT = """
import os, sys, tempfile
from importlib.machinery import PathFinder

BLOCKED = {"equinox", "etils", "flax", "grain", "matplotlib", "orbax", "safetensors", "tensorstore"}
blocked = set() if (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2") else BLOCKED
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in blocked else find(name, *rest)

import jax, numpy as np, optax, jaxdist
jaxdist.init()
tx = jaxdist.zero(optax.adam(0.1), level=3)

@jaxdist.data_parallel
def step(w, opt_state, x):
    loss, grads = jaxdist.value_and_grad(lambda w: (x @ w).mean())(w)
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, loss

folder, w = sys.argv[1], np.ones(3, np.float32)
w, opt_state, loss = step(w, tx.init(w), np.ones((8, 3), np.float32))
with jaxdist.run_log(f"{folder}/log", total=1) as log:
    log(0, loss=loss)
print(float(loss), jaxdist.latest_step(folder))
for use in (
    lambda: jaxdist.loader(np.ones(8), 4), lambda: jaxdist.save(f"{folder}/other", np.ones(3), 1),
    lambda: jaxdist.restore(folder, np.ones(3)),
):
    try:
        use()
    except ImportError as error:
        print(error)
print(sorted(blocked & set(sys.modules)))
"""


@pytest.mark.slow
def test_what_only_some_features_need_need_not_be_there(tmp_path: Path) -> None:
    """A step, ZeRO and the log work without all extras; what uses one is an error that names it, on all ranks."""
    jaxdist.save(tmp_path, np.ones(3), 1)
    (tmp_path / "script.py").write_text(WITHOUT)
    needs = [
        ("loader", "grain", "data"), ("save", "orbax.checkpoint", "checkpoint"),
        ("restore", "tensorstore", "checkpoint"),
    ]  # fmt: skip
    (alone,) = jobs.launch("hand", 1, [str(tmp_path / "script.py"), str(tmp_path)]).finish()
    told = [f"jaxdist.{name} needs {what}, which is not installed: pip install 'jaxdist[{extra}]'"
            for name, what, extra in needs]  # fmt: skip
    assert alone.stdout.splitlines() == ["3.0 1", *told, "[]"], alone
    for one in jobs.launch("hand", 2, [str(tmp_path / "script.py"), str(tmp_path)]).finish():
        lines = one.stdout.splitlines()[1:4]
        assert one.returncode == 0, one
        assert [line.partition(" needs ")[0] for line in lines] == [
            f"{name}, on rank 1: jaxdist.{name}" for name, *_ in needs
        ]


def test_nothing_is_imported_that_is_not_used() -> None:
    """Each takes a second or more, on every rank."""
    out = _run("""
import sys, jaxdist
for name in jaxdist.__all__:
    getattr(jaxdist, name)
jaxdist.init()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"flax", "grain", "orbax", "tensorstore"}))
print(jaxdist.planning.Plan.__name__, jaxdist.data.Loader.__name__, jaxdist.__version__)
""")
    assert out == f"[]\nPlan Loader {jaxdist.__version__}\n"
