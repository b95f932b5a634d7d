"""`profile`: what counts as a collective, how times are added up, and a trace of eight virtual devices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.observe.profile import kind_of, share, union


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ("psum.1 psum_invariant.19 pmax all-reduce.3.clone all-reduce-start.1 jaxdist_mpi_allreduce.4", "all_reduce"),
        ("all_gather.2 all_gather_invariant.1 all-gather-done.1 jaxdist_mpi_allgather.1", "all_gather"),
        ("reduce_scatter.1 reduce-scatter.7", "reduce_scatter"),
        ("all_to_all.1 all-to-all jaxdist_mpi_alltoall.9", "all_to_all"),
        ("ppermute.3 collective-permute-start.2 jaxdist_mpi_sendrecv", "permute"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "AllReduce"),
        ("dot.5 psum_fusion reduce.1 while.30 jaxdist_mpi_order.45 gather.2 my_all_reduce", None),
    ],
)
def test_kinds(names: str, kind: str | None) -> None:
    assert {kind_of(name) for name in names.split()} == {kind}


def test_a_loop_and_what_is_in_it_count_once() -> None:
    assert union([]) == 0
    assert union([(0, 10), (1, 2), (3, 4), (9, 12), (20, 21)]) == 13


def test_a_step_on_virtual_devices(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        total = jnp.tanh(batch @ w).sum(0)
        return w + 1e-3 * total, {"mean": total.mean()}

    w, batch = jnp.ones((64, 64), jnp.float32), np.ones((16, 64), np.float32)
    w, _ = step(w, batch)
    with jaxdist.profile(tmp_path):
        for _ in range(3):
            w, _ = step(w, batch)
    (trace,) = (tmp_path / "rank0").glob("plugins/profile/*/*.xplane.pb")
    found = share(trace)
    assert set(found.kinds) == {"all_reduce"}
    assert found.kinds["all_reduce"] >= 3 * 8
    assert 0 < found.share < 1
    said = re.search(r"([\d.]+)% of the devices' busy time is in collectives", capfd.readouterr().err)
    assert said
    assert float(said[1]) == pytest.approx(100 * found.share, abs=0.06)


def test_nothing_ran(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with jaxdist.profile(tmp_path):
        pass
    assert "no device ran anything" in capfd.readouterr().err


def test_an_error_inside_ends_the_trace(tmp_path: Path) -> None:
    for _ in range(2):  # the second would be "already started"
        with pytest.raises(KeyError), jaxdist.profile(tmp_path):
            raise KeyError


def test_a_folder_that_can_t_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = r"traces can't be written there: Not a directory: '.*file/trace'"
    with pytest.raises(OSError, match=said), jaxdist.profile(tmp_path / "file" / "trace"):
        pass
