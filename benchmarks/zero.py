"""Step time of the ZeRO levels, beside torch's ZeroRedundancyOptimizer and FSDP2, in interleaved rounds.

    python benchmarks/zero.py --torch PYTHON

Two ranks pinned to a core each, the models of `step_time.py`, float32, Adam, batch 64 per rank. PYTHON is an
interpreter that has torch (CPU; gloo); without it only jaxdist's levels are compared. Both jobs stay alive and take
turns, a round at a time; prints medians of rounds, and medians of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MODELS = {
    "MLP-10M": [784, *[1024] * 10, 10],
    "MLP-0.4M": [784, *[256] * 4, 10],
    "MLP-deep": [784, *[64] * 101, 10],
}
BATCH = 64
Step = Callable[[], Any]


def rounds(variants: dict[str, tuple[Step, Callable[[], None]]], root: bool, share: Callable[[Any], Any]) -> None:
    """Run a round of all variants whenever rank 0 reads a line, and print milliseconds a step.

    Args:
      variants: name -> (one step, wait for it).
      root: whether this is rank 0.
      share: gives all ranks what rank 0 has.
    """
    counts = {}
    for name, (step, wait) in variants.items():
        step()
        wait()
        start = time.perf_counter()
        for _ in range(3):
            step()
        wait()
        counts[name] = share(max(3, min(200, int(3 / (time.perf_counter() - start)))))
    order = list(variants)
    while True:
        order.append(order.pop(0))  # what runs after heavier work is slower
        line = share(sys.stdin.readline() if root else None)
        if line != "\n":
            return
        times = {}
        for name in order:
            step, wait = variants[name]
            share(0)
            start = time.perf_counter()
            for _ in range(counts[name]):
                step()
            wait()
            times[name] = (time.perf_counter() - start) / counts[name] * 1e3
        if root:
            print("ROUND " + json.dumps(times), flush=True)


def jaxdist_worker(model: str) -> None:
    """Levels 0 to 3, and plain optax."""
    import jax
    import numpy as np
    import optax
    import step_time

    import jaxdist

    ctx = jaxdist.init(communicator="mpi")
    rng = np.random.default_rng(ctx.rank)
    batch = (rng.normal(size=(BATCH, 784)).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32))

    def variant(tx: Any) -> tuple[Step, Callable[[], None]]:
        @jaxdist.data_parallel
        def train(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(step_time.loss_fn)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        params = step_time.init(MODELS[model])
        state = [params, tx.init(params)]

        def step() -> None:
            state[:] = train(*state, batch)[:2]

        return step, lambda: jax.block_until_ready(state) and None

    adam = optax.adam(1e-3)
    variants = {"plain optax": variant(adam)}
    variants |= {f"level {n}": variant(jaxdist.zero(adam, n)) for n in (0, 1, 2, 3)}  # type: ignore[arg-type]
    rounds(variants, ctx.is_root, ctx.broadcast)


def torch_worker(model: str) -> None:
    """DDP, DDP with ZeroRedundancyOptimizer, FSDP2."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]
    from torch.distributed.fsdp import fully_shard  # pyright: ignore[reportMissingImports]
    from torch.distributed.optim import ZeroRedundancyOptimizer  # pyright: ignore[reportMissingImports]

    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))

    def net() -> Any:
        torch.manual_seed(0)
        layers: list[Any] = []
        for a, b in itertools.pairwise(MODELS[model]):
            layers += [torch.nn.Linear(a, b), torch.nn.GELU(approximate="tanh")]
        return torch.nn.Sequential(*layers[:-1])

    def variant(module: Any, optimizer: Any) -> tuple[Step, Callable[[], None]]:
        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

        return step, lambda: None

    def fsdp() -> Any:
        module = net()
        for layer in module:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (size,)))
        return fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (size,)))

    first, second = (torch.nn.parallel.DistributedDataParallel(net()) for _ in range(2))
    sharded = fsdp()
    zero = ZeroRedundancyOptimizer(second.parameters(), torch.optim.Adam, lr=1e-3)
    variants = {
        "torch DDP": variant(first, torch.optim.Adam(first.parameters(), lr=1e-3)),
        "torch ZeRO": variant(second, zero),
        "torch FSDP2": variant(sharded, torch.optim.Adam(sharded.parameters(), lr=1e-3)),
    }

    def share(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    rounds(variants, rank == 0, share)


class Job:
    """Two ranks that run a round when told."""

    def __init__(self, python: str, worker: str, model: str):
        ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"} if worker == "torch" else {}
        self.process = subprocess.Popen(
            ["mpirun", "-np", "2", "--bind-to", "core", python, __file__, "--worker", worker, "--models", model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ports},
        )  # fmt: skip

    def round(self) -> dict[str, float]:
        """Milliseconds a step of each variant."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ROUND "):
                return json.loads(line.removeprefix("ROUND "))
        raise SystemExit(f"{self.process.args} has ended")

    def end(self) -> None:
        """Let it go; in words, since mpirun does not pass an end of file on to its ranks."""
        assert self.process.stdin is not None
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        self.process.wait()


AGAINST = [
    ("level 0", "plain optax"), ("level 0", "torch DDP"), ("level 1", "torch ZeRO"), ("level 2", "level 1"),
    ("level 3", "torch FSDP2"),
]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--worker", choices=["jaxdist", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        {"jaxdist": jaxdist_worker, "torch": torch_worker}[args.worker](args.models[0])
        return
    for model in args.models:
        jobs = [Job(sys.executable, "jaxdist", model)]
        if args.torch:
            jobs.append(Job(args.torch, "torch", model))
        done = [{k: v for job in jobs for k, v in job.round().items()} for _ in range(args.rounds)]
        for job in jobs:
            job.end()
        medians = {name: round(statistics.median(r[name] for r in done), 2) for name in done[0]}
        print(f"{model}: median ms of rounds {medians}")
        for a, b in AGAINST:
            if a in done[0] and b in done[0]:
                ratios = [r[a] / r[b] for r in done]
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                print(f"  {a} / {b}: {spread}", flush=True)


if __name__ == "__main__":
    main()
