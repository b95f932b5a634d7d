"""A rank of a job across hosts: `run_hosts.py COMMUNICATOR CONNECTOR [EXPECTED CASE:LEVEL …]`.

The root prints a JSON line of where each rank is and how far the results are from one device's, which are in the file
EXPECTED. Without cases they train until something ends it.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import oracle

import jaxdist

SMALL, LARGE = "clip_adamw", "few_examples"
"""Cases of `oracle`; the weights of the second are large enough to be reduced and gathered by hosts."""


def main(communicator: str, connector: str, path: str = "", *cases: str) -> None:
    """`CASE:LEVEL` is a case at a level of ZeRO, `CASE:LEVEL:host` in shards within hosts."""
    ctx = jaxdist.init(connector, communicator)
    gaps = []
    for word in cases:
        name, level, *within = word.split(":")
        case = oracle.case(name, int(level), within[0] if within else None)
        got = oracle.run_decorated(case, ctx.rank, ctx.size)
        gaps.append(oracle.difference(pickle.loads(Path(path).read_bytes())[name], got))
    for _ in range(0 if cases else 1_000_000):
        oracle.run_decorated(oracle.case(SMALL), ctx.rank, ctx.size, steps=20)
        print(f"rank {ctx.rank} trains", flush=True)
    ranks = ctx.control.exchange("ranks", ([socket.gethostname(), ctx.local_rank, ctx.local_size], max(gaps)))
    if ctx.is_root:
        where, gap = [rank for rank, _ in ranks], max(gap for _, gap in ranks)
        print("REPORT " + json.dumps({"ranks": where, "gap": gap, "communicator": ctx.communicator}), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(*sys.argv[1:])
