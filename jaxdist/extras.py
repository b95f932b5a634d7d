"""Packages that some features alone need: without one, an error that names the extra which brings it."""

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

# The extra that brings each package.
EXTRAS = {"grain": "data", "orbax.checkpoint": "checkpoint", "tensorstore": "checkpoint", "safetensors": "safetensors"}


def version(package: str) -> str:
    """The version of a package; "" if it is not installed, or a folder on PYTHONPATH."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def libtpu_problem() -> str:
    """Say why the installed libtpu is not the one that JAX needs; "" if it is, or if the user has their own build."""
    # jax 0.10-0.12 names its libtpu in the extra "tpu", and does not check. A different one may crash the process.
    package, path = importlib.util.find_spec("libtpu"), os.environ.get("TPU_LIBRARY_PATH")
    if package and path and not path.startswith(str(Path(package.origin or "").parent)):
        return ""  # JAX itself sets the variable to the package's folder
    needs = [re.match(r"libtpu==([\d.]+)\.\*", text) for text in importlib.metadata.requires("jax") or ()]
    wanted, installed = next((found[1] for found in needs if found), ""), version("libtpu")
    if not wanted or not installed or f"{installed}.".startswith(f"{wanted}."):
        return ""
    return f"libtpu {installed} is installed, and jax {version('jax')} is for libtpu {wanted}.*"


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
