"""jaxdist: train on many devices with a step written for one."""

from jaxdist import data as data
from jaxdist import placements as placements
from jaxdist.agreement.sync import check_sync
from jaxdist.checkpoint import export, latest_step, restore, save
from jaxdist.checkpoint.checksum import digest
from jaxdist.collectives.public import (
    all_to_all,
    allgather,
    allreduce,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from jaxdist.data.evaluate import evaluate, gather_for_metrics
from jaxdist.data.loader import Loader, loader
from jaxdist.errors import CheckpointError, DataError, StepError, SyncError
from jaxdist.grad import grad, value_and_grad
from jaxdist.launch.spawn import spawn
from jaxdist.observe.explain import explain
from jaxdist.observe.metrics import run_log
from jaxdist.observe.profile import profile
from jaxdist.per_device import per_device
from jaxdist.planning.fit import fit
from jaxdist.planning.memory import memory
from jaxdist.planning.plan import plan
from jaxdist.precision import loss_scale
from jaxdist.runtime.context import Context, get_context, init
from jaxdist.step.data_parallel import data_parallel, parallel
from jaxdist.step.finite import check_finite
from jaxdist.zero import shard, unshard, zero

__all__ = [
    "CheckpointError",
    "Context",
    "DataError",
    "Loader",
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
    "digest",
    "evaluate",
    "explain",
    "export",
    "fit",
    "gather",
    "gather_for_metrics",
    "get_context",
    "grad",
    "init",
    "latest_step",
    "loader",
    "loss_scale",
    "memory",
    "parallel",
    "per_device",
    "plan",
    "profile",
    "recv",
    "reduce",
    "reduce_scatter",
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
