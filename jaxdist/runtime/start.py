"""JAX's start on all ranks: platform, devices, threads and communicator, and `jax.distributed`."""

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections import Counter
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxdist import compat
from jaxdist.connectors import Connector
from jaxdist.control import rendezvous
from jaxdist.control.channel import Control
from jaxdist.extras import libtpu_problem
from jaxdist.machine import Kind, asked_for, kind_of
from jaxdist.mesh import AXIS, mesh_of
from jaxdist.runtime import communicator_of, compiler, devices, gloo

_log = logging.getLogger("jaxdist")


# What JAX runs on: the devices of all processes, in rank order; the host of each process; the mesh over the devices; a
# communicator ("xla", "lanes" or "mpi"); and the speeds of the devices, as the root knows them.
Started = tuple[list[Any], tuple[str, ...], Mesh, str, Kind]


class _Told(NamedTuple):
    """The facts that a rank sends to the others before any backend starts."""

    resources: devices.Resources
    facts: dict[str, str]  # of what makes its programs
    communicator: str
    problem: Exception | None  # why it is not "mpi"
    over_gloo: bool  # and nothing has begun that would not know of it
    processor: bytes
    threads: int  # of XLA that its environment asks for, or 0
    kind: Kind | None  # that JAXDIST_MACHINE names, to weigh for
    lanes: int | None
    devices: int | None  # that it should take, or None for one CPU, or its GPUs


def control_of(connector: Connector, timeout: float) -> Control:
    """Return the channel of the job: the connector's own, else a new one on a free port of the root."""
    own = getattr(connector, "control", None)
    if isinstance(own, Control):
        return own
    rank, size = connector.rank, connector.size
    if size == 1:
        return Control(0, 1)
    one_host = connector.local_size == size
    server = rendezvous.bind("127.0.0.1" if one_host else "", [0]) if rank == 0 else None
    where = None
    if server is not None:
        ips = [] if one_host else [str(card.ip) for card in rendezvous.interfaces() if not card.ip.is_loopback]
        where = (socket.gethostname(), ips, server.getsockname()[1], secrets.token_bytes())
    host, ips, port, secret = connector.broadcast(where, 0)
    names = ["127.0.0.1"] if one_host or host == socket.gethostname() else []
    names += [] if one_host else [*ips, host]
    return Control(rank, size, [(name, port) for name in names], server=server, key=secret, timeout=timeout)


def jax_started(
    connector: Connector,
    control: Control,
    wanted: str,
    timeout: float,
    lanes: int | None = None,
    devices_wanted: int | None = None,
) -> Started:
    """Choose platform, devices, threads and communicator, and start jax.distributed."""
    if control.size == 1:
        return _alone(control, wanted, lanes, devices_wanted)
    own = _told_by_this_rank(connector, control, wanted, lanes, devices_wanted)
    told: list[_Told] = control.exchange("init", own, timeout)
    communicator = _agreed(connector, control, told, wanted)
    resources = [each.resources for each in told]
    if own.over_gloo:
        _set_up_cpus(control, told, communicator)
    elif lanes:
        raise devices.too_late(control.rank)
    chooses = own.resources.platform == "gpu" and not jax.distributed.is_initialized()
    local_ids = devices.choose_gpus(resources, control.rank, own.devices) if chooses else None
    _start_distributed(control, local_ids, timeout)
    if own.over_gloo:
        members = control.members
        own_ip = members[control.rank].ip
        # A rank on the root's host talked to it over loopback: others reach both at the root's address.
        compat.gloo_at(members[0].ip if rendezvous.is_loopback(own_ip) else own_ip)
    found = _devices_of_all(control, own.devices)
    if communicator == "mpi" and len(found) > control.size:
        raise ValueError(f"rank {control.rank}: communicator 'mpi': {communicator_of.ONE_EACH}")
    mesh = mesh_of({AXIS: -1}, found)
    # Beside MPI only where nothing can stand between: it is for programs of the user's own with XLA's collectives.
    if own.over_gloo and (communicator != "mpi" or _one_host(control)):
        control.exchange("barrier", None, timeout)
        gloo.connect(mesh, mesh.axis_names)
    hosts = tuple(each.host for each in resources)
    if communicator == "mpi":
        from jaxdist.communicators.mpi_groups import world

        world(control.rank)  # by all ranks together, so now
    return found, hosts, mesh, communicator, told[0].kind or kind_of(found[0])


def _told_by_this_rank(
    connector: Connector, control: Control, wanted: str, lanes: int | None, devices_wanted: int | None
) -> _Told:
    if lanes and devices_wanted:
        raise ValueError(f"lanes={lanes} and devices={devices_wanted}: lanes are devices. Leave one of them out")
    if compat.backend_started() and not jax.distributed.is_initialized():
        raise devices.too_late(control.rank)
    gpus = devices.visible_gpus()
    platform = devices.wanted_platform(compat.platforms_asked(), gpus)
    if platform == "tpu" and (problem := libtpu_problem()):
        raise RuntimeError(f"rank {control.rank}: {problem}. Install both: pip install 'jaxdist[tpu]'")
    if devices_wanted is None and platform == "cpu" and jax.distributed.is_initialized():
        devices_wanted = compat.cpu_devices_asked()  # the user's own start of JAX is kept
    threads = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC", "")
    return _Told(
        devices.Resources(socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))), gpus, platform),
        compiler.facts(platform) | {"platform": platform, "lanes": str(lanes)},
        *communicator_of.several(control.size, connector.name, "xla" if lanes else wanted, platform, devices_wanted),
        platform == "cpu" and not compat.backend_started(),
        compiler.processor(),
        int(threads) if threads.isdecimal() else 0,
        asked_for(platform),
        lanes,
        devices_wanted,
    )


def _agreed(connector: Connector, control: Control, told: list[_Told], wanted: str) -> str:
    """Return the communicator of all ranks. Refuse ranks that differ where they must agree."""
    mine = told[control.rank]
    compiler.check_same([each.facts for each in told], control.who)
    devices.check_lanes(control, mine.lanes, mine.resources.platform, wanted)
    errors = [(r, each.problem) for r, each in enumerate(told) if each.problem]
    if errors and wanted != "auto":
        rank, problem = errors[0]
        raise type(problem)(f"communicator 'mpi' on rank {rank}: {problem}")
    if errors and control.rank == 0 and connector.name == "mpi":  # right, but slower than the launcher suggests
        _log.warning("arrays move over gloo, not over MPI: %s. (JAXDIST_COMMUNICATOR=xla silences this)", errors[0][1])
    if {each.communicator for each in told} == {"mpi"}:
        return "mpi"
    return "lanes" if mine.lanes else "xla"


def _set_up_cpus(control: Control, told: list[_Told], communicator: str) -> None:
    mine = told[control.rank]
    if mine.lanes:
        devices.start_lanes(control, mine.lanes)
    else:
        jax.config.update("jax_num_cpu_devices", mine.devices or 1)  # regardless of XLA_FLAGS
        if communicator == "xla":
            compiler.check_processors([each.processor for each in told], mine.facts, control.who)
        # As many on all ranks: XLA orders a program's messages by it, and between CPUs these have no names. The pool of
        # XLA's CPU client ignores OMP_NUM_THREADS; it reads PJRT_NPROC, then NPROC (`DefaultThreadPoolSize`).
        resources = [each.resources for each in told]
        threads = min(each.threads or devices.fair_threads(resources, r) for r, each in enumerate(told))
        # A program of several devices needs a thread for each: they wait for each other.
        os.environ["PJRT_NPROC"] = str(max(threads, mine.devices or 1))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not compat.platforms_asked():
        jax.config.update("jax_platforms", "cpu")  # no probing for others on every rank


def _devices_of_all(control: Control, devices_wanted: int | None) -> list[Any]:
    """All devices, process by process: as many of each."""
    found = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if jax.process_index() != control.rank:  # a TPU's runtime numbers the hosts of a slice on its own
        raise RuntimeError(
            f"rank {control.rank}: JAX's runtime knows this process as {jax.process_index()}. Take connector 'tpu', "
            "which numbers the processes as the runtime does"
        )
    counts = Counter(d.process_index for d in found)
    if len({counts[rank] for rank in range(control.size)}) > 1:
        shown = ", ".join(f"{counts[rank]} on rank {rank}" for rank in range(min(control.size, 16)))
        raise RuntimeError(
            f"rank {control.rank}: every process needs the same number of devices, and there are {shown}. Say how many "
            "with jaxdist.init(devices=), JAXDIST_DEVICES or `jaxdist run --devices`, or let each see as many "
            "(CUDA_VISIBLE_DEVICES, --gpus-per-task, TPU_VISIBLE_CHIPS)"
        )
    if devices_wanted and counts[control.rank] != devices_wanted:
        raise ValueError(
            f"rank {control.rank}: devices={devices_wanted}, and each process has {counts[control.rank]}: {found}"
        )
    return found


def _alone(control: Control, wanted: str, lanes: int | None, devices_wanted: int | None) -> Started:
    if lanes:
        platform = devices.wanted_platform(compat.platforms_asked(), devices.visible_gpus())
        devices.check_lanes(control, lanes, platform, wanted)
        devices.start_lanes(control, lanes)
    elif devices_wanted and not compat.backend_started():
        jax.config.update("jax_num_cpu_devices", devices_wanted)
    found = list(jax.local_devices())
    if devices_wanted and len(found) < devices_wanted:
        raise ValueError(f"devices={devices_wanted}, and this process has {len(found)}: {found}")
    found = found[:devices_wanted]
    communicator = "lanes" if lanes else communicator_of.alone(wanted, len(found), found[0].platform)
    kind = asked_for(found[0].platform) or kind_of(found[0])
    return found, (socket.gethostname(),), mesh_of({AXIS: -1}, found), communicator, kind


def _start_distributed(control: Control, local_ids: list[int] | None, timeout: float) -> None:
    rank, size = control.rank, control.size
    if jax.distributed.is_initialized():
        if compat.distributed_ids() == (rank, size):
            return  # the user started it, with the same numbers
        raise RuntimeError(
            f"rank {rank} of {size}: jax.distributed was already initialized as process "
            "{} of {}; leave that to jaxdist.init".format(*compat.distributed_ids())
        )
    compat.quiet_distributed()
    address = ""
    if rank == 0:  # on the loopback address of one host, else on the network of the job
        ip = "127.0.0.1" if _one_host(control) else control.members[0].ip
        with rendezvous.bind(ip, [0]) as probe:
            port = probe.getsockname()[1]
        address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
    address = control.exchange("coordinator", address, timeout)[0]
    # gRPC would go through the proxy of the environment, also to this host.
    past, no_proxy = "no_grpc_proxy", os.environ.get("no_proxy")
    here = address.rpartition(":")[0].strip("[]")
    os.environ[past] = ",".join(filter(None, [os.environ.get(past, no_proxy), here]))
    if rank > 0:
        _await_listener(address, min(timeout, 5.0))
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address,
        num_processes=size,
        process_id=rank,
        local_device_ids=local_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(timeout),
        heartbeat_timeout_seconds=max(100, int(timeout)),  # a host that swaps is ours to judge
    )


def _await_listener(address: str, seconds: float) -> None:
    """Wait until someone listens there: gRPC tries again after a second or two, and every rank waits for that one."""
    ip, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((ip.strip("[]"), int(port)), 1.0):
            return
        time.sleep(0.005)


def _one_host(control: Control) -> bool:
    return all(rendezvous.is_loopback(m.ip) for m in control.members)
