"""`jax.config`; `jax.distributed`, its client, its key-value store; and MPI below mpi4jax."""

import os
import re
from collections.abc import Mapping
from typing import Any

import jax


def settings() -> dict[str, Any]:
    """All of `jax.config`, by name. (`values` is there in jax 0.10-0.12, and documented nowhere.)"""
    return dict(jax.config.values)


def use_settings(wanted: Mapping[str, Any]) -> None:
    """Make `jax.config` what it was in another process, as far as this one's differs."""
    mine = settings()
    for name, value in wanted.items():
        if name in mine and mine[name] != value:
            jax.config.update(name, value)


def platforms_asked() -> str | None:
    """JAX_PLATFORMS, or what the script set; the attribute is there but typed nowhere."""
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]


def cpu_devices_asked() -> int | None:
    """The number of CPU devices that the script or its environment asks JAX for; None: it does not."""
    asked: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return asked if asked > 0 else int(flag[1]) if flag else None


def distributed_ids() -> tuple[int, int]:
    """(process_id, num_processes) of jax.distributed; public only once a backend is up."""
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


def key_value_store() -> Any:
    """The key-value store of jax.distributed, which has no public name."""
    from jax._src import distributed

    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return client


def quiet_distributed() -> None:
    """Switch off what jax.distributed does that harms a training job; before `initialize`."""
    # The preemption service's handler in C++ swallows SIGTERM: the launcher's would end nothing. The proxy check warns
    # on every rank. Both flags exist in jax 0.10-0.12.
    for name in ("jax_enable_preemption_service", "jax_check_proxy_envs"):
        jax.config.update(name, False)


def mpi_status_ignore() -> int:
    """MPI_STATUS_IGNORE for mpi4jax's FFI targets (its own sendrecv passes it; it has no public name)."""
    from mpi4jax._src.xla_bridge import MPI_STATUS_IGNORE_ADDR

    return MPI_STATUS_IGNORE_ADDR
