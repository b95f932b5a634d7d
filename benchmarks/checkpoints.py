"""Save and restore one GB of float32 in shards, compared with orbax alone: seconds, and peak memory per rank.

jaxdist run -n 2 benchmarks/checkpoints.py [FOLDER [ROUNDS [MIB]]]
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import jaxdist

LEAVES = 16


def measured(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the slowest rank's seconds and largest growth of memory in GB, and the result."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory("VmRSS")
    jaxdist.barrier()
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    seconds, grown = time.perf_counter() - start, _memory("VmHWM") - before
    return float(jaxdist.allreduce(seconds, "max")), float(jaxdist.allreduce(grown, "max")), result


def _memory(name: str) -> float:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 2**20


def main() -> None:
    """Measure in turns, and print medians with their spread."""
    ctx = jaxdist.init(communicator="xla")
    given = [*sys.argv[1:], *[tempfile.gettempdir(), "5", "1024"][len(sys.argv) - 1 :]]
    folder, rounds = Path(given[0]) / "jaxdist-checkpoints", int(given[1])
    rows = int(given[2]) * 2**18 // LEAVES // 1024
    rng = np.random.default_rng(0)
    state = jaxdist.shard({f"w{i}": rng.normal(size=(rows, 1024)).astype(np.float32) for i in range(LEAVES)})
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    orbax = ocp.StandardCheckpointer()

    def save_by_orbax(path: Path) -> None:
        orbax.save(path, state)
        orbax.wait_until_finished()

    calls: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
        "jaxdist": (lambda path: jaxdist.save(path, state, 1), lambda path: jaxdist.restore(path, target)),
        "orbax": (save_by_orbax, lambda path: orbax.restore(path, target)),
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for system, (save, restore) in list(calls.items())[:: 1 if number % 2 else -1]:
            path = folder / f"{system}{number}"
            for what, call in (("save", save), ("restore", restore)):
                seconds, grown, result = measured(lambda call=call, path=path: call(path))
                if what == "restore" and any((a != b).any() for a, b in zip(_own(result), _own(state), strict=True)):
                    raise AssertionError(f"{system} restored other values")
                del result
                if number:  # the first round is to warm up
                    found.setdefault(f"{system} {what}", []).append((seconds, grown))
            jaxdist.barrier()
            if ctx.is_root:
                shutil.rmtree(path)
    for name, pairs in found.items() if ctx.is_root else ():
        times, memory = zip(*pairs, strict=True)
        print(f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}), +{max(memory):.2f} GB")


def _own(tree: Any) -> list[np.ndarray]:
    return [np.asarray(shard.data) for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


if __name__ == "__main__":
    main()
