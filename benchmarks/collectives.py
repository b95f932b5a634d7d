"""Time of jaxdist's eager collectives beside raw mpi4py on preallocated buffers and torch's gloo.

    python benchmarks/collectives.py --peers mpi4py,torch --torch-python /path/to/python

Each round starts each system anew, in turns, on two processes pinned to a core each (torch has processes of its own,
and may live in another environment); mpi4py runs in jaxdist's own processes, sample by sample in turns. A sample is
the mean of calls one after another; the table has medians of samples over all rounds, and the range of the rounds'
medians. All sizes are of the input of one process, float32.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPS = ("allreduce", "reduce_scatter", "allgather")
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
SAMPLES = 7
SECONDS = 0.03  # of a sample


def measure(calls: dict[str, Callable[[], Any]], agree: Callable[[float], float]) -> dict[str, list[float]]:
    """Milliseconds a call in each sample; `agree` gives every rank the root's number."""
    counts = {}
    for name, call in calls.items():
        call()
        call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, min(500, int(SECONDS / agree(time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            times[name].append((time.perf_counter() - start) / counts[name] * 1e3)
    return times


def jaxdist_worker(communicator: str, raw: bool, sizes: list[int]) -> None:
    """Under mpirun: jaxdist, and mpi4py if asked for."""
    import jax
    import numpy as np
    from mpi4py import MPI

    import jaxdist

    world = MPI.COMM_WORLD
    ctx = jaxdist.init(communicator=communicator)
    results = {}
    for size in sizes:
        n = size // 4
        x = jax.random.normal(jax.random.key(ctx.rank), (n,))
        mine, whole = np.asarray(x).copy(), np.zeros(n * ctx.size, np.float32)
        part, out = np.zeros(n // ctx.size, np.float32), np.zeros(n, np.float32)
        direct = {
            "allreduce": lambda a=mine, b=out: world.Allreduce(a, b),
            "reduce_scatter": lambda a=mine, b=part: world.Reduce_scatter_block(a, b),
            "allgather": lambda a=mine, b=whole: world.Allgather(a, b),
        }
        for op in OPS:
            call = getattr(jaxdist, op)
            calls: dict[str, Callable[[], Any]] = {
                f"jaxdist {communicator}": lambda call=call, x=x: jax.block_until_ready(call(x))
            }
            if raw:
                calls["mpi4py"] = direct[op]
            for name, times in measure(calls, lambda t: world.bcast(t)).items():
                results[f"{name}|{op}|{size}"] = times
    if ctx.is_root:
        print(json.dumps(results), flush=True)


def torch_worker(rank: int, port: int, sizes: list[int]) -> None:
    """One of two processes of torch."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def agree(seconds: float) -> float:
        box = torch.tensor([seconds])
        dist.broadcast(box, 0)
        return float(box)

    results = {}
    for size in sizes:
        n = size // 4
        x, part, whole = torch.randn(n), torch.zeros(n // 2), torch.zeros(2 * n)
        out = x.clone()
        calls = {
            "allreduce": lambda out=out: dist.all_reduce(out),
            "reduce_scatter": lambda x=x, part=part: dist.reduce_scatter_tensor(part, x),
            "allgather": lambda x=x, whole=whole: dist.all_gather_into_tensor(whole, x),
        }
        for op in OPS:
            results[f"torch gloo|{op}|{size}"] = measure({op: calls[op]}, agree)[op]
    if rank == 0:
        print(json.dumps(results), flush=True)


def run(commands: list[list[str]], env: dict[str, str]) -> dict[str, list[float]]:
    """Starts processes, and reads what the first one measured."""
    jobs = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL, text=True)
        for i, c in enumerate(commands)
    ]
    try:
        out = jobs[0].communicate(timeout=280)[0]
        for job in jobs:
            job.wait(20)
    finally:
        for job in jobs:
            job.kill()
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def table(rounds: dict[str, list[list[float]]], systems: list[str], sizes: list[int]) -> str:
    """Markdown: a row for each collective and size."""
    lines = [f"| ms | {' | '.join(systems)} |", f"|---|{'---|' * len(systems)}"]
    for op in OPS:
        for size in sizes:
            cells = []
            for system in systems:
                found = rounds.get(f"{system}|{op}|{size}")
                if not found:
                    cells.append("")
                    continue
                medians = [statistics.median(r) for r in found]
                middle = statistics.median(t for r in found for t in r)
                cells.append(f"{middle:.3g} ({min(medians):.3g}-{max(medians):.3g})")
            unit = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
            lines.append(f"| {op} {unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="mpi4py", help="of: mpi4py, torch; with commas")
    parser.add_argument("--communicators", default="mpi,xla")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--json", type=Path, help="all samples")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [int(s) for s in args.sizes.split(",")]
    if args.worker:
        kind, *rest = args.worker.split(":")
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"]) if kind == "jaxdist" else int(rest[0])
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        if kind == "jaxdist":
            jaxdist_worker(rest[0], rest[1] == "raw", sizes)
        else:
            torch_worker(rank, int(rest[1]), sizes)
        return
    from jaxdist.cli.mpi import OVERSUBSCRIBE_ENV, ROOT_ENV

    env = {**os.environ, **ROOT_ENV, **OVERSUBSCRIBE_ENV, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    peers = args.peers.split(",")
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    me = [str(Path(__file__).resolve()), "--sizes", args.sizes, "--worker"]
    rounds: dict[str, list[list[float]]] = {}
    systems = [f"jaxdist {c}" for c in args.communicators.split(",")]
    systems += [{"mpi4py": "mpi4py", "torch": "torch gloo"}[p] for p in peers if p]
    for _ in range(args.rounds):
        found = {}
        for i, communicator in enumerate(args.communicators.split(",")):
            raw = "raw" if "mpi4py" in peers and i == 0 else ""
            command = [mpirun, "-np", "2", "--bind-to", "none", sys.executable, *me, f"jaxdist:{communicator}:{raw}"]
            found |= run([command], env)
        if "torch" in peers:
            port = free_port()
            found |= run([[args.torch_python, *me, f"torch:{rank}:{port}"] for rank in range(2)], env)
        for key, times in found.items():
            rounds.setdefault(key, []).append(times)
    text = table(rounds, systems, sizes)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(rounds))
    if args.markdown:
        args.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
