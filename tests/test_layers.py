"""The layers of the package: each imports what stands below it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jaxdist

ROOT = Path(jaxdist.__file__).parent
# From the ground up; those of a line know nothing of one another.
LAYERS = (
    ("sources",),
    ("compat", "errors", "extras", "mesh", "streams", "text", "tracebacks"),
    ("machine",),
    ("control",),
    ("connectors",),
    ("ir",),
    ("communicators",),
    ("runtime",),
    ("placements",),
    ("agreement",),
    ("step",),
    ("precision", "sinks"),
    ("zero", "grad", "rng", "per_device"),
    ("collectives",),
    ("data", "checkpoint"),
    ("observe",),
    ("planning",),
    ("launch",),
    ("cli",),
    ("__main__",),
)
FLOOR = {name: floor for floor, names in enumerate(LAYERS) for name in names}


def _modules() -> dict[str, Path]:
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    del found[""]  # the package itself, whose names are those of all layers
    return found


def _imports(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Everything of the package that a file imports, in functions and for types, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jaxdist":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "jaxdist"]
        for name in names:
            path = name.partition(".")[2]
            yield path if path in modules else path.rpartition(".")[0]


def test_every_module_has_its_layer() -> None:
    assert {name.partition(".")[0] for name in _modules()} == FLOOR.keys()


def test_a_module_imports_what_is_below() -> None:
    modules = _modules()
    wrong = [
        f"{name} imports {imported}"
        for name, file in modules.items()
        for imported in _imports(file, modules)
        if (here := name.partition(".")[0]) != (there := imported.partition(".")[0])
        and FLOOR.get(there, len(LAYERS)) >= FLOOR[here]
    ]
    assert wrong == []


def test_nothing_is_imported_in_a_circle() -> None:
    modules = _modules()
    after: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in modules.items():
        after[name] = {other for other in _imports(file, modules) if other not in ("", name)}
    while free := [name for name, others in after.items() if not others & after.keys()]:
        for name in free:
            del after[name]
    assert dict(after) == {}
