"""Groups of devices that share sharded leaves: ``within=`` of `jaxdist.zero` and `jaxdist.shard`."""

from collections.abc import Hashable, Sequence

from jax.extend.core import ClosedJaxpr

from jaxdist.mesh import on_each_host
from jaxdist.placements.search.marks import in_marks

HOST = "host"
Within = int | str | None  # the devices that share a leaf: all (None), each host's (``"host"``), or this many in a row


def check_within(within: object) -> None:
    """Refuse an invalid `Within`."""
    if within is None or within == HOST or (type(within) is int and within > 0):
        return
    raise ValueError(f"within={within!r}: expected None (all devices), 'host' (each host's) or a number")


def group(closed: ClosedJaxpr, hosts: Sequence[Hashable]) -> int:
    """Return how many devices in a row share the sharded leaves of a step, or 0 for all."""
    sizes = {_size(within, hosts) for within in in_marks(closed, "within")}
    if len(sizes) > 1:
        raise ValueError(
            f"the step keeps leaves in shards within groups of {' and of '.join(map(str, sorted(sizes)))} devices: "
            "one step has groups of one size. Give each jaxdist.zero and jaxdist.shard in it the same `within`"
        )
    size = sizes.pop() if sizes else 0
    return 0 if size == len(hosts) else size  # a group of all is none


def _size(within: Within, hosts: Sequence[Hashable]) -> int:
    n = len(hosts)
    if within is None or n == 1:
        return n
    if within == HOST:
        if not (size := on_each_host(hosts)):
            raise ValueError(
                f"within='host' needs equal numbers of devices on all hosts, in rank order; the {n} devices are on "
                f"{', '.join(map(str, hosts[:16]))}{', ...' if n > 16 else ''}. Start the same number of processes "
                "on each host, one host after the other"
            )
        return size
    assert isinstance(within, int)
    if n % within:
        raise ValueError(f"within={within}: groups of {within} devices don't divide the {n} devices of the job")
    return within
