"""Backends, their devices, those of this process and those that are not here, and arrays on them."""

import contextlib
import functools
import importlib
import importlib.util
import math
import operator
import os
import sys
from typing import Any

sharding_of = operator.attrgetter("_sharding")
"""`x.sharding` of an array, without the Python of a property: looked at for each leaf of the state in each call."""

bits_of = operator.attrgetter("_base_array")
"""The array of integers that an array of typed PRNG keys is made of, as it is."""


def backend_started() -> bool:
    """Whether a JAX backend is up. jax 0.10-0.12: no public way to ask without starting one."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def gloo_at(ip: str) -> None:
    """Gloo listens at `ip`; after `jax.distributed.initialize`, before the backend starts."""
    # JAX 0.10-0.12 passes gloo no address, so gloo resolves the host name: to 127.0.1.1 on Debian, and to nothing in
    # many containers. `make_cpu_client` accepts collectives that we made ourselves.
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    # Gloo's one thread, which reads and writes the sockets, starts with the collectives. Woken while XLA's thread holds
    # a connection's lock, it took XLA's place on the core and polled for that lock until the scheduler's next tick: 4
    # ms a message, with a core for each rank, where 0.1 are enough (`handleEvents` in gloo/transport/tcp/pair.cc). So
    # it does not interrupt others of its core when it wakes up (Linux's SCHED_BATCH).
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
            before = os.sched_getparam(0)
            with contextlib.suppress(OSError):  # not allowed here: slower, no more
                os.sched_setscheduler(0, os.SCHED_BATCH, before)
                stack.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, before)
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=ip)
    xla_bridge.register_backend_factory(
        "cpu", functools.partial(xla_bridge.make_cpu_client, collectives), priority=0, fail_quietly=False
    )


def gpus_elsewhere(target: str, hosts: int, per_host: int) -> list[Any]:
    """Devices that programs can be compiled for, and no more (`jax.experimental.topologies`)."""
    from jax.experimental import topologies

    # The plugin of jax[cuda12] refuses a machine without a driver unless told; when a backend started it already has.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        _register_cuda()
        found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"{hosts}x{per_host}x1")
    except (NotImplementedError, RuntimeError) as error:
        raise ImportError(str(error)) from None
    return list(found.devices)


# Of a machine without TPUs, libtpu asks the cloud's metadata server about its host unless all of these are there.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_STDERR_LOG_LEVEL": "4", "TPU_MIN_LOG_LEVEL": "4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may plan at once
}  # fmt: skip


def on_tpu_host() -> bool:
    """Whether JAX has found TPUs when it was imported."""
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    return running_in_cloud_tpu_vm


def tpu_cluster() -> Any:
    """What JAX finds of the other hosts of a TPU slice, on a Cloud TPU VM or in GKE; None elsewhere."""
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    if not on_tpu_host():
        return None
    # JAX's own order: in GKE, the variables of a pod come before the metadata server of its node.
    return next((cluster for cluster in (GkeTpuCluster, GceTpuCluster) if cluster.is_env_present()), None)


def tpus_elsewhere(kind: str, shape: str, slices: int) -> list[Any]:
    """TPUs that programs can be compiled for, and no more, slice by slice; ImportError without a libtpu that works."""
    from jax.experimental import topologies

    if not on_tpu_host():
        for name, value in _NO_TPU_HERE.items():
            os.environ.setdefault(name, value)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if kind in ("v4", "v5p"):  # JAX on them has one device per chip, not one per core
        options["chip_config_name"] = "megacore"
    sizes = [int(size) for size in shape.split("x")]
    if math.prod(sizes) < 4 or (len(sizes) == 2 and any(size % 2 for size in sizes)):
        options["chips_per_host_bounds"] = (*sizes, 1, 1)[:3]  # one host; the default is 2x2 chips on each
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{shape}", **options)
    except RuntimeError as error:
        if "INVALID_ARGUMENT" in str(error):
            raise ValueError(f"topology {kind}:{shape}: {str(error).partition(': ')[2]}") from None
        raise ImportError(str(error)) from None
    return list(found.devices)


@functools.cache
def _register_cuda() -> None:
    """Let the CUDA plugin register itself once more, if it refused this machine when a backend started."""
    from jax._src import xla_bridge

    if not backend_started() or "cuda" in xla_bridge._topology_factories:
        return
    for name in ("xla_cuda13", "xla_cuda12"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"jax_plugins.{name}").initialize()
            return


@functools.lru_cache(maxsize=4)
def cpus_elsewhere(count: int) -> list[Any]:
    """Virtual CPU devices to compile for, from a second client. JAX has no public way to make one."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return list(xla_client.make_cpu_client(num_devices=count).devices())
