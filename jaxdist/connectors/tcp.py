"""Processes that know the root's address: tcp://host:port, and env:// as torchrun sets it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.connectors.base import ENV, local_position, need, read_int
from jaxdist.control.channel import Control

_BY_HAND = (
    "Start each process with all of them, for example RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500; "
    "pass jaxdist.init('tcp://host:port', rank=..., size=...); or use `jaxdist run -n N`, torchrun or mpirun"
)


class TcpConnector:
    """Rank 0 listens at a known address, the others come there; it stays open as the job's control channel."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        rank: int,
        size: int,
        timeout: float = 300.0,
        *,
        name: str = "tcp",
        key: bytes | None = None,
    ):
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of size {size}: expected 0 <= rank < size")
        self.name, self.rank, self.size = name, rank, size
        self.control = Control(rank, size, addresses, timeout=timeout, key=key)
        hosts = self.control.exchange("local", socket.gethostname(), timeout)
        self.local_rank, self.local_size = local_position(hosts, rank)

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The root's picklable object, on every process."""
        return self.control.broadcast(obj, root)


def connect(
    spec: str,
    timeout: float = 300.0,
    *,
    rank: int | None = None,
    size: int | None = None,
    env: Mapping[str, str] | None = None,
) -> TcpConnector:
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
    need(env, ENV[:2] if alone else ENV, spec, _BY_HAND)
    size = read_int(env, "WORLD_SIZE", 1)
    rank = read_int(env, "RANK", 0, size - 1)
    if alone:
        return TcpConnector([], 0, 1, timeout, name=spec if by_url else "env")
    port = read_int(env, "MASTER_PORT", 1, 65535)
    if by_url:
        return TcpConnector([(env["MASTER_ADDR"], port)], rank, size, timeout, name=spec)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store already listens on MASTER_PORT, in the agent process
    # torchrun calls its own host by name. Where all are on one host, nobody else has to come.
    host = "127.0.0.1" if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"] else env["MASTER_ADDR"]
    return TcpConnector([(host, port)], rank, size, timeout, name="env")
