"""Packages that some features alone need: without one, an error that names the extra which brings it."""

import importlib.metadata
import importlib.util

# The extra that brings each package.
EXTRAS = {"grain": "data", "orbax.checkpoint": "checkpoint", "tensorstore": "checkpoint", "safetensors": "safetensors"}


def version(package: str) -> str:
    """The version of a package; "" if it is not installed, or a folder on PYTHONPATH."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing(package: str, feature: str) -> ImportError:
    """The error about a package that is not there."""
    return ImportError(
        f"{feature} needs {package}, which is not installed: pip install 'jaxdist[{EXTRAS[package]}]'", name=package
    )


def need(package: str, feature: str) -> None:
    """Refuse to begin what would fail later, and on some ranks only. Imports nothing."""
    try:
        there = importlib.util.find_spec(package) is not None
    except ImportError:  # nor is the package that it is in
        there = False
    if not there:
        raise missing(package, feature)
