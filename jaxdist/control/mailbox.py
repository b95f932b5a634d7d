"""What ranks leave for one another by name, from any thread, beside the exchanges that all are in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TAG = "mail"


class Mailbox:
    """Of one rank."""

    def __init__(self, post: Callable[[str, Any, int | None], None]):
        self._post = post
        self._news = threading.Condition()
        self._found: dict[tuple[str, int], Any] = {}

    def put(self, name: str, value: Any, to: int | None = None) -> None:
        """Leave something small and picklable for a rank, or for all others; does not wait for them."""
        self._post(TAG, (name, value), to)

    def take(self, name: str, rank: int, seconds: float) -> Any:
        """What a rank has left under this name; it is gone then."""
        with self._news:
            if not self._news.wait_for(lambda: (name, rank) in self._found, seconds):
                raise TimeoutError(f"{name!r} of rank {rank} has not come within {seconds:g} s")
            return self._found.pop((name, rank))

    def arrived(self, rank: int, mail: tuple[str, Any]) -> None:
        """The control channel's: it does not block."""
        name, value = mail
        with self._news:
            self._found[name, rank] = value
            self._news.notify_all()
