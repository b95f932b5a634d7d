"""The channel beside the training of a job."""

from __future__ import annotations

import secrets
import socket

from jaxdist.connectors import Connector
from jaxdist.control import rendezvous
from jaxdist.control.channel import Control


def control_of(connector: Connector, timeout: float) -> Control:
    """The connector's own control channel, else a new one on a free port of the root."""
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
        ips = [] if one_host else rendezvous.interface_addresses()
        where = (socket.gethostname(), ips, server.getsockname()[1], secrets.token_bytes())
    host, ips, port, secret = connector.broadcast(where, 0)
    names = ["127.0.0.1"] if one_host or host == socket.gethostname() else []
    names += [] if one_host else [*ips, host]
    return Control(
        rank, size, [(name, port) for name in names], server=server,
        key=secret, timeout=timeout, abort=connector.abort,
    )  # fmt: skip
