"""One rank of a benchmark's job: pinned to a core, it builds and runs variants that `rounds.py` requests.

    mpirun -np 2 python benchmarks/worker.py MODULE:FUNCTION ARGUMENT...

The function, called with the arguments, returns `build(name) -> Variant`. The rank waits for
requests in a socket read, which needs no core, unlike waiting in an MPI call.
"""

from __future__ import annotations

import functools
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
      step: runs or dispatches one step; returns the loss, or None.
      wait: waits for all dispatched steps.
    """

    step: Callable[[], Any]
    wait: Callable[[], Any] = lambda: None


def first(variant: Variant) -> dict[str, Any]:
    """Compile, return the losses of the first three steps, and measure the time of a step."""
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
    """Return milliseconds per step, after one step for the caches."""
    variant.step()
    variant.wait()
    start = time.perf_counter()
    for _ in range(steps):
        variant.step()
    variant.wait()
    return (time.perf_counter() - start) / steps * 1e3


def steps_in(seconds: float, step_s: float) -> int:
    """Return the number of steps that fill a turn of so many seconds."""
    return max(2, min(500, int(seconds / step_s)))


def turns(variants: dict[str, Variant], seconds: float) -> dict[str, Callable[[], float]]:
    """Compile variants in this process; return calls that `run` each for so many seconds."""
    steps = {name: steps_in(seconds, first(variant)["step_s"]) for name, variant in variants.items()}
    return {name: functools.partial(run, variant, steps[name]) for name, variant in variants.items()}


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
                name = order["name"]
                match order["do"]:
                    case "build":
                        variants[name] = build(name)
                        say(**first(variants[name]))
                    case "run":
                        say(ms=run(variants[name], order["steps"]))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the other end is gone
        except Exception:
            say(error=f"rank {RANK}: {traceback.format_exc()}")
            orders.readline()  # the others may still be about to report it


if __name__ == "__main__":
    sys.modules["worker"] = sys.modules["__main__"]
    main()
