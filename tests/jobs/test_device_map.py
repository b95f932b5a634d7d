"""Which rows each process passes, with several devices per process and several processes per host."""

import itertools

import pytest
from harness.errors import raises
from harness.loaders import devices
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.device_map import DeviceMap, same_rows_somewhere  # private: hypothesis makes jobs that can't be started
from jaxdist.mesh import mesh_of

SEVERAL = st.integers(1, 3)


def map_of(hosts: int, processes: int, each: int, sizes: dict[str, int]) -> DeviceMap:
    own = devices(hosts * processes, each)
    return DeviceMap.of(mesh_of(sizes, own), [device.process_index // processes for device in own])


@pytest.mark.parametrize(
    ("sizes", "parts", "shares", "sharers", "hosts"),
    [
        ({"data": 8}, "01234567", ["01", "23", "45", "67"], ["0", "1", "2", "3"], "00001111"),
        ({"data": 4, "model": 2}, "00112233", ["0", "1", "2", "3"], ["0", "1", "2", "3"], "0011"),
        ({"data": 2, "model": 4}, "00001111", ["0", "0", "1", "1"], ["01", "23"], "01"),
        ({"model": 4, "data": 2}, "01010101", ["01", "01", "01", "01"], ["0123"], "00"),
        ({"model": 8}, "00000000", ["0", "0", "0", "0"], ["0123"], "0"),
    ],
)
def test_two_hosts_with_two_processes_of_two_devices(
    sizes: dict[str, int], parts: str, shares: list[str], sharers: list[str], hosts: str
) -> None:
    got, text = map_of(2, 2, 2, sizes), lambda numbers: "".join(map(str, numbers))
    assert (text(got.processes), text(got.hosts), text(got.parts)) == ("00112233", "00001111", parts)
    assert [text(got.share(rank).parts) for rank in range(4)] == shares
    assert (list(map(text, got.sharers)), text(got.hosts_of_parts)) == (sharers, hosts)
    assert [got.first_devices[rank].id for rank in range(4)] == [0, 2, 4, 6]
    assert got.share(4).rows(7) == slice(0, 0)


@given(SEVERAL, SEVERAL, SEVERAL, st.integers(1, 27), st.booleans(), st.integers(0, 60), st.integers(0, 60))
def test_each_row_is_passed_once(
    hosts: int, processes: int, each: int, model: int, is_outer: bool, total: int, other: int
) -> None:
    """In order, by the processes that have devices for it; or the mesh is refused."""
    n = hosts * processes * each
    model = max(k for k in range(1, model + 1) if n % k == 0)
    sizes = {"model": model, "data": n // model} if is_outer else {"data": n // model, "model": model}
    got = map_of(hosts, processes, each, sizes)
    parts_of = [set(got.parts[rank * each : rank * each + each]) for rank in range(hosts * processes)]
    if any(a != b and a & b for a, b in itertools.product(parts_of, parts_of)):
        with raises(ValueError, str(got.process_count), f"{dict(sizes)}", "'data'"):
            _ = got.shares
        return
    if any(max(parts) - min(parts) >= len(parts) for parts in parts_of):
        with raises(ValueError, "rank order"):
            _ = got.shares
        return
    assert [set(got.share(rank).parts) for rank in range(hosts * processes)] == parts_of
    assert sorted(itertools.chain(*got.sharers)) == list(range(got.process_count))
    rows = [list(range(total))[got.share(ranks[0]).rows(total)] for ranks in got.sharers]
    assert list(itertools.chain(*rows)) == list(range(total))
    if len(set(map(len, rows))) == 1:
        assert got.rows_of_all(len(rows[0])) == total
    same = any(share.size(total) == share.size(other) for share in got.shares.values())
    assert same_rows_somewhere(got, total, other) == (same and total != other)
