"""Every oracle case in one MPI job: `mpirun -np N python run_oracle.py COMMUNICATOR`; a JSON line from the root."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import oracle

import jaxdist


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator=sys.argv[1])
    names = sys.argv[2:] or list(oracle.CASES)
    report = {}
    for name in names:
        case = oracle.CASES[name]()
        got = oracle.run_decorated(case, ctx.rank, ctx.size)
        # Every rank compares: state that differs between processes would show on one of them.
        gaps = ctx.control.exchange(name, oracle.difference(oracle.run_plain(case), got))
        report[name] = {"gap": max(gaps), "tolerance": case.tolerance}
    if ctx.is_root:
        print("REPORT " + json.dumps({"communicator": ctx.communicator, "size": ctx.size, "cases": report}), flush=True)


if __name__ == "__main__":
    main()
