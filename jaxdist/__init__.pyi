"""jaxdist: train on many devices with a step written for one."""

from jaxdist.checkpoint import latest_step, restore, save
from jaxdist.collectives import (
    all_to_all,
    allgather,
    allreduce,
    barrier,
    broadcast,
    gather,
    permute,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from jaxdist.context import Context, get_context, init
from jaxdist.data import loader
from jaxdist.errors import CheckpointError, StepError, SyncError
from jaxdist.explain import explain
from jaxdist.finite import check_finite
from jaxdist.grad import grad, value_and_grad
from jaxdist.memory import memory
from jaxdist.metrics import run_log
from jaxdist.per_device import per_device
from jaxdist.placements.registry import register
from jaxdist.plan import plan
from jaxdist.precision import master_weights
from jaxdist.profile import profile
from jaxdist.rng import fold_rank
from jaxdist.spawn import spawn
from jaxdist.step.data_parallel import data_parallel
from jaxdist.sync import check_sync
from jaxdist.zero import shard, unshard, zero

__all__ = [
    "CheckpointError",
    "Context",
    "StepError",
    "SyncError",
    "all_to_all",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "check_finite",
    "check_sync",
    "data_parallel",
    "explain",
    "fold_rank",
    "gather",
    "get_context",
    "grad",
    "init",
    "latest_step",
    "loader",
    "master_weights",
    "memory",
    "per_device",
    "permute",
    "plan",
    "profile",
    "recv",
    "reduce",
    "reduce_scatter",
    "register",
    "restore",
    "run_log",
    "save",
    "scatter",
    "send",
    "shard",
    "spawn",
    "unshard",
    "value_and_grad",
    "zero",
]

__version__: str
