"""Backends, their devices, those of this process and those that are not here, and arrays on them."""

import contextlib
import functools
import importlib
import importlib.util
import operator
import os
import sys
from typing import Any

sharding_of = operator.attrgetter("_sharding")
"""`x.sharding` of an array, without the Python of a property: looked at for each leaf of the state in each call."""

bits_of = operator.attrgetter("_base_array")
"""The array of integers that an array of typed PRNG keys is made of, as it is."""


def release_dropped() -> None:
    """Let go of host memory of arrays that are gone, as `jax._src.lib` does when Python collects garbage."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    _jax.collect_garbage()


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
