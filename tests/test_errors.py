"""Any exception in words, whatever it is made of; what other ranks are told of it is in control/test_failfast.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxdist.errors import in_words, message_of, printed


def refuse(self: Any, *args: Any) -> Any:
    raise RuntimeError("no words")


def odd(name: str, **members: Any) -> Any:
    return type(name, (ValueError,), members)


FAILED = "<exception str() failed>"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: odd("Odd", __str__=refuse, __repr__=refuse)(1), f"Odd: {FAILED}"),
        (lambda: odd("Odd", __str__=lambda self: sys.exit(0))(), f"Odd: {FAILED}"),
        (lambda: odd("Odd", __str__=lambda self: 7)(), f"Odd: {FAILED}"),
        (lambda: odd("Odd", __class__=property(refuse))("boom"), "Odd: boom"),
        (lambda: odd("Odd", __cause__=property(refuse), __notes__=7)("boom"), "Odd: boom"),
        (lambda: odd("Odd", __traceback__=None)("boom"), "Odd: boom"),
        (lambda: type("Base", (BaseException,), {})("boom"), "Base: boom"),
        (lambda: ExceptionGroup("two", [odd("Odd", __str__=refuse)()]), f"the first is Odd: {FAILED}"),
        (lambda: ValueError(b"\xff"), r"ValueError: b'\xff'"),
        (lambda: ValueError(), "ValueError"),
    ],
)
def test_in_words(make: Callable[[], BaseException], words: str) -> None:
    error = make()
    assert in_words(error).endswith(words)
    assert type(error).__name__ in printed(error, None)


def test_of_what_is_no_exception() -> None:
    """The code of an exit, say."""
    assert message_of(odd("Odd", __repr__=refuse)(), repr).startswith("<test_errors.Odd object at ")
    assert message_of(np.zeros(2), repr) == "array([0., 0.])"
    assert message_of("x" * 20_000).endswith("x… (20,000 characters)")
