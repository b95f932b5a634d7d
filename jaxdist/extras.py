"""Packages that some features alone need: without one, an error that names the extra which brings it."""

from __future__ import annotations

import importlib.util


def need(package: str, extra: str, feature: str) -> None:
    """Refuse to begin what would fail later, and on some ranks only. Imports nothing.

    Args:
      package: its name for `import`.
      extra: of jaxdist, which brings it.
      feature: what needs it, for the message.

    Raises:
      ImportError: it is not installed; says what to install.

    Example:
      >>> need("numpy", "data", "jaxdist.loader")
      >>> need("no_such_package", "data", "jaxdist.loader")
      Traceback (most recent call last):
        ...
      ImportError: jaxdist.loader needs no_such_package, which is not installed: pip install 'jaxdist[data]'
    """
    try:
        there = importlib.util.find_spec(package) is not None
    except ImportError:  # nor is the package that it is in
        there = False
    if not there:
        raise ImportError(f"{feature} needs {package}, which is not installed: pip install 'jaxdist[{extra}]'")
