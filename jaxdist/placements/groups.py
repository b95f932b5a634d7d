"""Groups of devices that share what `jaxdist.zero` keeps in shards: all, those of a host, or so many in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxdist.ir.interpreter import equations
from jaxdist.ir.primitives import shard_p
from jaxdist.mesh import on_each_host

Within = int | str | None
"""Which devices share a leaf: None: all; ``"host"``: those of a host; a number: so many in a row."""

HOST = "host"


def check_within(within: Any) -> None:
    """Refuse what is no `Within`."""
    if within is None or within == HOST or (type(within) is int and within > 0):
        return
    raise ValueError(
        f"within={within!r}: None (all devices share a leaf), 'host' (those of each host) or a number of devices"
    )


def group(closed: ClosedJaxpr, hosts: Sequence[Any]) -> int:
    """How many devices in a row share what a step keeps in shards; 0: all."""
    sizes = {_size(within, hosts) for within in asked(closed, "within")}
    if len(sizes) > 1:
        raise ValueError(
            f"the step keeps leaves in shards within groups of {' and of '.join(map(str, sorted(sizes)))} devices: "
            "one step has groups of one size. Give each jaxdist.zero and jaxdist.shard in it the same `within`"
        )
    found = sizes.pop() if sizes else 0
    return 0 if found == len(hosts) else found


def _size(within: Within, hosts: Sequence[Any]) -> int:
    n = len(hosts)
    if within is None or n == 1:
        return n
    if within == HOST:
        if not (size := on_each_host(hosts)):
            raise ValueError(
                f"within='host' needs as many devices on each host, their ranks in a row; the hosts of the {n} devices "
                f"are {', '.join(map(str, hosts[:16]))}{', ...' if n > 16 else ''}. Start as many processes on each "
                "host, one host after the other"
            )
        return size
    assert isinstance(within, int)
    if n % within:
        raise ValueError(f"within={within}: groups of {within} devices don't divide the {n} devices of the job")
    return within


def asked(closed: ClosedJaxpr, what: str) -> set[Any]:
    """What the marks of a step say of one of their parameters."""
    marks = (eqn.params for eqn in equations(closed.jaxpr) if eqn.primitive is shard_p)
    return {params[what] for params in marks if params["level"]}
