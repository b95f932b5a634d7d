"""Processes that know the root's address: tcp://host:port, and env:// as torchrun sets it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.connectors.base import ENV, local_position, need, read_int
from jaxdist.control.channel import Control
from jaxdist.control.process import leave

_BY_HAND = (
    "Start each process with all of them, for example RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
    "MASTER_PORT=29500, or use `jaxdist run -n N`, torchrun or mpirun"
)


class TcpConnector:
    """Rank 0 listens at a known address, the others come there.

    The meeting place stays open as the job's control channel (`control`).
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        rank: int,
        size: int,
        timeout: float = 300.0,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
        name: str = "tcp",
        key: bytes | None = None,
    ):
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of size {size}: expected 0 <= rank < size")
        self.name, self.rank, self.size = name, rank, size
        self.control = Control(rank, size, addresses, timeout=timeout, key=key)
        given = self.control.exchange("local", (socket.gethostname(), local_rank, local_size), timeout)
        counted = local_position([host for host, _, _ in given], rank)
        self.local_rank = counted[0] if local_rank is None else local_rank
        self.local_size = counted[1] if local_size is None else local_size
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(
                f"rank {rank}: LOCAL_RANK {self.local_rank} with {self.local_size} processes on "
                f"{socket.gethostname()}: expected 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE"
            )

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The root's picklable object, on every process."""
        return self.control.broadcast(obj, root)

    def abort(self, code: int = 1, message: str = "") -> None:
        """End the job: the others hear `message` and end too."""
        self.control.alarm(message or f"rank {self.rank} aborted the job (code {code})", code=code)
        leave(code, message)


def from_env(
    timeout: float = 300.0,
    *,
    rank: int | None = None,
    size: int | None = None,
    env: Mapping[str, str] | None = None,
) -> TcpConnector:
    """env://: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and optionally LOCAL_RANK, LOCAL_WORLD_SIZE."""
    env = {**os.environ, **(env or {})}
    if rank is not None:
        env["RANK"] = str(rank)
    if size is not None:
        env["WORLD_SIZE"] = str(size)
    alone = env.get("WORLD_SIZE") == "1"
    need(env, ENV[:2] if alone else ENV, "env://", _BY_HAND)
    size = read_int(env, "WORLD_SIZE", 1)
    rank = read_int(env, "RANK", 0, size - 1)
    local_rank = read_int(env, "LOCAL_RANK", 0, size - 1) if env.get("LOCAL_RANK") else None
    local_size = read_int(env, "LOCAL_WORLD_SIZE", 1, size) if env.get("LOCAL_WORLD_SIZE") else None
    if alone:
        return TcpConnector([], 0, 1, timeout, name="env")
    port = read_int(env, "MASTER_PORT", 1, 65535)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store already listens on MASTER_PORT, in the agent process
    # torchrun calls its own host by name. Where all are on one host, nobody else has to come.
    host = "127.0.0.1" if local_size == size else env["MASTER_ADDR"]
    return TcpConnector(
        [(host, port)], rank, size, timeout,
        local_rank=local_rank, local_size=local_size, name="env",
    )  # fmt: skip


def from_url(
    url: str,
    timeout: float = 300.0,
    *,
    rank: int | None = None,
    size: int | None = None,
) -> TcpConnector:
    """tcp://host:port, with rank and size given here or as RANK and WORLD_SIZE."""
    host, _, port = url.removeprefix("tcp://").rstrip("/").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"connector {url!r}: expected tcp://host:port, e.g. tcp://10.0.0.1:29500")
    env = os.environ
    fix = "Pass them: jaxdist.init('tcp://host:port', rank=..., size=...), or set both"
    if rank is None:
        need(env, ("RANK",) if size is not None else ("RANK", "WORLD_SIZE"), url, fix)
        rank = read_int(env, "RANK")
    if size is None:
        need(env, ("WORLD_SIZE",), url, fix)
        size = read_int(env, "WORLD_SIZE", 1)
    return TcpConnector([(host, int(port))], rank, size, timeout, name=url)
