"""Definitions of published files, from a folder of checkouts, with stand-ins for packages that only bring data.

`load` imports a module; `grab` takes some definitions from anywhere in a script or notebook.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import linecache
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

COMMITS = {
    "flax": ("google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0"),
    "optax": ("google-deepmind/optax", "2edbcbe2390da13983b92cbef94ac0460ecde1c5"),
    "haiku": ("google-deepmind/dm-haiku", "f4d858a5cbb29140855d68f81f5fd625e078a5ae"),
    "numpyro": ("pyro-ppl/numpyro", "0b935d488056ae1775b4ab05cbe2812f51f21a4f"),
    "equinox": ("patrick-kidger/equinox", "9336d820b2ef66b360fc6cb3611b3da5cefbb14d"),
    "diffrax": ("patrick-kidger/diffrax", "5ea5fcb05058bd22548300a10ea5ef5ce7fb75bb"),
    "cleanrl": ("vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"),
    "nanodo": ("google-deepmind/nanodo", "10aefdeed40a63293daf112b91a5538cd24fa3a4"),
    "vit": ("google-research/vision_transformer", "c6de1e5378c9831a8477feb30994971bdc409e46"),
    "jax": ("jax-ml/jax", "cec06d116c05f0d52adfceee3d3b730fdbcb0ce5"),
}
"""Per folder, the repository and the commit that the entries were written for."""

# Packages that these files import for data, environments, logging or plots; the steps never call them.
STAND_INS = {
    "ale_py", "cleanrl_utils", "cv2", "datasets", "dp_accounting", "envpool", "flaxformer", "gym", "gymnasium",
    "imageio", "matplotlib", "pandas", "seaborn", "sentencepiece", "skimage", "stable_baselines3", "tensorboard",
    "tensorflow", "tensorflow_datasets", "tensorflow_text", "torch", "torchvision", "tqdm", "transformers", "tyro",
}  # fmt: skip
LIBRARIES = {"flax", "haiku", "jax", "numpyro", "optax"}
_grabbed = 0


class MissingSourceError(Exception):
    """A published file is not in the folder of checkouts."""


class _StandIn(types.ModuleType):
    __path__ = []  # noqa: RUF012 (of a package)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return sys.modules.get(full) or self.__dict__.setdefault(name, MagicMock(name=full, __version__="99.0"))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        known = fullname.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        return _StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(_Finder())  # last, so that installed packages win


def folder() -> Path:
    """Return the folder of checkouts."""
    return Path(os.environ.get("PUBLISHED_SOURCES", "published-sources")).resolve()


def _existing(path: str) -> Path:
    full = folder() / path
    if not full.exists():
        repository, commit = COMMITS[path.partition("/")[0]]
        raise MissingSourceError(f"no {path} in {folder()}: it is in github.com/{repository} at {commit[:10]}")
    return full


def load(root: str, name: str) -> Any:
    """Import module `name` with `root` first on the path, and forget it, since other modules share its name.

    The absl flags that it defines become a plain namespace.
    """
    from absl import flags

    where = str(_existing(root))
    known = set(flags.FLAGS)
    tops = {file.name.partition(".")[0] for file in Path(where).iterdir()} - LIBRARIES
    saved = {k: sys.modules.pop(k) for k in list(sys.modules) if k.partition(".")[0] in tops}
    sys.path.insert(0, where)
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        theirs = {
            k: m for k, m in sys.modules.items() if (getattr(m, "__file__", None) or "").startswith(where + os.sep)
        }
    finally:
        sys.path.remove(where)
    for k in theirs:
        del sys.modules[k]
    _forget_stand_ins()
    sys.modules.update(saved)
    values = {k: flags.FLAGS[k].default for k in flags.FLAGS if k not in known}
    for k in values:
        delattr(flags.FLAGS, k)
    for m in theirs.values():
        for k, v in list(vars(m).items()):
            if isinstance(v, flags.FlagValues):
                setattr(m, k, types.SimpleNamespace(**values))
            elif isinstance(v, flags.FlagHolder):
                setattr(m, k, types.SimpleNamespace(value=values.get(v.name)))
    return module


def grab(path: str, *names: str, **given: Any) -> Any:
    """Return a module with a file's imports and its definitions `names`, wherever they are, in this order.

    Line numbers are the file's. Closures look up names in this module. "name#1" is the second
    definition of that name. `given` are values for the rest of the file.
    """
    global _grabbed
    _grabbed += 1
    file = _existing(path)
    text, shown = file.read_text(), str(file)
    if file.suffix == ".ipynb":
        text, shown = _code(text), f"<{path}>"
        linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
    tree = ast.parse(text)
    found: dict[str, list[ast.stmt]] = {}
    for node, defined in _definitions(tree):
        found.setdefault(defined, []).append(node)
    module = types.ModuleType(f"grabbed_{_grabbed}_{file.stem}")
    module.__file__ = shown
    sys.modules[module.__name__] = module
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            try:
                _execute([node], shown, module)
            except ImportError:  # a sibling in the repository
                vars(module).update({n.asname or n.name: MagicMock(name=n.name) for n in node.names})
    _forget_stand_ins()
    vars(module).update(given)
    for name in names:
        base, _, i = name.partition("#")
        _execute([sorted(found[base], key=lambda n: n.lineno)[int(i or 0)]], shown, module)
    return module


def _forget_stand_ins() -> None:
    """Drop stand-ins: other code checks whether torch is imported."""
    for name in [k for k, module in sys.modules.items() if type(module) is _StandIn]:
        del sys.modules[name]


def _execute(body: list[ast.stmt], shown: str, module: types.ModuleType) -> None:
    exec(compile(ast.Module(body=body, type_ignores=[]), shown, "exec"), vars(module))


def _definitions(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node, node.name
        elif isinstance(node, ast.Assign):
            yield from ((node, target.id) for target in node.targets if isinstance(target, ast.Name))


def _code(notebook: str) -> str:
    """Return the code cells of a notebook, without lines for IPython."""
    lines = []
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).split("\n")
            lines += ["#" if line.lstrip().startswith(("%", "!")) else line for line in source]
    return "\n".join(lines) + "\n"


def undecorated(step: Any) -> Any:
    """Return the function under `jit` or `pmap`."""
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
