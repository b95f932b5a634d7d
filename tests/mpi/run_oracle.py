"""Oracle cases in one MPI job: `python run_oracle.py COMMUNICATOR EXPECTED.pickle NAME,…`; JSON from the root."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import oracle

import jaxdist


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator=sys.argv[1])
    report = {}
    all_expected = pickle.loads(Path(sys.argv[2]).read_bytes())
    for name in sys.argv[3].split(","):
        expected = all_expected[name]
        got = oracle.run_decorated(oracle.case(name), ctx.rank, ctx.size)
        # Every rank compares: state that differs between processes would show on one of them.
        report[name] = max(ctx.control.exchange(name, oracle.difference(expected, got)))
        if level := oracle.IN_SHARDS.get(name):
            got = oracle.run_decorated(oracle.case(name, level), ctx.rank, ctx.size)
            gap = oracle.difference(expected, got)
            report[f"{name} at level {level}"] = max(ctx.control.exchange(f"{name} in shards", gap))
    if ctx.is_root:
        print("REPORT " + json.dumps({"communicator": ctx.communicator, "size": ctx.size, "gaps": report}), flush=True)


if __name__ == "__main__":
    main()
