"""The network that joins the hosts of a job, among those that this machine is on."""

import ipaddress
import socket
from collections.abc import Sequence

from jaxdist.control.rendezvous import interfaces
from jaxdist.launch.hosts import Host


def shared_network(hosts: Sequence[Host]) -> str | None:
    """The IPv4 network of this machine on which all other hosts are, such as "10.0.0.0/24"; None if there is no such.

    Open MPI uses every card that is up, and waits for ever for an answer from one that only looks the same on both
    sides: Docker's bridge is 172.17.0.1 on every host.
    """
    own = [interface.network for interface in interfaces()]
    shared: set[ipaddress.IPv4Network] = set()
    for host in hosts:
        if host.local:
            continue
        try:
            address = ipaddress.IPv4Address(socket.gethostbyname(host.name))
        except OSError:
            return None
        # The longest prefix is the one that routing takes.
        reached = [network for network in own if address in network]
        if not reached:
            return None  # behind a router
        shared.add(max(reached, key=lambda network: network.prefixlen))
    return str(shared.pop()) if len(shared) == 1 else None
