"""Load tests: are large collectives always exact, and does memory stay flat in a long job?

    jaxdist run -n 3 --communicator mpi benchmarks/soak.py --json load.json load --times 200 --mib 64
    jaxdist run -n 3 --communicator xla benchmarks/soak.py --json soak.json train --minutes 30
    jaxdist run -n 32 benchmarks/soak.py train --cycles 1

*load* makes this many all-reduces and reduce-scatters, with new numbers each time, and compares every
element. *train* runs cycles of training steps and eager collectives, with occasional saves in the
background that are read again and compared bit by bit: in each of the first cycles, later in some
(tensorstore 0.1.86 loses some 10 KiB per array and save in `Spec.to_json`). After each cycle it records
each rank's allocated memory (malloc), Python objects, descriptors and threads. (Resident memory is listed
separately: malloc's pools, one per tensorstore thread, grow by up to 70 MiB in the first hour, although
their contents do not.) The first third is ignored, since caches fill; a line is fitted through 20 blocks of
the rest. The growth is **flat** if its 95% interval ends below the limit (1% of memory and objects; one
descriptor; one thread), **grows** if the interval begins above it, and otherwise **not known**: run for
longer. With --checkpoints a later run continues this one. The exit code is 1 if anything is wrong or grows.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import report

BLOCKS = 20
STUDENT = 2.101  # for 95% and BLOCKS - 2 degrees of freedom
WATCHED = ("allocated, MiB", "objects of Python, thousands", "descriptors", "threads")


class Trend(NamedTuple):
    """A line through measurements.

    Attributes:
      level: value at the end of the first third.
      growth: change from there to the end.
      error: half of the growth's 95% interval.
      hours: duration of the growth.
      limit: growth that counts as none.
    """

    level: float
    growth: float
    error: float
    hours: float
    limit: float

    @property
    def verdict(self) -> str:
        """Return "flat", "grows" or "not known"."""
        if self.growth + self.error < self.limit:
            return "flat"
        return "grows" if self.growth - self.error > self.limit else "not known"


def trend(seconds: Sequence[float], values: Sequence[float], limit: float) -> Trend | None:
    """Fit a line by least squares through means of blocks, since neighboring samples are correlated.

    Args:
      seconds: the time of each measurement.
      values: the measurements.
      limit: see `Trend`.

    Returns:
      The line, or None if there are fewer than two samples per block.
    """
    first = len(values) // 3
    seconds, values = seconds[first:], values[first:]
    if len(values) < 2 * BLOCKS:
        return None
    cut = [len(values) * i // BLOCKS for i in range(BLOCKS + 1)]
    x, y = ([statistics.fmean(of[a:b]) for a, b in itertools.pairwise(cut)] for of in (seconds, values))
    slope, intercept = statistics.linear_regression(x, y)
    square = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (BLOCKS - 2)
    error = (square / sum((a - statistics.fmean(x)) ** 2 for a in x)) ** 0.5
    window = seconds[-1] - seconds[0]
    return Trend(intercept + slope * seconds[0], slope * window, STUDENT * error * window, window / 3600, limit)


def limit_of(watched: str, values: Sequence[float]) -> float:
    """Return the growth that counts as none."""
    return 0.01 * statistics.median(values) if watched.startswith(("allocated", "objects")) else 1.0


class _Malloc(ctypes.Structure):
    """glibc's `struct mallinfo2`: total sizes of all pools, in bytes."""

    _names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "top"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def sample() -> list[float]:
    """Return this process's values of `WATCHED`, and its resident memory in MiB."""
    gc.collect()  # garbage is not a leak
    of = ctypes.CDLL(None).mallinfo2
    of.restype = _Malloc
    found = of()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return [
        (found.uordblks + found.hblkhd) / 2**20,
        sys.getallocatedblocks() / 1000,
        *(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")),
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    ]


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Run large eager collectives, and compare every element."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxdist

    ctx = jaxdist.init()
    n = ctx.size
    length = int(args.mib * 2**20) // 4 // n * n
    base = np.arange(length, dtype=np.float32) % 1009  # sums of these are exact in float32
    mine = slice(ctx.rank * length // n, (ctx.rank + 1) * length // n)
    wrong, seconds = 0, {"allreduce": 0.0, "reduce_scatter": 0.0}
    for i in range(args.times):
        x = jax.block_until_ready(jnp.asarray(base + (ctx.rank + i % 97)))
        expected = n * base + (sum(range(n)) + n * (i % 97))
        for op, part in (("allreduce", expected), ("reduce_scatter", expected[mine])):
            start = time.perf_counter()
            got = jax.block_until_ready(getattr(jaxdist, op)(x))
            seconds[op] += time.perf_counter() - start
            if not np.array_equal(np.asarray(got), part):
                wrong += 1
                print(f"WRONG: {op} {i} on rank {ctx.rank}", file=sys.stderr, flush=True)
        if ctx.is_root and (i + 1) % 20 == 0:
            print(f"{i + 1} of {args.times}", file=sys.stderr, flush=True)
    return {
        "ranks": n, "communicator": ctx.communicator, "times": args.times, "mib": args.mib,
        "wrong": int(jaxdist.allreduce(wrong)), "ms": {op: 1e3 * t / args.times for op, t in seconds.items()},
    }  # fmt: skip


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run cycles of steps, eager collectives and saves, until time is up."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxdist

    ctx = jaxdist.init()
    tx = jaxdist.zero(optax.adam(1e-3), level=args.level)

    @jaxdist.data_parallel
    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_of(params: Any) -> Any:
            h = jax.nn.relu(batch["x"] @ params["in"])
            return jnp.mean((h @ params["out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    one, two = jax.random.split(jax.random.key(0))
    params = {"in": jax.random.normal(one, (64, 1024)) / 8, "out": jax.random.normal(two, (1024, 256)) / 32}
    state: Any = (params, tx.init(params))
    random = np.random.default_rng(ctx.rank)
    batches = [
        {"x": random.normal(size=(8, 64)).astype(np.float32), "y": random.normal(size=(8, 256)).astype(np.float32)}
        for _ in range(16)
    ]

    def steps(count: int) -> None:
        nonlocal state, loss
        for i in range(count):
            state, loss = step(state, batches[i % len(batches)])
        jax.block_until_ready(loss)

    def eager(i: int) -> int:
        n, x = ctx.size, np.arange(1000 * ctx.size, dtype=np.float32) + i % 1000
        parts = {
            "allreduce": n * x + sum(range(n)),
            "reduce_scatter": np.split(n * x + sum(range(n)), n)[ctx.rank],
            "allgather": np.concatenate([x + rank for rank in range(n)]),
        }
        return sum(not np.array_equal(getattr(jaxdist, op)(x + ctx.rank), part) for op, part in parts.items())

    def bits(state: Any) -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jaxdist.unshard(state))]

    loss: Any = None
    wrong, cycle, saves, elapsed, due, start = 0, 0, 0, 0.0, 0.0, time.monotonic()
    samples = array.array("f")  # an array that hardly grows itself
    with _folder(args.checkpoints if ctx.is_root else None) as made:
        folder = ctx.broadcast(str(made))
        before = jaxdist.latest_step(folder) or 0
        steps(1)  # places the state
        if before:
            state = jaxdist.restore(folder, state)
        over, save = False, True
        while not over:
            steps(10)
            cycle += 1
            if save:
                saves += 1
                saved = bits(state)
                saving = jaxdist.save(folder, state, before + cycle, wait=False, keep=2)
                wrong += eager(cycle)
                steps(10)
                saving.wait()
                wrong += bits(jaxdist.restore(folder, state, step=before + cycle)) != saved
            else:
                wrong += eager(cycle)
            jaxdist.check_sync(state)
            elapsed = time.monotonic() - start
            samples.extend([elapsed, *sample()])
            if ctx.is_root and cycle % 100 == 0:
                last = [round(v) for v in samples[-5:]]
                print(f"{elapsed / 60:.1f} minutes, {cycle} cycles: {last}", file=sys.stderr, flush=True)
            over = cycle >= args.cycles if args.cycles else elapsed >= 60 * args.minutes
            over, save = ctx.broadcast((over, cycle < args.warm_up or elapsed >= due))  # the root's clock
            if save:
                due = elapsed + args.save_every
    mine = np.frombuffer(samples, np.float32).reshape(1, cycle, -1)
    everyones = np.asarray(jaxdist.allgather(mine))
    return {
        "ranks": ctx.size, "communicator": ctx.communicator, "level": args.level, "cycles": cycle, "saves": saves,
        "from": before, "minutes": elapsed / 60, "loss": float(loss), "wrong": int(jaxdist.allreduce(wrong)),
        "samples": [[[round(float(v), 3) for v in line] for line in of] for of in everyones],
    }  # fmt: skip


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def trends(found: dict[str, Any]) -> list[tuple[int, str, Trend | None]]:
    """Return trends for each rank and watched value."""
    return [
        (rank, name, trend([s[0] for s in samples], values, limit_of(name, values)))
        for rank, samples in enumerate(found.get("samples", []))
        for i, name in enumerate(WATCHED, 1)
        for values in [[s[i] for s in samples]]
    ]


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of `load` or `train`."""
    if "samples" not in found:
        each = ", ".join(f"{op} {report.number(ms)} ms" for op, ms in found["ms"].items())
        return (
            f"{found['times']} times all-reduce and reduce-scatter of {found['mib']:g} MiB on {found['ranks']} ranks "
            f"over {found['communicator']}: {found['wrong']} wrong; {each}."
        )
    said = (
        f"{found['cycles']} cycles with {found['saves']} saves in {found['minutes']:.1f} minutes on {found['ranks']} "
        f"ranks over {found['communicator']}, level {found['level']}: {found['wrong']} wrong; the last loss "
        f"{found['loss']:.4f}."
    )
    fits = trends(found)
    if not any(fit for _, _, fit in fits):
        return f"{said} Too short to see whether anything grows."
    rows = [
        [rank, name, report.three(t.level), f"{t.growth:+.2f} ± {t.error:.2f}",
         f"{t.growth / t.hours:+.1f} ± {t.error / t.hours:.1f}", t.verdict]
        for rank, name, t in fits if t is not None
    ]  # fmt: skip
    head = ["rank", "what", "after the first third", "growth from there", "an hour", ""]
    resident = [f"{samples[len(samples) // 3][-1]:.0f} to {samples[-1][-1]:.0f}" for samples in found["samples"]]
    return f"{said}\n\n{report.table(head, rows)}\n\nResident memory of each rank, MiB: {', '.join(resident)}."


def main() -> None:
    """Run one rank; the root reports."""
    parser = report.arguments(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("load", help="large collectives")
    one.add_argument("--times", type=int, default=200)
    one.add_argument("--mib", type=float, default=64)
    other = commands.add_parser("train", help="cycles of training")
    other.add_argument("--minutes", type=float, default=30)
    other.add_argument("--cycles", type=int, help="so many, in place of minutes")
    other.add_argument("--save-every", type=float, default=60, metavar="SECONDS", help="default: 60")
    other.add_argument("--warm-up", type=int, default=60, metavar="CYCLES", help="with a save in each; default: 60")
    other.add_argument("--level", type=int, default=1, choices=range(4), help="of jaxdist.zero; default: 1")
    other.add_argument("--checkpoints", type=Path, help="keep them here, and go on from what is there")
    args = parser.parse_args()
    found = load(args) if args.what == "load" else train(args)
    import jaxdist

    if jaxdist.get_context().is_root:
        report.write(args, found, markdown)
    grows = any(fit is not None and fit.verdict == "grows" for _, _, fit in trends(found))
    sys.exit(1 if found["wrong"] or grows else 0)


if __name__ == "__main__":
    main()
