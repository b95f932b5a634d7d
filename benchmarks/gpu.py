"""Measurements that need a GPU: core tests, decorator overhead, memory compared with the plan, utilization.

    python benchmarks/gpu.py --json gpu.json

One process, one GPU, jax[cuda12]; the plan uses the same compiler. The model is examples/gpt.py's,
in bfloat16 with a float32 copy. Each part runs in its own process, to have its own memory peak.
Compared steps take turns. Utilization: the model's floating point operations (6 per parameter and
token in matrix products, and causal attention; without recomputation by jax.checkpoint) relative to
a large bfloat16 matrix product in the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from rounds import in_turns
from worker import Variant, turns

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch_size": 2},  # a test on CPUs
    "124M": {"layers": 13, "width": 896, "heads": 14, "context": 1024, "batch_size": 32},
    "350M": {"layers": 28, "width": 1024, "heads": 16, "context": 1024, "batch_size": 16},
    "1B": {"layers": 20, "width": 2048, "heads": 16, "context": 1024, "batch_size": 16},
}
LEVELS = (0, 1, 2, 3)
KINDS = {"H100": "H100", "H200": "H200", "A100-SXM4-40": "A100-40", "A100-SXM4-80": "A100-80", "B200": "B200"}
"""Part of a device's name -> kind of device for `jaxdist plan`."""


# --- parts: each in its own process, prints one line of JSON


def device() -> dict[str, Any]:
    """Describe the available device."""
    import jax

    return {"device": jax.devices()[0].device_kind}


def core() -> dict[str, Any]:
    """Run the tests' oracle in float64: decorated steps must match plain ones here."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    jax.config.update("jax_enable_x64", True)
    sys.path.insert(0, str(ROOT / "tests"))
    from harness import oracle
    from harness.check import gap

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    gaps: dict[str, float] = {}
    failed: dict[str, str] = {}
    cases = [(name, 0) for name in oracle.CASES] + list(oracle.IN_SHARDS.items())
    for name, level in cases:
        label = f"{name} at level {level}"
        try:
            got = oracle.run_decorated(oracle.case(name, level), mesh=mesh)
            gaps[label] = gap(oracle.expected(name), got)
            if not gaps[label] <= oracle.case(name, level).tolerance:
                failed[label] = f"differs by {gaps[label]:.1e}"
        except Exception as error:  # the others are still of interest
            failed[label] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return {"cases": len(cases), "largest_gap": max(gaps.values(), default=0.0), "failed": failed}


def steps(size: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Return milliseconds of the plain step under jit, the decorated one, and each level."""
    import jax

    variants: dict[str, Variant] = {}
    for name in ("jit", *(f"level {level}" for level in LEVELS)):
        step, state, batch = problem(size, 0 if name == "jit" else int(name[-1]))
        variants[name] = _variant(jax.jit(step.__wrapped__, donate_argnums=0) if name == "jit" else step, state, batch)
    return {"ms": in_turns(turns(variants, seconds), rounds)}


def memory(size: str, level: int) -> dict[str, Any]:
    """Return the peak of the allocator, and the plan's prediction for the same step."""
    import jax

    import jaxdist

    step, state, batch = problem(size, level)
    variant = _variant(step, state, batch)
    del state
    for _ in range(3):
        variant.step()
    variant.wait()
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    kind = next((kind for name, kind in KINDS.items() if name in device.device_kind), "cpu")
    planned, *args = _planned(size, level)
    found = jaxdist.plan(planned, *args, topology=f"1x{kind}", levels=()).own
    return {"measured": stats.get("peak_bytes_in_use"), "planned": found.peak, "kind": kind}


def utilisation(size: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Return operations per second of the model and of a large matrix product; they take turns."""
    import jax
    import jax.numpy as jnp

    shape = SIZES[size]
    step, state, batch = problem(size, 0)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    tokens = shape["batch_size"] * shape["context"]
    places = shape["context"] * shape["width"]  # added, not multiplied
    attention = 6 * shape["layers"] * shape["context"] * shape["width"]  # a token: half of all pairs, two products
    operations = tokens * (6 * (parameters - places) + attention)
    n = 256 if size == "tiny" else 8192
    a = jnp.ones((n, n), jnp.bfloat16)
    product = jax.jit(lambda x, a: (x @ a, None))
    times = in_turns(
        turns({"model": _variant(step, state, batch), "product": _variant(product, a, a)}, seconds), rounds
    )
    rates = {
        name: [1e3 * count / ms for ms in times[name]] for name, count in (("model", operations), ("product", 2 * n**3))
    }
    return {"parameters": parameters, "tokens": tokens, "rates": rates}


def problem(size: str, level: int) -> tuple[Any, Any, Any]:
    """Return the decorated step of examples/gpt.py, with a random state and batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    step, state, batch = _planned(size, level)
    rng = np.random.default_rng(0)

    def numbers(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape, np.float32) * 0.02, x.dtype)

    state = jax.tree.map(numbers, state)
    state = state.replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))
    return step, state, rng.integers(0, 256, batch.shape).astype(np.uint8)


def _planned(size: str, level: int) -> tuple[Any, Any, Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt  # pyright: ignore[reportMissingImports]

    return gpt.planned(**SIZES[size], bf16=True, level=level)


def _variant(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> Variant:
    import jax

    held = [state]

    def advance() -> None:
        held[0], _ = step(held[0], batch)

    return Variant(advance, lambda: jax.block_until_ready(held))


# --- pages


def part(name: str, *arguments: Any) -> dict[str, Any]:
    """Run a part in its own process."""
    command = [sys.executable, __file__, "--part", name, *map(str, arguments)]
    # The allocator reports its own peak: without preallocation it takes only as much as needed.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if name == "memory" else dict(os.environ)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, (name, *arguments)))} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def markdown(found: dict[str, Any]) -> str:
    """Return the tables."""
    text = [f"On {found['device']}."]
    if core := found.get("core"):
        text[0] += (
            f" Core of the tests, float64: {core['cases'] - len(core['failed'])} of {core['cases']} cases agree; "
            f"largest difference {core['largest_gap']:.1e}."
        )
        text += [f"- **{name}**: {why}" for name, why in core["failed"].items()]
    rows, use = [], []
    for size, each in found["sizes"].items():
        times = each["steps"]["ms"]
        for name in times:
            ratio = report.ratio(times, name, ("jit",))
            rows.append([size, name, report.spread(times[name]), ratio, *_memory(each["memory"].get(name))])
        rates = each["utilisation"]["rates"]
        share = report.spread(m / p for m, p in zip(rates["model"], rates["product"], strict=True))
        tera = [f"{statistics.median(rates[name]) / 1e12:.3g}" for name in ("model", "product")]
        use.append([size, f"{each['utilisation']['parameters'] / 1e6:.4g}M", *tera, share])
    head = ["", "step", "ms", "/ jit", "peak, GiB", "planned, GiB", "planned / peak"]
    text.append(report.table(head, rows))
    text.append(report.table(["", "parameters", "model TFLOP/s", "matrix product TFLOP/s", "utilisation"], use))
    return "\n\n".join(text)


def _memory(found: dict[str, Any] | None) -> list[str | None]:
    if found is None:
        return [None, None, None]
    planned = f"{found['planned'] / 2**30:.3f}"
    if not found["measured"]:
        return [None, planned, None]
    return [f"{found['measured'] / 2**30:.3f}", planned, f"{found['planned'] / found['measured']:.3f}"]


def main() -> None:
    """Measure and report."""
    parser = report.arguments(__doc__, rounds=7, seconds=1.0)
    parser.add_argument("--sizes", nargs="*", default=["124M"], choices=list(SIZES))
    parser.add_argument("--no-core", action="store_true", help="leave the tests out")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        name, *words = args.part
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "device": device,
            "core": core,
            "steps": lambda: steps(words[0], int(words[1]), float(words[2])),
            "memory": lambda: memory(words[0], int(words[1])),
            "utilisation": lambda: utilisation(words[0], int(words[1]), float(words[2])),
        }
        print(json.dumps(parts[name]()), flush=True)
        return
    results: dict[str, Any] = {**part("device"), **({} if args.no_core else {"core": part("core")}), "sizes": {}}
    for size in args.sizes:
        results["sizes"][size] = {
            "steps": part("steps", size, args.rounds, args.seconds),
            "memory": {f"level {level}": part("memory", size, level) for level in LEVELS},
            "utilisation": part("utilisation", size, args.rounds, args.seconds),
        }
    report.write(args, results, markdown)
    if results.get("core", {}).get("failed"):
        raise SystemExit("the core does not compute here what it should")


if __name__ == "__main__":
    main()
