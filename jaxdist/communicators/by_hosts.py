"""Collectives over hosts with several devices each: what is large crosses each link between hosts once.

Gloo knows nothing of hosts, and Open MPI's usual algorithms do not heed them. What is large is added up within each
host first, then the slices between hosts; or it is gathered between hosts first, then within each.

Reference: Jia et al., *Highly Scalable Deep Learning Training System with Mixed-Precision*, arXiv 1807.11205, section
3.2 (hierarchical all-reduce).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive

from jaxdist.communicators import exchange
from jaxdist.ir.interpreter import Rule
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, joined, reduce_shard_p, slices
from jaxdist.machine import Machine
from jaxdist.mesh import in_hosts_and_across


def large(machine: Machine, devices: int, in_host: int) -> int:
    """Bytes from which less between hosts is worth two more messages within them.

    At once each device sends a part of what it has to each other one, and all of a host share its network; by hosts
    that is a part as large for each of the other hosts.
    """
    hosts = devices // in_host
    kind = machine.kind
    saved = 2 * (hosts - 1) / hosts * (in_host - 1) / (in_host * kind.network)
    more = 2 * (in_host - 1) / in_host / kind.link
    return round(2 * kind.latency / (saved - more)) if saved > more else sys.maxsize


@dataclass(frozen=True)
class ByHosts:
    """The collectives of a step, of what is large in two parts."""

    devices: int  # among which they take place
    # ``(parts, groups) -> parts``, within groups of devices (None: all of them): row i from device i
    all_to_all: Callable[..., Any]
    all_gather: Callable[..., Any]  # ``(part, groups) -> parts``
    sum: Callable[..., Any]  # ``(x, wire, groups) -> x``, `wire` as of `exchange.all_reduce`; None: the dtype of `x`
    in_host: int  # how many devices in a row are on one host; 0: that is no matter
    large: int  # bytes from which it matters

    def all_reduce(self, x: Any, wire: str | None) -> Any:
        """The sum of `x` over the devices."""
        if not x.size:
            return jnp.zeros(x.shape, x.dtype)
        if self._at_once(x.nbytes):
            return self.sum(x, wire, None)
        host, hosts = in_hosts_and_across(self.devices, self.in_host)
        to_all = functools.partial(self.all_to_all, groups=host)
        part = exchange.reduce_scatter(x.reshape(-1), 0, wire, self.in_host, to_all)
        part = self.sum(part, wire, hosts)
        whole = self.all_gather(part.astype(wire or x.dtype), host).reshape(-1)
        return whole[: x.size].reshape(x.shape).astype(x.dtype)

    def reduce_scatter(self, x: Any, dim: int, wire: str | None) -> Any:
        """This device's slice along `dim` of the sum of `x` over the devices."""
        if self._at_once(x.nbytes):
            return exchange.reduce_scatter(x, dim, wire, self.devices, functools.partial(self.all_to_all, groups=None))
        parts = slices(x, dim, self.devices)
        parts = parts.reshape(-1, self.in_host, *parts.shape[1:]).swapaxes(0, 1)  # [in a host, hosts, ...]
        for one in in_hosts_and_across(self.devices, self.in_host):
            to_all = functools.partial(self.all_to_all, groups=one)
            parts = exchange.added_up(parts, wire or x.dtype, to_all)
        return parts.astype(x.dtype)

    def gather(self, x: Any, dim: int, size: int) -> Any:
        """The slices `x` of all devices along `dim`, without the padding: `size` entries."""
        if self._at_once(x.nbytes * self.devices):
            return joined(self.all_gather(x, None), dim, size)
        host, hosts = in_hosts_and_across(self.devices, self.in_host)
        parts = self.all_gather(self.all_gather(x, hosts), host)  # [in a host, hosts, ...]
        return joined(parts.swapaxes(0, 1).reshape(self.devices, *x.shape), dim, size)

    def _at_once(self, nbytes: int) -> bool:
        return not self.in_host or nbytes < self.large


def rules(among: Callable[[JaxprEqn], ByHosts]) -> dict[Primitive, Rule]:
    """Those (see `ir.interpreter`) of the collectives that placements emit; `among`: the devices of each."""
    return {
        all_reduce_p: lambda _, eqn, x: among(eqn).all_reduce(x, eqn.params["wire"]),
        reduce_shard_p: lambda _, eqn, x: among(eqn).reduce_scatter(x, eqn.params["dim"], eqn.params["wire"]),
        gather_shards_p: lambda _, eqn, x: among(eqn).gather(x, eqn.params["dim"], eqn.params["size"]),
    }
