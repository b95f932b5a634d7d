"""jaxdist: train on many devices with a step written for one."""

from jaxdist.context import Context, get_context, init
from jaxdist.errors import StepError
from jaxdist.grad import grad, value_and_grad
from jaxdist.rng import fold_rank
from jaxdist.step.data_parallel import data_parallel

__all__ = [
    "Context",
    "StepError",
    "data_parallel",
    "fold_rank",
    "get_context",
    "grad",
    "init",
    "value_and_grad",
]
