"""Control channels between the threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from jaxdist.control import rendezvous
from jaxdist.control.channel import Control
from jaxdist.control.keys import Key


def job(size: int) -> list[Control]:
    """`size` controls in this process, each with its own connections."""
    server = rendezvous.bind("127.0.0.1", [0])
    address = ("127.0.0.1", server.getsockname()[1])
    made: list[Any] = [None] * size

    def make(rank: int) -> None:
        made[rank] = Control(rank, size, [address], server=server if rank == 0 else None, key=Key(b"k"), timeout=30)

    everywhere([lambda r=r: make(r) for r in range(size)])
    return made


def everywhere(calls: list[Callable[[], Any]]) -> list[Any]:
    """Call at the same time, a thread each; results or errors in order."""
    results: list[Any] = [None] * len(calls)

    def call(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call hangs"
    return results


def until(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
