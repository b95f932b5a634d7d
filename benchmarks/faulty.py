"""A job of training in which one rank has a fault.

    mpirun -np 3 python benchmarks/faulty.py sigkill --culprit 1

JAX is imported late: some faults come before it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from known_faults import AT, FAULTS, When, boom, mark, on_the_host

TURNS = 150  # number of turns, 20 ms each: ranks left alone must not finish before they can notice


class Training:
    """The training loop of every rank.

    Attributes:
      options: command line options.
      guilty: whether this rank is the culprit.
      turn: the current turn of the loop.
      on_trace: called once while the next step is traced.
      reduction: reduces the losses of the examples.
    """

    def __init__(self, options: argparse.Namespace, guilty: bool):
        self.options, self.guilty, self.turn = options, guilty, 0
        self.on_trace: Callable[[], Any] | None = None
        self.stopped = False

    def join(self) -> None:
        """Join the job as a rank, and create its steps."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        import jaxdist

        self.ctx = jaxdist.init()
        self.reduction: Callable[..., Any] = jnp.mean
        tx = optax.adam(1e-2)
        tx = jaxdist.zero(tx, level=self.options.level) if self.options.level else tx
        params = {"w": jnp.ones((33, 7)), "b": jnp.zeros(7)}
        self.state: Any = (params, tx.init(params))

        def loss_of(params: Any, batch: Any, target: float) -> Any:
            if self.on_trace is not None:
                act, self.on_trace = self.on_trace, None
                act()
            y = batch["x"] @ params["w"] + params["b"]
            return self.reduction((y - target) ** 2)

        def trains_to(target: float) -> Any:
            def train(state: Any, batch: Any) -> Any:
                params, opt = state
                loss, grads = jax.value_and_grad(loss_of)(params, batch, target)
                if self.options.fault == "callback_raises":
                    loss = jax.pure_callback(on_the_host, jax.ShapeDtypeStruct((), loss.dtype), loss)
                updates, opt = tx.update(grads, opt, params)
                return (optax.apply_updates(params, updates), opt), loss

            train.__name__ = train.__qualname__ = f"train_to_{target:g}"
            return jaxdist.data_parallel(train)

        def evaluate(state: Any, batch: Any) -> Any:
            return state, loss_of(state[0], batch, 0.0)

        one, other = trains_to(0.0), trains_to(5.0)
        look = jaxdist.data_parallel(evaluate)

        def call(step: Any, batch: Any) -> None:
            self.state, loss = step(self.state, batch)
            jax.block_until_ready(loss)

        rows = lambda n: {"x": np.ones((n, 33), np.float32)}
        self.step: Callable[..., None] = lambda batch=None: call(one, rows(2) if batch is None else batch)
        self.step_larger = lambda: call(one, rows(4))
        self.twin = lambda: call(other, rows(2))
        self.evaluate = lambda: call(look, rows(2))
        self.barrier = lambda: self.ctx.barrier()
        self.allreduce = lambda size=100: jax.block_until_ready(jaxdist.allreduce(jnp.ones(size)))

    def run(self) -> None:
        """Run the training loop."""
        fault, turns = FAULTS[self.options.fault], self.options.turns
        for self.turn in range(turns):
            if self.turn == AT:
                if self.ctx.is_root:
                    print("READY", flush=True)
                if fault.when == "loop" and self.guilty:
                    mark()
                    fault.do(self)
            if self.stopped:
                return
            if fault.when == "calls":
                fault.do(self)
            else:
                self.step()
            time.sleep(0.02)

    def run_on_data(self) -> None:
        """Run the loop on batches of a loader."""
        import jaxdist

        boom = self.options.fault.startswith("data_")
        data = Examples(self.guilty and boom)
        for turn, batch in enumerate(jaxdist.loader(data, 2, workers=2 if "worker" in self.options.fault else 0)):
            if turn == AT and self.ctx.is_root:
                print("READY", flush=True)
            self.step(batch)
            time.sleep(0.02)

    def in_order(self, *calls: Callable[[], Any]) -> None:
        """Make these calls; in reverse order on the culprit from turn `AT` on."""
        odd = self.guilty and self.turn >= AT
        if odd and self.turn == AT:
            mark()
        for call in reversed(calls) if odd else calls:
            call()


class Examples:
    """A data set with one example that the culprit cannot read."""

    def __init__(self, guilty: bool):
        self.guilty = guilty

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> dict[str, Any]:
        import numpy as np

        if self.guilty and i % 20 == 7:
            boom()
        return {"x": np.ones(33, np.float32)}


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--level", type=int, default=0, help="of jaxdist.zero")
    parser.add_argument("--late", type=float, default=30.0, help="seconds that a late rank is late")
    parser.add_argument("--turns", type=int, default=TURNS, help="of the loop")
    parser.add_argument("--scratch", default="faults-scratch", help="folder for checkpoints")
    options = parser.parse_args()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["RANK"])
    fault = FAULTS[options.fault]
    training = Training(options, rank == options.culprit)

    def moment(when: When) -> None:
        if fault.when == when and training.guilty:
            mark()
            fault.do(training)

    moment("start")
    import jax
    import optax  # noqa: F401

    import jaxdist

    del jax, jaxdist
    moment("imported")
    training.join()
    moment("joined")
    training.on_trace = lambda: moment("trace")
    if fault.when == "data":
        training.run_on_data()
    else:
        training.run()
    if fault.when == "end":
        fault.do(training)
    print(f"END {rank}", flush=True)


if __name__ == "__main__":
    main()
