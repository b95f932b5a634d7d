"""One process alone."""

from __future__ import annotations

from typing import Any

from jaxdist.control.process import leave


class LocalConnector:
    """The connector of a job of one process."""

    name = "local"
    rank, size, local_rank, local_size = 0, 1, 0, 1

    def barrier(self, timeout: float | None = None) -> None:
        """Nobody to wait for."""

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The object itself."""
        return obj

    def abort(self, code: int = 1, message: str = "") -> None:
        """End this process now."""
        leave(code, message)
