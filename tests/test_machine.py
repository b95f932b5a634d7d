"""`jaxdist.machine`: links of axes, seconds, and what depends on them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxdist.communicators.by_hosts import large
from jaxdist.machine import KINDS, VIRTUAL, Link, Machine, kind_of, ring_factor
from jaxdist.mesh import Axis, in_groups

H100 = KINDS["h100"]


def mesh(**sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


def test_an_axis_has_its_slowest_link() -> None:
    """Eight devices on two hosts: the inner axis stays within them."""
    machine = Machine(H100, (0,) * 4 + (1,) * 4).over(mesh(data=2, model=4))
    within, between = machine.link(Axis("model", 4)), machine.link(Axis("data", 2))
    assert (within.bandwidth, within.latency) == (H100.link, H100.latency)
    assert (between.bandwidth, between.latency) == (H100.network, H100.network_latency)
    turned = Machine(H100, (0,) * 4 + (1,) * 4).over(mesh(model=4, data=2))
    assert turned.link(Axis("data", 2)).bandwidth == H100.link
    assert turned.link(Axis("model", 4)).bandwidth == 2 * H100.network  # two rings leave each host


def test_a_ring_through_whole_hosts_has_all_their_adapters() -> None:
    link = Machine(H100, (0,) * 4 + (1,) * 4).over(mesh(data=8)).link(Axis("data", 8))
    assert link.bandwidth == 4 * H100.network


def test_groups_are_far_from_each_other() -> None:
    machine = Machine(H100).over(in_groups(mesh(data=8), 2))
    assert machine.link(Axis("group", 2)).bandwidth == H100.network
    assert machine.link(Axis("data", 4)).bandwidth == H100.link


@given(st.integers(1, 64), st.integers(0, 1 << 30))
def test_what_a_ring_sends(devices: int, nbytes: int) -> None:
    link = Link(devices, 1e9, 1e-5, 1e-5)
    assert link.sent("all-reduce", nbytes) == 2 * link.sent("all-gather", nbytes)
    assert link.sent("reduce-scatter", nbytes) == link.sent("all-gather", nbytes) <= nbytes
    assert link.sent("all-to-all", nbytes) == link.sent("all-gather", nbytes) / devices
    assert link.seconds("all-gather", nbytes) == link.sent("all-gather", nbytes) / 1e9
    assert ring_factor("all-gather", 1) == 0


@pytest.mark.parametrize("name", sorted(KINDS))
def test_wider_numbers_take_longer(name: str) -> None:
    rates = [KINDS[name].rate(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float64)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[2] > 0
    assert KINDS[name].rate(jnp.int32) == rates[1] or KINDS[name].is_cpu


def test_cpus_of_one_process_are_those_of_the_table() -> None:
    assert kind_of(jax.devices()[0]) == VIRTUAL.kind


def test_from_how_many_bytes_hosts_matter() -> None:
    """A tenth of the speed between hosts: from fewer bytes. With links as fast as those within: never."""
    slow, fast = (Machine(KINDS["cpu"].of_host(8 * k)) for k in (10, 1))
    assert 0 < large(slow, 8, 4) < large(fast, 8, 4)
    same = Machine(KINDS["h100"].of_host(1))
    assert large(Machine(type(H100)("x", "x", 0, 1e9, 1e9)), 8, 4) > 1 << 40
    assert large(same, 8, 4) > 0


def test_what_is_exchanged_in_parts_takes_cpus_longer() -> None:
    """A byte of it; and a message that is waited for takes more than an empty one over MPI."""
    cpu = Machine(dataclasses.replace(KINDS["cpu"], latency=2e-6)).link(Axis("data", 2))
    gpu = Machine(KINDS["h100"]).link(Axis("data", 2))
    for kind in ("all-to-all", "reduce-scatter"):
        slower = [link.seconds(kind, 1e6) / link.sent(kind, 1e6) * link.bandwidth for link in (cpu, gpu)]
        assert slower[0] > 1.5
        assert slower[1] == pytest.approx(1)
    assert cpu.stall > 2 * cpu.latency
