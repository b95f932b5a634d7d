"""The host's overhead: time of a call by number of state leaves, and trace and compile time by model depth.

    python benchmarks/overhead.py --json overhead.json --markdown overhead.md --png overhead.png

One process, pinned to a core. The timed step does almost nothing, so the time of a call is the
host's; a decorated step and one with plain `jax.jit` take turns. Trace and compile times are for an
MLP's train step on virtual devices.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import models
import report

LEAVES = (10, 50, 200, 500, 1000, 2000)
DEPTHS = (10, 30, 100)


def touch(state: Any, batch: Any) -> Any:
    """Return a new value for each leaf, so that none is passed through."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: x + 1, state), {"loss": jnp.sum(batch) * 0}


def calls(leaves: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return microseconds per call in each round, with this many leaves of state on one device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import jaxdist

    state = {f"layer {i:04}": np.zeros(4, np.float32) for i in range(leaves)}
    on_host = np.zeros((8, 4), np.float32)
    on_device = jax.device_put(on_host)
    plain = jax.jit(touch, donate_argnums=0)
    decorated = jaxdist.data_parallel(touch, mesh=Mesh(np.array(jax.devices()[:1]), ("data",)), donate=True)
    variants: dict[str, tuple[Callable[..., Any], Any]] = {
        "plain jit": (plain, on_device),
        "decorated": (decorated, on_device),
        "plain jit, host batch": (plain, on_host),
        "decorated, host batch": (decorated, on_host),
    }

    def microseconds(name: str, count: int) -> float:
        call, batch = variants[name]
        jax.block_until_ready(states[name])
        start = time.perf_counter()
        for _ in range(count):
            states[name], _ = call(states[name], batch)
        jax.block_until_ready(states[name])
        return (time.perf_counter() - start) / count * 1e6

    states = {name: jax.tree.map(jax.device_put, state) for name in variants}
    for name in variants:
        microseconds(name, 3)
    count = max(10, int(seconds * 1e6 / microseconds("plain jit", 10)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for _ in range(rounds):
        for name in order:
            times[name].append(microseconds(name, count))
        order.append(order.pop(0))
    return times


def compilations(depth: int, rounds: int) -> dict[str, list[list[float]]]:
    """Return seconds to trace and compile the train step of an MLP, anew in each round."""
    import jax
    import optax
    from jax_models import loss_of

    import jaxdist

    model = models.Mlp((64, *[64] * depth, 10), rows=8)
    loss, adam = loss_of(model), optax.adam(models.LEARNING_RATE)
    params = models.init(model)
    batch = models.batches(model, list(range(jax.device_count())))

    def step_of(tx: Any) -> Callable[..., Any]:
        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step

    def level(n: Any) -> Callable[[], Any]:
        return lambda: jaxdist.data_parallel(step_of(adam if n == 0 else jaxdist.zero(adam, n)))

    variants = {"plain jit": lambda: jax.jit(step_of(adam))} | {f"level {n}": level(n) for n in range(4)}
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, make in variants.items():
            jax.clear_caches()
            start = time.perf_counter()
            lowered = make().lower(params, adam.init(params), batch)
            middle = time.perf_counter()
            lowered.compile()
            times[name].append([middle - start, time.perf_counter() - middle])
    return times


def markdown(results: dict[str, Any]) -> str:
    """Return a table of calls and one of compilations."""
    rows = []
    for leaves, times in results["calls"].items():
        medians = [report.number(report.spread(times[name]).median) for name in times]
        more = [
            report.spread(a - b for a, b in zip(times[f"decorated{how}"], times[f"plain jit{how}"], strict=True))
            for how in ("", ", host batch")
        ]
        rows.append([leaves, *medians, *more])
    head = ["state leaves", *results["calls"][next(iter(results["calls"]))], "decorated − plain", "with a host batch"]
    text = [f"Microseconds a call, medians of {results['rounds']} rounds (smallest–largest).", report.table(head, rows)]
    found = results["compilations"]
    names = list(next(iter(found.values())))

    def both(times: list[list[float]]) -> str:
        return " + ".join(report.number(report.spread(part).median) for part in zip(*times, strict=True))

    said = (
        f"Seconds to trace + compile the step of an MLP of so many layers on {results['devices']} virtual devices "
        "(plain jit: on one of them)."
    )
    rows = [[depth, *(both(times[name]) for name in names)] for depth, times in found.items()]
    text += [said, report.table(["layers", *names], rows)]
    return "\n\n".join(text)


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot calls by leaves, and trace and compile time by depth."""
    figure.suptitle(f"What the host pays, {report.processor(results)} (lower is better)")
    left, right = figure.subplots(1, 2)
    leaves = [int(n) for n in results["calls"]]
    for name, color in (("plain jit", report.OTHERS), ("decorated", report.OURS)):
        spreads = [report.spread(times[name]) for times in results["calls"].values()]
        left.plot(leaves, [s.median for s in spreads], "o-", color=color, label=name)
        left.fill_between(leaves, [s.least for s in spreads], [s.most for s in spreads], color=color, alpha=0.2)
    left.set(title="a call", xlabel="leaves of the state", ylabel="µs")
    depths = [int(n) for n in results["compilations"]]
    for i, name in enumerate(next(iter(results["compilations"].values()))):
        seconds = [report.spread(map(sum, times[name])).median for times in results["compilations"].values()]
        right.plot(depths, seconds, "o-", color=report.OTHERS if name == "plain jit" else f"C{i - 1}", label=name)
    right.set(title="trace and compile", xlabel="layers", ylabel="s")
    for panel, at in ((left, leaves), (right, depths)):
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(at, map(str, at))
        panel.legend()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", nargs="*", type=int, default=list(LEAVES))
    parser.add_argument("--depths", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--devices", type=int, default=4, help="virtual ones, for trace and compile time")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one variant in one round")
    report.add_arguments(parser)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = {
        "command": report.command(), "machine": report.machine(), "rounds": args.rounds, "devices": args.devices,
        "calls": {str(n): calls(n, args.rounds, args.seconds) for n in args.leaves},
        "compilations": {str(n): compilations(n, min(3, args.rounds)) for n in args.depths},
    }  # fmt: skip
    report.write(args, results, markdown, draw)


if __name__ == "__main__":
    main()
