"""jaxdist: train on many devices with a step written for one."""

from jaxdist.context import Context, get_context, init
from jaxdist.step.data_parallel import data_parallel

__all__ = ["Context", "data_parallel", "get_context", "init"]
