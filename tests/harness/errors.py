"""Errors by class and tokens: what a message must name, in whatever words."""

import contextlib
from collections.abc import Iterable, Iterator

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
