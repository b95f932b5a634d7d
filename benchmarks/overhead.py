"""What a call costs the host, by number of state leaves: a decorated step beside one with `jax.jit`.

    python benchmarks/overhead.py --json overhead.json

One process, pinned to a core. The step does almost nothing, so the time of a call is the host's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import report
from rounds import in_turns
from worker import Variant, turns

LEAVES = (10, 50, 200, 500, 1000, 2000)


def calls(leaves: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return microseconds per call in each round, with this many leaves of state on one device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    import jaxdist

    mesh = Mesh(jax.devices()[:1], ("data",))
    batch = jnp.zeros((8, 4))

    def touch(state: Any, batch: Any) -> Any:
        """Return a new value for each leaf, so that none is passed through."""
        return jax.tree.map(lambda x: x + 1, state), jnp.sum(batch) * 0

    def variant(call: Callable[..., Any]) -> Variant:
        held = [{f"layer {i:04}": jnp.zeros(4) for i in range(leaves)}]

        def step() -> None:
            held[0], _ = call(held[0], batch)

        return Variant(step, lambda: jax.block_until_ready(held))

    variants = {
        "plain jit": variant(jax.jit(touch, donate_argnums=0)),
        "decorated": variant(jaxdist.data_parallel(touch, mesh=mesh, donate=True)),
    }
    times = in_turns(turns(variants, seconds), rounds)
    return {name: [1e3 * ms for ms in each] for name, each in times.items()}


def markdown(results: dict[str, Any]) -> str:
    """Return a table with a row per number of leaves."""
    rows = []
    for leaves, times in results["calls"].items():
        more = report.spread(a - b for a, b in zip(times["decorated"], times["plain jit"], strict=True))
        rows.append([leaves, *(report.number(report.spread(times[name]).median) for name in times), more])
    head = ["state leaves", "plain jit", "decorated", "decorated − plain"]
    return (
        f"Microseconds a call, medians of {results['rounds']} rounds (smallest–largest).\n\n{report.table(head, rows)}"
    )


def main() -> None:
    """Measure and report."""
    parser = report.arguments(__doc__, rounds=15, seconds=0.3)
    parser.add_argument("--leaves", nargs="*", type=int, default=list(LEAVES))
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = {str(n): calls(n, args.rounds, args.seconds) for n in args.leaves}
    report.write(args, {"rounds": args.rounds, "calls": found}, markdown)


if __name__ == "__main__":
    main()
