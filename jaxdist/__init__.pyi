"""jaxdist: train on many devices with a step written for one."""

from . import checkpoint as checkpoint
from . import data as data
from . import placements as placements
from . import planning as planning
from .agreement.sync import check_sync
from .checkpoint import export, latest_step, restore, save
from .collectives.public import (
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
from .compilation.finite import check_finite
from .data.evaluate import evaluate
from .data.loader import loader
from .errors import CheckpointError, ControlError, DataError, JaxdistError, StepError, SyncError
from .gradients import grad, value_and_grad
from .launch.spawn import spawn
from .manual import per_device
from .observe.explain import explain
from .observe.exporting import export_step
from .observe.metrics import run_log
from .observe.profile import profile
from .observe.verify import verify
from .planning.fitting import plan
from .precision import loss_scale
from .runtime.context import Context, get_context, init
from .sharding import shard, unshard, zero
from .step.data_parallel import data_parallel, parallel

__all__ = [
    "CheckpointError",
    "Context",
    "ControlError",
    "DataError",
    "JaxdistError",
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
    "evaluate",
    "explain",
    "export",
    "export_step",
    "gather",
    "get_context",
    "grad",
    "init",
    "latest_step",
    "loader",
    "loss_scale",
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
    "verify",
    "zero",
]

__version__: str
