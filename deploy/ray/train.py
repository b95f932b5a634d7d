"""Two workers of Ray Train: `python deploy/ray/train.py`. A worker that dies is started again, with all others."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def loop() -> None:
    """What each worker runs: a script of jaxdist's, which `jaxdist.init` makes a rank of Ray's job."""
    import runpy
    import sys

    sys.argv = ["examples/mnist.py", "--epochs", "2"]
    runpy.run_path(sys.argv[0], run_name="__main__")


JaxTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
).fit()
