"""The network that joins the hosts of a job, among those that this machine is on."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

from jaxdist.launch.hosts import Host

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


def shared_network(hosts: Sequence[Host]) -> str | None:
    """The IPv4 network of this machine on which all other hosts are, such as "10.0.0.0/24"; None if there is no such.

    Open MPI uses every card that is up, and waits for ever for an answer from one that only looks the same on both
    sides: Docker's bridge is 172.17.0.1 on every host.
    """
    own = _own_networks()
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


def _own_networks() -> list[ipaddress.IPv4Network]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(probe, ask, struct.pack("256s", name.encode()[:15]))[20:24])
                    for ask in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:
                continue  # an interface without an IPv4 address
            found.append(ipaddress.IPv4Network(f"{address}/{mask}", strict=False))
    return found
