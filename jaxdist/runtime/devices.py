"""Choose the devices and the number of threads of each process of the job."""

import ctypes
import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxdist import compat
from jaxdist.control.channel import Control
from jaxdist.machine import Platform

_MOST = 1024  # lanes or devices
_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda14")


class Resources(NamedTuple):
    """A process's view of its host, exchanged before any backend starts."""

    host: str  # its name
    cores: tuple[int, ...]  # numbers of those that this process may run on
    gpus: tuple[str, ...]  # UUIDs of the visible ones, in order
    platform: Platform


def visible_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs this process may use, as libcuda orders them, which starts no backend; () without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for i in range(count.value):
        device, uuid = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
        if cuda.cuDeviceGet(ctypes.byref(device), i) != 0:
            continue
        get = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)  # v2 tells MIG slices apart
        get(ctypes.byref(uuid), device)
        found.append(bytes(uuid).hex())
    return tuple(found)


def wanted_platform(jax_platforms: str | None, gpus: Sequence[str]) -> Platform:
    """Return the platform that JAX will choose, without starting a backend."""
    if jax_platforms:  # on a Cloud TPU VM, JAX itself has set it to "tpu,cpu"
        first = jax_platforms.split(",")[0]
        return "gpu" if first in ("gpu", "cuda", "rocm") else "tpu" if first == "tpu" else "cpu"
    plugins = _CUDA_PLUGINS if gpus and importlib.util.find_spec("jax_plugins") else ()
    return "gpu" if any(map(importlib.util.find_spec, plugins)) else "cpu"


def number_asked(what: str, given: int | None) -> int | None:
    """The number of `"lanes"` or `"devices"` that `init` or the environment asks for, or None if neither does."""
    variable = f"JAXDIST_{what.upper()}"
    name, value = (what, given) if given is not None else (variable, os.environ.get(variable) or None)
    if value is None:
        return None
    number = int(str(value)) if str(value).isdecimal() else 0
    if not 1 <= number <= _MOST:
        raise ValueError(f"{name}={value!r}: expected a positive number of {what}, such as 8, and at most {_MOST}")
    return number


def choose_gpus(resources: Sequence[Resources], rank: int, wanted: int | None = None) -> list[int]:
    """The GPUs that `rank` takes, by index among those that it sees.

    A process takes all that it alone sees. Several on a host that see the same, as under mpirun, divide them evenly, in
    the order of their ranks. GPUs are identified by UUID.
    """
    host, mine = resources[rank].host, resources[rank].gpus
    beside = [r for r, h in enumerate(resources) if h.host == host]
    seen_by = Counter(uuid for r in beside for uuid in resources[r].gpus)
    each = len(mine) if all(seen_by[uuid] == 1 for uuid in mine) else len(seen_by) // len(beside)
    count, taken, chosen = wanted or max(each, 1), set[str](), dict[int, list[str]]()
    for r in beside:
        chosen[r] = [uuid for uuid in resources[r].gpus if uuid not in taken][:count]
        taken.update(chosen[r])
    overlap = sum(map(len, {frozenset(resources[r].gpus) for r in beside})) > len(seen_by)
    if overlap or any(len(uuids) < count for uuids in chosen.values()):
        processes = f"{len(beside)} process{'es' * (len(beside) > 1)} on host {host}"
        gpus = f"{len(seen_by)} visible GPU{'s' * (len(seen_by) != 1)}"
        variable = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}"
        problem = "some of which see only a part of each other's" if overlap else f"and each process takes {count}"
        raise ValueError(
            f"{processes}, but {gpus} ({variable}), {problem}: start fewer processes per host (e.g. mpirun -np "
            f"{max(len(seen_by) // count, 1)}), let all see the same GPUs or each its own, or run on the CPU with "
            "JAX_PLATFORMS=cpu"
        )
    return [mine.index(uuid) for uuid in chosen[rank]]


def fair_threads(resources: Sequence[Resources], rank: int) -> int:
    """Threads for `rank`: each core it may run on counts for 1 / (processes that may run there)."""
    mine = resources[rank]
    users = [h for h in resources if h.host == mine.host]
    share = sum(1 / sum(core in h.cores for h in users) for core in mine.cores)
    return max(1, int(share + 1e-9))


def too_late(rank: int) -> RuntimeError:
    """The error of a process whose backend has started before it has joined the job."""
    return RuntimeError(
        f"rank {rank}: a JAX backend was in use before this process joined the job, so it can't join the others, or "
        "have lanes. Call jaxdist.init first: before jax.distributed.initialize, jax.devices(), "
        "jax.random.key(), any jnp array or jitted call (also those at the top of imported modules)"
    )


# --- lanes: the devices of a job whose bits do not depend on the number of its processes


def check_lanes(control: Control, lanes: int | None, platform: str, wanted: str) -> None:
    """Refuse lanes that can't be."""
    rank, size = control.rank, control.size
    if lanes is None:
        return
    if platform != "cpu":
        raise ValueError(
            f"rank {rank}: lanes={lanes} are CPU devices, and this job would run on {platform.upper()}s. Set "
            f"JAX_PLATFORMS=cpu, or leave lanes out: the same number of {platform.upper()}s gives the same sums"
        )
    if lanes % size:
        raise ValueError(
            f"rank {rank}: {size} processes for lanes={lanes}: they share the lanes out evenly, so the number of "
            f"processes has to divide {lanes}"
        )
    if wanted == "mpi":
        raise ValueError(
            f"rank {rank}: communicator 'mpi' adds up in MPI's order, which depends on the number of processes. With "
            "lanes use communicator 'xla' (or leave it out)"
        )


def start_lanes(control: Control, lanes: int) -> None:
    """Have this process's lanes as its devices; before the backend starts."""
    # As many threads for XLA on each process, however many cores it has: XLA divides a program's work by the number of
    # threads (`_set_up_cpus`), and sums over the rows of a tall array had different bits with a different number.
    if compat.backend_started():
        raise too_late(control.rank)
    jax.config.update("jax_num_cpu_devices", lanes // control.size)
    jax.config.update("jax_platforms", "cpu")
    os.environ["PJRT_NPROC"] = str(lanes)
