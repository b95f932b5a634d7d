"""Topologies: what their texts mean, and the slowest link on a ring's way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.machine import KINDS
from jaxdist.planning.topology import Topology


@given(st.integers(1, 512), st.integers(1, 16), st.sampled_from(sorted(KINDS)))
def test_what_is_written_is_read(hosts: int, per_host: int, name: str) -> None:
    found = Topology.parse(f"{hosts}x{per_host}x{name}")
    assert (found.hosts, found.per_host, found.kind.name.lower(), found.devices) == (
        hosts, per_host, name, hosts * per_host,
    )  # fmt: skip
    assert Topology.parse(str(found)) == found


def test_one_host_and_capitals() -> None:
    assert Topology.parse("8xH100") == Topology.parse(" 1x8xh100 ")
    assert {kind.name for kind in KINDS.values()} == {"A100-40", "A100-80", "H100", "H200", "B200", "cpu"}


@pytest.mark.parametrize("text", ["", "8", "H100", "8 H100", "x8xH100", "1x2x3xH100", "-1xH100"])
def test_what_is_no_topology(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected DEVICESxKIND or HOSTSxDEVICESxKIND.*A100-40.*cpu"):
        Topology.parse(text)


def test_what_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"no kind 'v100'; valid: A100-40, A100-80, H100, H200, B200, cpu"):
        Topology.parse("8xV100")
    with pytest.raises(ValueError, match="at least one"):
        Topology.parse("0x8xH100")


def test_the_slowest_link() -> None:
    one, eight = Topology.parse("8xH100"), Topology.parse("8x8xH100")
    assert one.machine.speed([range(8)]) == (450e9, one.kind.latency)
    # Eight rings, each through an adapter of its own; then one; then none.
    assert eight.machine.speed([range(64)]) == (400e9, eight.kind.network_latency)
    assert eight.machine.speed([range(0, 64, 8)])[0] == 50e9
    assert eight.machine.speed([range(8), range(8, 16)])[0] == 450e9
    assert "400 GB/s" in eight.links


def test_cpus_share_their_host() -> None:
    two, four = Topology.parse("2xcpu"), Topology.parse("3x4xcpu")
    assert two.kind.memory == pytest.approx(2 * four.kind.memory, abs=2)
    assert two.kind.network == 2 * four.kind.network
