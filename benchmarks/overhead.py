"""Host-side cost of a decorated step over plain `jax.jit`, with 200 state leaves.

    python benchmarks/overhead.py        (one process, one device; pin it to a core)

The step does next to nothing, so that the time of a call is the host's. Prints medians over interleaved rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist

LEAVES, CALLS, ROUNDS = 200, 500, 15


def step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
    """Touches each leaf, so that none is passed through."""
    shift = jnp.sum(batch) * 0
    return jax.tree.map(lambda x: x + 1, state), {"loss": shift}


def measure(call: Callable[..., Any], state: Any, batch: Any) -> tuple[float, Any]:
    """Microseconds a call, and the state after them."""
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(CALLS):
        state, _ = call(state, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / CALLS * 1e6, state


def main() -> None:
    """Measure and print."""
    jaxdist.init()
    rng = np.random.default_rng(0)
    host = {f"layer {i:03}": rng.normal(size=4).astype(np.float32) for i in range(LEAVES)}
    on_host = rng.normal(size=(8, 4)).astype(np.float32)
    batch = jax.device_put(on_host)
    plain = jax.jit(step, donate_argnums=0)
    decorated = jaxdist.data_parallel(step)
    variants = {
        "plain jit": (plain, batch),
        "decorated": (decorated, batch),
        "plain jit, host batch": (plain, on_host),
        "decorated, host batch": (decorated, on_host),
    }
    states = {k: call(jax.tree.map(jnp.asarray, host), b)[0] for k, (call, b) in variants.items()}
    times: dict[str, list[float]] = {k: [] for k in variants}
    for _ in range(ROUNDS):
        for k, (call, b) in variants.items():
            took, states[k] = measure(call, states[k], b)
            times[k].append(took)
    medians = {k: statistics.median(v) for k, v in times.items()}
    extra = [d - p for d, p in zip(times["decorated"], times["plain jit"], strict=True)]
    print({k: f"{v:.0f} us" for k, v in medians.items()})
    print(
        f"decorated - plain: median {statistics.median(extra):.0f} us ({min(extra):.0f} to {max(extra):.0f}), "
        f"{statistics.median(extra) / 50:.1f}% of a 5 ms step"
    )


if __name__ == "__main__":
    main()
