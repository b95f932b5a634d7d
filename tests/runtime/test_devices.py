"""Which GPU and how many threads each process takes, from what the processes of a host see."""

from __future__ import annotations

import pytest

from jaxdist.runtime.devices import Resources, choose_gpu, fair_threads, wanted_platform


def test_which_gpu():
    shared = [Resources(h, (0,), ("u0", "u1"), "gpu") for h in "aabb"]
    assert [choose_gpu(shared, r) for r in range(4)] == [0, 1, 0, 1]
    each_its_own = [Resources("a", (0,), (u,), "gpu") for u in ("u0", "u1", "u2")]
    assert [choose_gpu(each_its_own, r) for r in range(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match=r"3 processes on host a, but 2 visible GPUs.*-np 2"):
        choose_gpu([Resources("a", (0,), ("u0", "u1"), "gpu")] * 3, 2)


def test_threads_share_the_cores_that_processes_share():
    def threads(*cores: tuple[int, ...]) -> list[int]:
        hosts = [Resources("a", c, (), "cpu") for c in cores]
        return [fair_threads(hosts, r) for r in range(len(hosts))]

    everything = tuple(range(8))
    assert threads(everything) == [8]
    assert threads(everything, everything) == [4, 4]
    assert threads(*[everything] * 3) == [2, 2, 2]
    assert threads(*[(0, 1)] * 8) == [1] * 8
    assert threads((0, 1, 2, 3), (4, 5, 6, 7)) == [4, 4]  # bound by the launcher


def test_platform_without_starting_a_backend():
    asked = [("cpu", ["u0"]), ("cuda,cpu", []), (None, []), ("", [])]
    assert [wanted_platform(*one) for one in asked] == ["cpu", "gpu", "cpu", "cpu"]
