"""Processes that know the root's address: tcp://host:port, and env:// as torchrun sets it."""

import os
from collections.abc import Mapping, Sequence

from jaxdist.connectors.base import Found, local_position, need, read_int
from jaxdist.control.channel import Control

_ALONE = ("RANK", "WORLD_SIZE")  # all that a process alone needs
_BY_HAND = (
    "Start each process with all of them, for example RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500; "
    "pass jaxdist.init('tcp://host:port', rank=..., size=...); or use `jaxdist run -n N`, torchrun or mpirun"
)


def over(
    addresses: Sequence[tuple[str, int]], name: str, rank: int, size: int, timeout: float, key: bytes | None = None
) -> Found:
    """Rank 0 listens at one of some addresses, the others come there."""
    control = Control(rank, size, addresses, timeout=timeout, key=key)
    local = local_position([member.host for member in control.members], rank)
    return Found(name, rank, size, *local, control.broadcast, control)


def connect(
    spec: str,
    timeout: float = 300.0,
    *,
    rank: int | None = None,
    size: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Found:
    """env://, with torchrun's variables; or tcp://host:port, which stands for two of them as `rank` and `size` do."""
    env = {**os.environ, **(env or {})}
    by_url = spec.startswith("tcp://")
    if by_url:
        host, _, port = spec.removeprefix("tcp://").rstrip("/").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"connector {spec!r}: expected tcp://host:port, e.g. tcp://10.0.0.1:29500")
        env |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is not None:
            env[name] = str(value)
    alone = env.get("WORLD_SIZE") == "1"
    need(env, _ALONE if alone else (*_ALONE, "MASTER_ADDR", "MASTER_PORT"), spec, _BY_HAND)
    size = read_int(env, "WORLD_SIZE", 1)
    rank = read_int(env, "RANK", 0, size - 1)
    if alone:
        return over([], spec if by_url else "env", 0, 1, timeout)
    port = read_int(env, "MASTER_PORT", 1, 65535)
    if by_url:
        return over([(env["MASTER_ADDR"], port)], spec, rank, size, timeout)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store already listens on MASTER_PORT, in the agent process
    # torchrun calls its own host by name. Where all are on one host, nobody else has to come.
    host = "127.0.0.1" if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"] else env["MASTER_ADDR"]
    return over([(host, port)], "env", rank, size, timeout)
