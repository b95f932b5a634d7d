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


def test_everything_public_has_an_example() -> None:
    public = {name: getattr(jaxdist, name) for name in jaxdist.__all__}
    for kind in (jaxdist.Context, jaxdist.Loader):
        methods = {name: x for name, x in vars(kind).items() if callable(x) and not name.startswith("_")}
        public |= {f"{kind.__name__}.{name}": x for name, x in methods.items()}
    # One runs by itself, the other takes a machine that computes wrongly.
    without = {name for name, thing in public.items() if ">>>" not in (thing.__doc__ or "")}
    assert without == {"SyncError"}
