"""A rank of a job across hosts: `hosts.py COMMUNICATOR CONNECTOR [EXPECTED CASE:LEVEL[:WITHIN] …]`.

Each rank prints where it is, and how far its results are from one device's, which are in the file EXPECTED. Without
cases they train until something ends it; the rank that EXPECTED names then ends with exit code 7.
"""

import os
import pickle
import socket
import sys
import time
from pathlib import Path
from typing import Any

import jax

sys.path.insert(1, str(Path(__file__).parents[2]))

from harness import oracle
from harness.check import gap

import jaxdist


def main(communicator: Any, connector: str, path: str = "", *cases: str) -> None:
    ctx = jaxdist.init(connector, communicator)
    gaps = [0.0]
    for word in cases:
        name, level, *within = word.split(":")
        got = oracle.run_decorated(oracle.case(name, int(level), within[0] if within else None))
        gaps.append(gap(pickle.loads(Path(path).read_bytes())[name], got))
    where = [ctx.rank, socket.gethostname(), ctx.local_rank, ctx.local_size, ctx.communicator]
    print("REPORT", *where, max(gaps) < 1e-10, os.getpid(), Path.cwd(), flush=True)
    for turn in range(0 if cases else 1_000_000):
        oracle.run_decorated(oracle.case("clip_adamw"), steps=5)
        print(f"rank {ctx.rank} trains", flush=True)
        if turn == 1 and path == str(ctx.rank):
            sys.exit(7)
        time.sleep(0.1)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(*sys.argv[1:])
