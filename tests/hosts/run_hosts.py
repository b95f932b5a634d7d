"""A rank of a job across hosts: `run_hosts.py train EXPECTED COMMUNICATOR CONNECTOR [LEVEL]`, or `large` or `loop` with
COMMUNICATOR.

`train`: the root prints a JSON line of where each rank is and how far its result is from one device's. `large`: the
same of weights that are large enough to be reduced and gathered by hosts. `loop`: train until something ends it.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import oracle

import jaxdist

CASE = "clip_adamw"


def train(expected: str, communicator: str, connector: str, level: str = "0") -> None:
    """A short training, compared on every rank; at a level of ZeRO it is in shards within hosts."""
    ctx = jaxdist.init(connector, communicator)
    got = oracle.run_decorated(oracle.case(CASE, int(level), "host"), ctx.rank, ctx.size)
    gap = oracle.difference(pickle.loads(Path(expected).read_bytes()), got)
    ranks = ctx.control.exchange("ranks", (socket.gethostname(), ctx.local_rank, ctx.local_size, gap))
    if ctx.is_root:
        report = {"ranks": [r[:3] for r in ranks], "gap": max(r[3] for r in ranks), "communicator": ctx.communicator}
        print("REPORT " + json.dumps(report), flush=True)


def large(communicator: str) -> None:
    """Over all ranks and within hosts."""
    ctx = jaxdist.init("auto", communicator)
    want, gaps = oracle.expected("few_examples"), []
    for level, within in ((0, None), (2, None), (3, None), (3, "host")):
        got = oracle.run_decorated(oracle.case("few_examples", level, within), ctx.rank, ctx.size)
        gaps.append(max(ctx.control.exchange("gap", oracle.difference(want, got))))
    if ctx.is_root:
        print("REPORT " + json.dumps({"gaps": gaps, "communicator": ctx.communicator}), flush=True)


def loop(communicator: str) -> None:
    """Steps without end."""
    ctx = jaxdist.init("auto", communicator)
    case = oracle.case(CASE)
    for _ in range(1_000_000):
        oracle.run_decorated(case, ctx.rank, ctx.size, steps=20)
        print(f"rank {ctx.rank} trains", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    {"train": train, "large": large, "loop": loop}[sys.argv[1]](*sys.argv[2:])
