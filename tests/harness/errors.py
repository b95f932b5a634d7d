"""Errors by class and tokens: what a message must name, in whatever words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *tokens: str) -> Iterator[None]:
    """The block raises an error of this class, whose message holds each of the tokens."""
    with pytest.raises(kind) as info:
        yield
    missing = [token for token in tokens if token not in str(info.value)]
    assert not missing, f"{missing} not in: {info.value}"
