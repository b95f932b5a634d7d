"""jaxdist: train on many devices with a step written for one. `__init__.pyi` lists the public names."""

import importlib.metadata
from typing import Any

import lazy_loader

from jaxdist import extras

# Names are imported when they are first asked for: the command that starts a job needs no JAX.
_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # 30 ms, which an import need not take
        return importlib.metadata.version(__name__)
    try:
        return _import(name)
    except ModuleNotFoundError as error:
        if error.name not in extras.EXTRAS:
            raise
        raise extras.missing(error.name, f"{__name__}.{name}") from None
