"""Step time by bucket size and wire dtype, beside the same step unfused, in one job, in interleaved rounds.

    mpirun -np 2 --bind-to core python benchmarks/buckets.py

The models of benchmarks/step_time.py. This is where `jaxdist.communicators.default_bucket_bytes` comes from.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import step_time
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one variant in one round")
    parser.add_argument("--models", nargs="*", default=list(step_time.MODELS))
    parser.add_argument("--communicators", nargs="*", default=["mpi", "xla"])
    parser.add_argument("--kib", nargs="*", type=int, default=[0, 64, 256, 1024, 4096, 16384, 65536])
    parser.add_argument("--compress", nargs="*", default=[])
    args = parser.parse_args()
    ctx = jaxdist.init(communicator="mpi")

    def globally(tree: Any, *axes: str) -> Any:
        sharding = NamedSharding(ctx.mesh, P(*axes))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)

    for name in args.models:
        rng = np.random.default_rng(ctx.rank)
        rows = step_time.BATCH
        batch = globally(
            (rng.normal(size=(rows, 784)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)), "data"
        )
        params = step_time.init(step_time.MODELS[name])
        state = globally((params, step_time.tx.init(params)))
        for communicator in args.communicators:
            ctx.communicator = communicator  # read when a program is built
            settings = [{"bucket_bytes": k << 10} for k in args.kib] + [{"compress": c} for c in args.compress]
            steps = [jaxdist.data_parallel(step_time.plain, **s) for s in settings]
            counts, states = [], []
            for step in steps:
                *s, _ = step(*jax.tree.map(jnp.copy, state), batch)
                jax.block_until_ready(s)
                start = time.perf_counter()
                *s, _ = step(*s, batch)
                jax.block_until_ready(s)
                counts.append(max(2, min(300, int(args.seconds / ctx.broadcast(time.perf_counter() - start)))))
                states.append(s)
            times: list[list[float]] = [[] for _ in steps]
            for _ in range(args.rounds):
                for i, step in enumerate(steps):
                    ctx.barrier()
                    start = time.perf_counter()
                    for _ in range(counts[i]):
                        *states[i], _ = step(*states[i], batch)
                    jax.block_until_ready(states[i])
                    times[i].append((time.perf_counter() - start) / counts[i] * 1e3)
            for setting, mine in zip(settings, times, strict=True):
                ratios = [x / y for x, y in zip(mine, times[0], strict=True)]
                line = {
                    "model": name, "communicator": communicator, **setting, "ms": round(statistics.median(mine), 2),
                    "over first": [round(f(ratios), 2) for f in (statistics.median, min, max)],
                }  # fmt: skip
                if ctx.is_root:
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
