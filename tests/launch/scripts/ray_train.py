"""Two workers of Ray Train, on CPUs: `ray_train.py FOLDER [dies]`; with "dies" rank 1 is killed in its first run."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

FOLDER, DIES = Path(sys.argv[1]), "dies" in sys.argv


def loop(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxdist

    ctx = jaxdist.init(devices=1 if DIES else 2)
    step = jaxdist.data_parallel(lambda w, x: (w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.mean(x)))
    w = jnp.ones(3)
    latest = jaxdist.latest_step(FOLDER / "saved")
    w, first = jaxdist.restore(FOLDER / "saved", (w, 0)) if latest is not None else (w, 0)
    mean = 0.0
    for n in range(int(first), 4):
        w, mean = step(w, np.full((4, 3), 1.0 + ctx.rank, np.float32))
        jaxdist.save(FOLDER / "saved", (w, n + 1), n + 1)
        if DIES and n == 1 and ctx.rank == 1 and not first:
            os.kill(os.getpid(), signal.SIGKILL)
    who = f"rank {ctx.rank} of {ctx.size} by {ctx.connector.name}"
    said = f"{who} from {first} mean {float(mean)} {float(w[0]):.5f} on {ctx.num_devices}"
    (FOLDER / f"said-{ctx.rank}").write_text(said)


ray.init(num_cpus=2, include_dashboard=False)
JaxTrainer(
    loop,
    train_loop_config={},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(storage_path=str(FOLDER / "ray"), failure_config=FailureConfig(max_failures=int(DIES))),
).fit()
