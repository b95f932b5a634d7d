"""A program is compiled once for all tests of a file."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from jaxdist.planning.elsewhere import Needs

_KNOWN: dict[Any, Needs] = {}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each compilation that is asked for."""
    original, asked = Needs.compiled, list[Any]()

    def once(ahead: Any, devices: int, began: float, on_cpu: bool) -> Needs:
        quick = jax.config.read("jax_disable_most_optimizations")
        key = ahead.lowered.as_text(), ahead.arguments, devices, on_cpu, quick
        asked.append(key)
        if key not in _KNOWN:
            _KNOWN[key] = original(ahead, devices, began, on_cpu)
        return dataclasses.replace(_KNOWN[key], ahead=ahead)

    monkeypatch.setattr(Needs, "compiled", once)
    return asked
