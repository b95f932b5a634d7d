"""Processes that an engine has started: Ray Train, Kubeflow, a TPU slice, or who has initialized `jax.distributed`.

Each is asked for rank and size, and for a way to give the others the address of rank 0; the rest is jaxdist's own.
"""

import importlib.util
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxdist.connectors import tcp
from jaxdist.connectors.base import Found, local_position, need, read_int

T = TypeVar("T")

# What stands for RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
# Kubeflow Trainer, runtime jax-distributed: https://www.kubeflow.org/docs/components/trainer/user-guides/jax/
_TRAINER = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")
# Kubeflow's training operator, JAXJob: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/jax/
_JAXJOB = ("PROCESS_ID", "NUM_PROCESSES", "COORDINATOR_ADDRESS", "COORDINATOR_PORT")


def engine(env: Mapping[str, str]) -> str | None:
    """Return the connector for the engine that started this process as one of several, or None."""
    if "jax" in sys.modules and initialized()[1] > 1:
        return "jax.distributed"
    if any(name in env for name in _TRAINER) and env.get("JAX_NUM_PROCESSES") != "1":
        return "kubeflow"
    if "COORDINATOR_ADDRESS" in env and env.get("NUM_PROCESSES", "1") != "1":
        return "kubeflow"
    if _ray() is not None:
        return "ray"
    # JAX, which knows, is imported to ask it only where it may have a TPU.
    may_be = "jax" in sys.modules or importlib.util.find_spec("libtpu") is not None
    return "tpu" if may_be and (_from_tpu(lambda cluster: cluster.get_process_count()) or 1) > 1 else None


def _from_tpu(ask: Callable[[Any], T]) -> T | None:
    """Ask JAX about the TPU slices of this host. Returns None if it has none."""
    from jaxdist import compat

    try:
        cluster = compat.tpu_cluster()
        return None if cluster is None else ask(cluster)
    except Exception as error:  # of `requests`, which asks the metadata server, of the variables, or of DNS
        raise RuntimeError(
            f"JAX finds a TPU, but not the other hosts of its slice ({type(error).__name__}: {error}). Install "
            "jaxdist[tpu], or say where they meet: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with ranks in the "
            "order of TPU_WORKER_ID. JAXDIST_CONNECTOR=local is for one host"
        ) from error


def tpu(timeout: float) -> Found:
    """Connect the hosts of TPU slices, numbered as in the TPU runtime."""
    port = os.environ.get("JAX_COORDINATOR_PORT")  # as for JAX
    told = _from_tpu(
        lambda cluster: (
            cluster.get_process_id(), cluster.get_process_count(),
            cluster.get_coordinator_address(timeout_secs=int(timeout), override_coordinator_port=port),
        )
    )  # fmt: skip
    if told is None:
        raise RuntimeError(
            "connector 'tpu': JAX finds no TPU here. On a Cloud TPU VM or in GKE, install jaxdist[tpu]; elsewhere, "
            "leave the connector out"
        )
    rank, size, address = told
    host, _, port = address.rpartition(":")
    given = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": port}
    return tcp.connect("tpu", timeout, env=given)


def kubeflow(timeout: float) -> Found:
    """Connect the pods of Kubeflow: ranks meet where JAX's coordinator would have listened."""
    env = os.environ
    names = _TRAINER if any(name in env for name in _TRAINER) else _JAXJOB
    need(env, names, "kubeflow", "The controller sets them in each pod")
    size = read_int(env, names[1], 1)
    rank = read_int(env, names[0], 0, size - 1)
    host, _, port = ":".join(env[name] for name in names[2:]).rpartition(":")
    given = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": port}
    return tcp.connect("kubeflow", timeout, env=given)


def initialized() -> tuple[int, int]:
    """Rank and size of `jax.distributed`; (0, 1): it is not initialized."""
    import jax

    from jaxdist import compat

    return compat.distributed_ids() if jax.distributed.is_initialized() else (0, 1)


def jax_distributed(timeout: float) -> Found:
    from jaxdist import compat

    rank, size = initialized()
    store, number = compat.key_value_store(), 0

    def share(obj: Any, root: int = 0) -> Any:
        nonlocal number
        number += 1
        key = f"jaxdist/{number}"
        if rank == root:
            store.key_value_set_bytes(key, pickle.dumps(obj))
            return obj
        return pickle.loads(store.blocking_key_value_get_bytes(key, int(1000 * timeout)))

    hosts = [share(socket.gethostname(), root) for root in range(size)]
    return Found("jax.distributed", rank, size, *local_position(hosts, rank), share)


def _ray() -> Any:
    """Ray Train's context, in one of several workers; None elsewhere."""
    if "ray.train" not in sys.modules:
        return None
    from ray import train  # pyright: ignore[reportMissingImports]

    try:
        context = train.get_context()
        return context if context.get_world_size() > 1 else None
    except Exception:  # not in a worker, in the words of each version
        return None


def ray(timeout: float) -> Found:
    from ray.train.collective import broadcast_from_rank_zero  # pyright: ignore[reportMissingImports]

    def share(obj: Any, root: int = 0) -> Any:
        assert root == 0, root  # all that jaxdist asks for
        return broadcast_from_rank_zero(obj)

    ctx = _ray()
    rank, local = (ctx.get_world_rank(), ctx.get_world_size()), (ctx.get_local_rank(), ctx.get_local_world_size())
    return Found("ray", *rank, *local, share)
