"""Oracle cases in one MPI job: `python run_oracle.py COMMUNICATOR EXPECTED.pickle NAME,… IDIOM:LEVEL,… IDIOM:LEVEL,…`.

The last ones as small steps, which every rank computes whole; the others in parts. JSON from the root.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import oracle

import jaxdist
from jaxdist.placements import small

ROWS = 24
"""Examples in a batch of the idioms."""
STEPS = 2


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator=sys.argv[1])
    report = {}
    shipped, small.fewer = small.fewer, 10**9
    all_expected = pickle.loads(Path(sys.argv[2]).read_bytes())

    def check(name: str, expected: Any, case: oracle.Case, **how: Any) -> None:
        # Every rank compares: state that differs between processes would show on one of them.
        gap = oracle.difference(expected, oracle.run_decorated(case, ctx.rank, ctx.size, **how))
        report[name] = max(ctx.control.exchange(name, gap))

    for name in sys.argv[3].split(","):
        check(name, all_expected[name], oracle.case(name))
        if level := oracle.IN_SHARDS.get(name):
            check(f"{name} at level {level}", all_expected[name], oracle.case(name, level))
    in_parts = sys.argv[4].split(",")
    for word in [*in_parts, *sys.argv[5].split(",")]:
        name, level = word.split(":")
        small.fewer = 10**9 if word in in_parts else shipped
        check(word, all_expected[name], oracle.idiom(name, ROWS, int(level)), steps=STEPS, rows=ROWS)
    if ctx.is_root:
        print("REPORT " + json.dumps({"communicator": ctx.communicator, "size": ctx.size, "gaps": report}), flush=True)


if __name__ == "__main__":
    main()
