"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import jaxdist

OPTIONAL = {"jaxdist.communicators.mpi", "jaxdist.connectors.mpi"}  # import MPI: under mpirun only
MODULES = [
    m.name
    for m in pkgutil.walk_packages(jaxdist.__path__, "jaxdist.")
    if m.name not in OPTIONAL and m.name != "jaxdist.__main__"
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_every_public_function_has_an_example() -> None:
    for name in jaxdist.__all__:
        thing = getattr(jaxdist, name)
        if callable(thing) and not isinstance(thing, type):
            assert ">>>" in (thing.__doc__ or ""), name
