"""Which rows each process passes, with several devices per process and several processes per host."""

import itertools
from collections import Counter

import pytest
from harness.errors import raises
from harness.loaders import devices

from jaxdist.device_map import DeviceMap, same_rows_somewhere  # private: of jobs that can't be started here
from jaxdist.mesh import mesh_of


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


JOBS = list(itertools.product(range(1, 4), range(1, 4), range(1, 4), range(1, 28), (False, True), (False, True)))


def test_each_row_is_passed_once() -> None:
    """In order, by the processes that have devices for it; or the mesh is refused."""
    refused = Counter[str]()
    for hosts, processes, each, model, is_outer, in_turn in JOBS:
        ranks, n = range(hosts * processes), hosts * processes * each
        if n % model:
            continue
        sizes = {"model": model, "data": n // model} if is_outer else {"data": n // model, "model": model}
        own = sorted(devices(len(ranks), each), key=lambda device: device.id % each if in_turn else 0)
        got = DeviceMap.of(mesh_of(sizes, own))
        parts_of = [{part for part, rank in zip(got.parts, got.processes, strict=True) if rank == r} for r in ranks]
        overlap = any(a != b and a & b for a, b in itertools.product(parts_of, parts_of))
        if overlap or any(max(parts) - min(parts) >= len(parts) for parts in parts_of):
            with raises(ValueError, f"{len(ranks)} processes" if overlap else "rank order", f"{sizes}", "'data'"):
                _ = got.shares
            refused["overlap" if overlap else "order"] += 1
            continue
        assert sorted(itertools.chain(*got.sharers)) == list(ranks)
        assert [set(got.share(rank).parts) for rank in ranks] == parts_of
        rows_of = {total: [list(range(total))[got.share(r).rows(total)] for r in ranks] for total in (0, 1, 7, 16, 54)}
        for total, rows in rows_of.items():
            assert list(itertools.chain(*(rows[ranks[0]] for ranks in got.sharers))) == list(range(total))
            assert [got.share(rank).size(total) for rank in ranks] == list(map(len, rows))
            if len(set(map(len, rows))) == 1:
                assert got.rows_of_all(len(rows[0])) == total
            for other in rows_of:
                same = total != other and any(len(a) == len(b) for a, b in zip(rows, rows_of[other], strict=True))
                assert same_rows_somewhere(got, total, other) == same
    assert min(refused["overlap"], refused["order"]) > 10


def test_processes_with_other_numbers_of_devices() -> None:
    with raises(ValueError, "{'data': 3}", "2 processes"):
        _ = DeviceMap.of(mesh_of({"data": 3}, devices(2, 2)[:3])).shares
