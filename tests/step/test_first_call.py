"""`JAXDIST_LOG=start`: what is said of a step's first call, and when nothing is."""

from __future__ import annotations

import gc
import itertools
import re
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist.step import first_call

COMPILED = r"jaxdist: {}: compiled in \d+\.\d s, first call in [\d.e-]+ s\n"


def of(name: str) -> Any:
    def step(w: Any, x: Any) -> Any:
        return w - jnp.mean(x), jnp.sum(w)

    step.__qualname__ = f"train.<locals>.{name}"
    return jaxdist.data_parallel(step)


def test_the_first_step_has_two_lines_and_a_slow_one_has_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_call, "_count", itertools.count())
    x = jnp.ones((8, 2))
    of("quiet")(1.0, x)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("JAXDIST_LOG", "start")
    step = of("train")
    w, _ = step(1.0, x)
    assert re.fullmatch(r"jaxdist: compiling train \.\.\.\n" + COMPILED.format("train"), capsys.readouterr().err)
    assert float(step(w, x)[0]) == -1.0
    monkeypatch.setattr(first_call, "_WAITED", 1e6)
    of("quick")(1.0, x)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(first_call, "_WAITED", 0.0)
    of("slow")(1.0, x)
    assert re.fullmatch(COMPILED.format("slow"), capsys.readouterr().err)


def test_a_step_that_fails_says_nothing_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_call, "_count", itertools.count())
    monkeypatch.setenv("JAXDIST_LOG", "start")

    @jaxdist.data_parallel
    def train(w: Any, x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(1.0, jnp.ones((8, 2)))
    assert capsys.readouterr().err.endswith("train ...\n")


def test_garbage_is_collected_again_after_it() -> None:
    seen: list[bool] = []

    def step(w: Any, x: Any) -> Any:
        seen.append(gc.isenabled())
        return w - jnp.mean(x)

    jaxdist.data_parallel(step)(1.0, jnp.ones((8, 2)))
    assert (seen[0], gc.isenabled()) == (False, True)
    gc.disable()
    try:
        jaxdist.data_parallel(step)(1.0, jnp.ones((8, 2)))
        assert not gc.isenabled()  # as the user has it
    finally:
        gc.enable()
