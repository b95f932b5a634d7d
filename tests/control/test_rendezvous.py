"""Where rank 0 listens: on one host at the loopback address alone (a job's other sockets: runtime/test_context.py)."""

from __future__ import annotations

import socket

import pytest

from jaxdist.control import rendezvous


@pytest.mark.parametrize(
    ("host", "address"),
    [("localhost", "127.0.0.1"), ("127.0.1.1", "127.0.0.1"), ("::1", "::1"), ("own", "own"), ("node1", "all")],
)
def test_where_rank_0_listens(host, address):
    own = next(iter(rendezvous.interface_addresses()), None)
    if host == "own":
        if own is None:
            pytest.skip("no interface beside loopback: not checked")
        host = address = own
    try:
        server = rendezvous.bind(host, [0])
    except OSError:
        assert host == "::1"
        pytest.skip("no IPv6 on this host: not checked")
    with server:
        assert server.getsockname()[0] in (["::", "0.0.0.0"] if address == "all" else [address])
        for candidate in {address, "127.0.0.1"} if address == "all" else {address}:
            if candidate != "all":
                socket.create_connection((candidate, server.getsockname()[1])).close()
