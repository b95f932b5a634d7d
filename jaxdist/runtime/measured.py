"""What CPU processes compute and send in a second, measured by the first job of a kind on a host, and remembered.

A job's numbers are the root's, as powers of two: other numbers are other programs, and these would be others from run
to run. `JAXDIST_MACHINE` names a row of the table of `jaxdist.machine` in their place, and what differs from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.communicators import lowering
from jaxdist.ir.primitives import all_reduce_p
from jaxdist.machine import KINDS, REACHED, VIRTUAL, Kind, Machine
from jaxdist.mesh import AXIS, GROUP, axes_of_mesh, bound, in_groups, in_host
from jaxdist.runtime import gloo

_SIDE = 512  # of matrices that are multiplied
_LARGE, _CHAIN = 1 << 18, 8  # entries of a large message, as much as travels together (buckets); small ones in a row
_TOUCHED = 1 << 22  # entries that are read and written
_TIMES = 9
_NAME = "machines.json"
_KEPT = ("link", "network", "latency", "network_latency", "flops", "bandwidth")
_TIMES_LOST = ("latency", "network_latency", "stall")  # which may be 0
_LEAST, _MOST = 1e-12, 1e18  # what may be measured of them


def named(platform: str) -> Kind | None:
    """The kind that `JAXDIST_MACHINE` names; None: it names none."""
    asked = os.environ.get("JAXDIST_MACHINE", "")
    name, *others = asked.split(",")
    if not name:
        return None
    if name.lower() not in KINDS:
        names = ", ".join(kind.name for kind in KINDS.values())
        raise ValueError(f"JAXDIST_MACHINE={asked!r}: there is no such kind of device; valid: {names}")
    numbers: dict[str, Any] = {}
    for field, _, value in (one.partition("=") for one in others):
        number = None
        with contextlib.suppress(ValueError):
            number = numbers[field] = float(value)
        if (
            number is None
            or field not in (*_KEPT, *_TIMES_LOST)
            or not (_LEAST < number < _MOST or (number == 0 and field in _TIMES_LOST))
        ):
            names = ", ".join(dict.fromkeys((*_KEPT, *_TIMES_LOST)))
            raise ValueError(f"JAXDIST_MACHINE={asked!r}: after the kind, expected NAME=NUMBER with a name of {names}")
    target = "" if platform == "cpu" else KINDS["h100"].target
    kind = VIRTUAL.kind if name.lower() == "cpu" else KINDS[name.lower()]
    return dataclasses.replace(kind, target=target, **numbers)


def remembered() -> dict[str, Kind]:
    """What jobs of this user have measured, by `key_of`."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError, RecursionError):
        if (path := _file()).is_file():
            found = json.loads(path.read_text())
            return {key: dataclasses.replace(KINDS["cpu"], **one) for key, one in found.items() if _is_whole(one)}
    return {}


def remember(key: str, kind: Kind) -> None:
    """Keep what was measured, where that is possible."""
    found = {**remembered(), key: kind}
    text = json.dumps({k: {name: getattr(one, name) for name in _KEPT} for k, one in found.items()}, indent=1)
    with contextlib.suppress(OSError, RuntimeError):
        path = _file()
        own = path.with_name(f"{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(text)
        own.replace(path)


def this_host() -> str:
    """What a rank's numbers depend on, of its host."""
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    return f"{socket.gethostname()}, {os.uname().machine}, {cores}, jax {jax.__version__}"


def key_of(root: str, hosts: tuple[str, ...], communicator: str) -> str:
    """What a job's numbers depend on."""
    several = f" on {' '.join(dict.fromkeys(hosts))}" if len(set(hosts)) > 1 else ""
    return f"{len(hosts)} ranks{several}, {communicator}, root: {root}"


def measure(mesh: Mesh, hosts: tuple[str, ...], communicator: str) -> Kind:
    """A job's kind of device; all ranks call it together."""
    kind = dataclasses.replace(VIRTUAL.kind, **_computed())
    each = in_host(hosts)
    if not each:
        seconds, rate = _sent(mesh, AXIS, communicator)
        names = ("latency", "link") if len(set(hosts)) == 1 else ("network_latency", "network")
        return dataclasses.replace(kind, **{names[0]: seconds, names[1]: rate})
    over = in_groups(mesh, len(hosts) // each)
    latency, link = _sent(over, AXIS, communicator)
    network_latency, network = _sent(over, GROUP, communicator)
    return dataclasses.replace(kind, latency=latency, link=link, network_latency=network_latency, network=network)


def _computed() -> dict[str, float]:
    """FLOPs, and bytes that are read and written, in a second."""
    square, row = np.ones((_SIDE, _SIDE), np.float32), np.ones(_TOUCHED, np.float32)
    product = _usual(lambda: jnp.matmul(square, square))
    touched = _usual(lambda: np.multiply(row, 2.0))
    return {"flops": _rounded(2 * _SIDE**3 / product / REACHED), "bandwidth": _rounded(row.nbytes / touched)}


def _sent(mesh: Mesh, axis: str, communicator: str) -> tuple[float, float]:
    """Seconds that a small all-reduce along an axis takes, and the bytes a second of a large one."""
    cut, devices = PartitionSpec(mesh.axis_names), mesh.shape[axis]

    def run(entries: int, times: int) -> Callable[[], Any]:
        def reduce(x: Any) -> Any:
            for _ in range(times):
                x = all_reduce_p.bind(x, axes=(axis,), wire=None) / devices
            return x

        def local(x: Any) -> Any:
            closed = jax.make_jaxpr(reduce, axis_env=bound(axes_of_mesh(mesh)))(x)
            return lowering(communicator, mesh).run(closed, x)[0]

        own = np.ones(entries, np.float32)
        given = jax.make_array_from_process_local_data(NamedSharding(mesh, cut), own)
        program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
        ids = tuple(device.id for device in mesh.devices.flat)
        gloo.quietly((ids, axis) if len(mesh.shape) > 1 else ids, lambda: program(given))
        return lambda: program(given)

    small, large = _usual(run(1, _CHAIN)) / _CHAIN, _usual(run(_LARGE, 1))
    link = Machine(VIRTUAL.kind).link(axes_of_mesh(mesh)[mesh.axis_names.index(axis)])
    return _rounded(small), _rounded(link.sent("all-reduce", 4 * _LARGE) / max(large - small, small))


def _usual(run: Callable[[], Any]) -> float:
    """The seconds that a run takes: the median of a few, for a step waits for messages as they usually are."""
    jax.block_until_ready(run())
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _is_whole(entry: Any) -> bool:
    """Whether a file's entry is one that `remember` has written."""
    if not isinstance(entry, dict) or entry.keys() != set(_KEPT):
        return False
    return all(type(n) in (int, float) and _LEAST < n < _MOST for n in entry.values())


def _rounded(number: float) -> float:
    return 2.0 ** round(math.log2(number))


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxdist" / _NAME
