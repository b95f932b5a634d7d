"""What the package takes from others: little is replaced, and tests use what is public."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jaxdist

ROOT = Path(jaxdist.__file__).parent
MODULES = {path.stem for path in ROOT.iterdir()}


def _imported(node: ast.AST) -> list[str]:
    """Everything of the package that a statement imports, with the module that has it."""
    names = []
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    return [name for name in names if name.partition(".")[0] == "jaxdist"]


REPLACED = {
    "compat/processes.py: prefetch._put_iterator_elements_in_buffer",
    "compat/processes.py: process_prefetch.ProcessPrefetchDatasetIterator._process_failed",
    "compat/processes.py: process_prefetch._put_dataset_elements_in_buffer",
    "compat/processes.py: sys.exit",
    "compat/shardings.py: dispatch.update_dp_aval",
    "compat/shardings.py: pjit.check_shardings_are_auto",
    "compat/shardings.py: shard_map._shmap_checks",
    *(f"control/debugger.py: {name}" for name in ("pdb.Pdb.interaction", "pdb.Pdb._cmdloop", "sys.stdin")),
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


def _private(text: str) -> Iterator[int]:
    """Lines of a program that import or name a module of the package that is not public."""
    for node in ast.walk(ast.parse(text)):
        named = _imported(node)
        if isinstance(node, ast.Constant) and re.fullmatch(r"jaxdist(\.\w+)+", str(node.value)):
            named = [str(node.value)]
        first = {name.split(".")[1] for name in named if "." in name}
        if first & MODULES - set(jaxdist.__all__):
            yield node.lineno  # type: ignore[attr-defined]


def test_a_private_name_in_a_test_has_its_reason() -> None:
    tests = Path(__file__).parent
    texts = {file.relative_to(tests): file.read_text() for file in tests.rglob("*.py")}
    wrong = [
        f"{name}:{line}"
        for name, text in texts.items()
        for line in _private(text)
        if not any("# private: " in each for each in text.splitlines()[max(0, line - 2) : line])
    ]
    assert wrong == []
