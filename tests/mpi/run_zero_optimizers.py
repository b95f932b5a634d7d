"""`jaxdist.zero` in one MPI job: `python run_zero_optimizers.py COMMUNICATOR EXPECTED.pickle I [WITHIN]`.

JSON from the root.

One step trains them all, the first at level 1 + I % 3 and so on. Within groups also few examples beside large weights.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import optimizers
import oracle

import jaxdist


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    ctx = jaxdist.init(communicator=sys.argv[1])
    expected = pickle.loads(Path(sys.argv[2]).read_bytes())
    within = int(sys.argv[4]) if len(sys.argv) > 4 else None
    levels = [1 + (int(sys.argv[3]) + i) % 3 for i in range(len(expected))]
    got = optimizers.run_sharded(list(expected), levels, ctx.rank, ctx.size, within=within, split="owners")
    # Each rank compares what it holds.
    report = {
        f"{name}, level {level}": max(
            ctx.control.exchange(name, optimizers.gap(expected[name], got[2 * i : 2 * i + 2]))
        )
        for i, (name, level) in enumerate(zip(expected, levels, strict=True))
    }
    if within:  # values of the batch travel within groups and across
        got = oracle.run_decorated(oracle.case("few_examples", 3, within), ctx.rank, ctx.size)
        gap = oracle.difference(oracle.expected("few_examples"), got)
        report["few examples"] = max(ctx.control.exchange("few examples", gap))
    if ctx.is_root:
        print("REPORT " + json.dumps({"communicator": ctx.communicator, "size": ctx.size, "gaps": report}), flush=True)


if __name__ == "__main__":
    main()
