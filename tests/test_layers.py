"""The layers of the package: each imports what stands below it."""

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
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
    ("precision",),
    ("sharding", "gradients", "manual"),
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


def _imported(node: ast.AST) -> list[str]:
    """Everything of the package that a statement imports, with the module that has it."""
    names = []
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    return [name for name in names if name.partition(".")[0] == "jaxdist"]


def _imports(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, in functions and for types, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        for name in _imported(node):
            path = name.partition(".")[2]
            yield path if path in modules else path.rpartition(".")[0]


def test_a_module_imports_what_is_below() -> None:
    modules = _modules()
    assert {name.partition(".")[0] for name in modules} == FLOOR.keys()
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


REPLACED = {
    "compat/compilation.py: compiler.backend_compile_and_load",
    "control/failfast.py: sys.exit",
}
"""What is another library's and gets ours in its place; each says why. (Python asks for hooks to be replaced.)"""


def _replaced(file: Path) -> Iterator[str]:
    """Names of other modules that a file assigns to, and attributes that it puts into a class of Python's own."""
    tree = ast.parse(file.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    foreign = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            written = ast.unparse(target)
            its_own = "hook" in written or written.startswith(("sys.argv", "sys.modules"))
            if isinstance(target, ast.Attribute) and written.split(".")[0] in foreign and not its_own:
                yield written


def test_little_of_other_libraries_is_replaced() -> None:
    found = {f"{file.relative_to(ROOT)}: {name}" for file in ROOT.rglob("*.py") for name in _replaced(file)}
    assert found == REPLACED


def _private(text: str, modules: Collection[str]) -> Iterator[int]:
    """Lines of a program that import or name a module of the package that is not public."""
    for node in ast.walk(ast.parse(text)):
        named = _imported(node)
        if isinstance(node, ast.Constant) and re.fullmatch(r"jaxdist(\.\w+)+", str(node.value)):
            named = [str(node.value)]
        first = {name.split(".")[1] for name in named if "." in name}
        if first & set(modules) - set(jaxdist.__all__):
            yield node.lineno  # type: ignore[attr-defined]


def test_a_private_name_in_a_test_has_its_reason() -> None:
    modules, tests = _modules(), Path(__file__).parent
    texts = {file.relative_to(tests): file.read_text() for file in tests.rglob("*.py")}
    wrong = [
        f"{name}:{line}"
        for name, text in texts.items()
        for line in _private(text, modules)
        if not any("# private: " in each for each in text.splitlines()[max(0, line - 2) : line])
    ]
    assert wrong == []
