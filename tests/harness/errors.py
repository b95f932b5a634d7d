"""Errors by class and tokens: what a message must name, in whatever words."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest


def missing(tokens: Iterable[str], text: str) -> list[str]:
    """Those that a text does not hold."""
    return [token for token in tokens if token not in text]


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *tokens: str) -> Iterator[None]:
    """The block raises an error of this class, whose message holds each of the tokens."""
    with pytest.raises(kind) as info:
        yield
    lacks = missing(tokens, str(info.value))
    assert not lacks, f"{lacks} not in: {info.value}"


def error_of(call: Callable[..., Any], *args: Any, **settings: Any) -> list[str]:
    """The class and the message of the error that a call raises, to tell the test that has started this process."""
    try:
        call(*args, **settings)
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def check(told: Mapping[str, list[str]], expected: Mapping[str, tuple[str, ...]]) -> None:
    """Check the class of each call's error, and the tokens in its message."""
    assert told.keys() == expected.keys()
    for name, (kind, *tokens) in expected.items():
        got, message = told[name]
        assert (got, missing(tokens, message)) == (kind, []), f"{name}: {got}: {message}"
