"""One rank of a benchmark's job: pinned to a core, it builds and runs what `rounds.py` asks for, over a socket.

    mpirun -np 2 python benchmarks/worker.py MODULE:FUNCTION ARGUMENT...

The function, called with the arguments, returns `build(name) -> Variant`. The rank waits for its orders in a read,
which takes no time of a core: one that waited in an MPI call would.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


class Variant(NamedTuple):
    """Something to time.

    Attributes:
      step: do it once, or dispatch it; returns the loss, or None if there is none.
      wait: until all dispatched steps are done.
    """

    step: Callable[[], Any]
    wait: Callable[[], Any] = lambda: None


def first(variant: Variant) -> dict[str, Any]:
    """Compile, and the losses of the first three steps; then see how long a step takes."""
    start = time.perf_counter()
    losses = [variant.step()]
    variant.wait()
    compiled = time.perf_counter() - start
    losses += [variant.step() for _ in range(2)]
    variant.wait()
    start = time.perf_counter()
    for _ in range(2):
        variant.step()
    variant.wait()
    step = (time.perf_counter() - start) / 2
    return {"first_call_s": compiled, "step_s": step, "losses": [None if x is None else float(x) for x in losses]}


def run(variant: Variant, steps: int) -> float:
    """Milliseconds a step; one before, for the caches."""
    variant.step()
    variant.wait()
    start = time.perf_counter()
    for _ in range(steps):
        variant.step()
    variant.wait()
    return (time.perf_counter() - start) / steps * 1e3


def dispatch(variant: Variant, steps: int) -> float:
    """Milliseconds until a call returns, each with the devices idle: the median."""
    times = []
    for _ in range(steps):
        variant.wait()
        start = time.perf_counter()
        variant.step()
        times.append(time.perf_counter() - start)
    variant.wait()
    return sorted(times)[steps // 2] * 1e3


def main() -> None:
    """Serve until the other end is closed."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[RANK % len(cores)]})
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(os.environ["BENCHMARK_SOCKET"])
    with channel.makefile() as orders:

        def say(**reply: Any) -> None:
            channel.sendall(json.dumps(reply).encode() + b"\n")

        variants: dict[str, Variant] = {}
        try:
            module, _, function = sys.argv[1].partition(":")
            build = getattr(importlib.import_module(module), function)(*sys.argv[2:])
            say(rank=RANK)
            for line in orders:
                order = json.loads(line)
                name, steps = order["name"], order.get("steps", 0)
                match order["do"]:
                    case "build":
                        variants[name] = build(name)
                        say(**first(variants[name]))
                    case "run":
                        say(ms=run(variants[name], steps))
                    case "dispatch":
                        say(ms=dispatch(variants[name], steps))
                    case "profile":
                        say(**build.profile(variants[name], steps))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the other end is gone
        except Exception:
            say(error=f"rank {RANK}: {traceback.format_exc()}")
            orders.readline()  # the others may still be on their way to say so


if __name__ == "__main__":
    sys.modules["worker"] = sys.modules["__main__"]
    main()
