"""jaxdist: train on many devices with a step written for one.

The public names are listed in `__init__.pyi`, and imported when they are first asked for: the command that starts a job
needs no JAX.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Any

from jaxdist import extras, streams
from jaxdist.control import parent


class _Package(ModuleType):
    """A package of which some functions have the name of a module, `zero` say: an import binds the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:  # a function that is sent to other processes may name it
        return importlib.import_module, (__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*__all__, "__version__", *(name for name in self.__dict__ if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        try:
            module = importlib.import_module(_MODULE_OF[name])
        except ModuleNotFoundError as error:
            if error.name not in extras.EXTRAS:
                raise
            raise extras.missing(error.name, f"{__name__}.{name}") from None
        value = globals()[name] = getattr(module, name)
        path = module.__name__
        if path.endswith(f".{name}"):  # jaxdist.plan is the function, jaxdist.plan.Plan a class of its module
            beside = path.rpartition(".")[0] + "." if path.count(".") > 1 else path  # of its layer
            vars(value).update(
                (k, v) for k, v in vars(module).items() if getattr(v, "__module__", "").startswith(beside)
            )
        return value
    if name == "__version__":
        return importlib.metadata.version(__name__)
    path = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(path) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(path)


streams.open_closed()  # before a socket of a library's gets the number of one
parent.end_with_mpirun()  # to import the rest takes seconds

_MODULE_OF = {
    alias.name: node.module or ""
    for node in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom) and node.module != __name__  # these are modules
    for alias in node.names
}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]
sys.modules[__name__].__class__ = _Package
