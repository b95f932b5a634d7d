"""`fit` takes the best of what `plan` says of each level and each kind of groups."""

from __future__ import annotations

import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import pytest
from harness.steps import train_step
from jax import lax

import jaxdist
from jaxdist.machine import KINDS, REACHED
from jaxdist.planning import candidates
from jaxdist.planning import elsewhere as planning
from jaxdist.planning.report import LevelPlan
from jaxdist.planning.schedule import Collective
from jaxdist.planning.topology import Topology

ADAM = optax.adam(1e-3)
WIDTH, LAYERS, ROWS = 32, 3, 1 << 14
"""So many rows that no step is small."""
EIGHT = Topology.parse("2x4xcpu")


def loss_fn(p: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
    return jnp.mean((x @ p["odd"]) ** 2)


def case(tx: optax.GradientTransformation, rows: int = ROWS) -> tuple[Any, ...]:
    """A step and the types of its arguments."""

    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "odd": (WIDTH, 13)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    step = jaxdist.data_parallel(train_step(loss_fn, tx))
    return step, params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def of_memory(size: int) -> Topology:
    return Topology(2, 4, dataclasses.replace(EIGHT.kind, memory=size))


def seconds(one: LevelPlan, kind: Any) -> float:
    """Nothing is hidden."""
    kept = sum(one.bytes.get(name, 0) for name in ("parameters", "optimizer state", "other state"))
    return one.flops / (REACHED * kind.flops) + 2 * kept / kind.bandwidth + one.total.seconds


@functools.cache
def sweep() -> list[LevelPlan]:
    """Each of them, planned as it is written."""
    written = [(0, None), *((level, within) for level in (1, 2, 3) for within in (None, "host"))]
    return [
        jaxdist.plan(*case(jaxdist.zero(ADAM, cast(Any, level), within)), topology=EIGHT, levels=()).own
        for level, within in written
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("fits", "written"), [(7, (0, None)), (4, (1, "host")), (1, (3, None))])
def test_the_best_of_a_sweep(fits: int, written: tuple[Any, Any], compiled: list[Any]) -> None:
    """Whichever of them the step is written with, and however many fit."""
    memory = sorted(one.peak for one in sweep())[fits - 1]
    compiled.clear()
    found = jaxdist.fit(*case(jaxdist.zero(ADAM, *written)), topology=of_memory(memory))
    assert len(compiled) <= 7
    assert [(one.row.level, one.row.within) for one in found.candidates] == [(one.level, one.within) for one in sweep()]
    assert [(one.row.level, one.row.within) for one in found.candidates if one.row.own] == [written]
    for one, expected in zip(found.candidates, sweep(), strict=True):
        assert (one.row.peak, one.row.traffic, one.row.flops) == (expected.peak, expected.traffic, expected.flops)
        assert one.seconds == pytest.approx(seconds(expected, EIGHT.kind))
        assert one.row.fits == (expected.peak <= memory)
    best = min((one for one in sweep() if one.peak <= memory), key=lambda one: (seconds(one, EIGHT.kind), one.peak))
    assert found.chosen is not None
    assert (found.chosen.row.level, found.chosen.row.within) == (best.level, best.within)


def test_why_and_the_line_of_code() -> None:
    """Level 0 is faster, and too large."""
    at = jaxdist.fit(*case(jaxdist.zero(ADAM, 1)), topology=EIGHT, levels=(0, 1))
    zero, *others = at.candidates
    assert at.chosen is zero
    assert at.why == "level 0 fits, and none takes less time"
    memory = max(one.row.peak for one in others)
    found = jaxdist.fit(*case(jaxdist.zero(ADAM, 1)), topology=of_memory(memory), levels=(0, 1))
    assert found.chosen is not None
    assert found.chosen.code == 'tx = jaxdist.zero(tx, level=1, within="host")'
    assert found.why.startswith("level 1 within host takes the least time of those that fit")
    assert "too large: level 0 (" in found.why
    said, text = json.loads(found.to_json()), str(found)
    assert said["code"] == found.chosen.code
    assert said["candidates"][said["chosen"]]["within"] == "host"
    assert [one["missing"] for one in said["candidates"]] == [zero.row.peak - memory, 0, 0]
    for one, candidate in zip(said["candidates"], found.candidates, strict=True):
        assert one["seconds"] == candidate.seconds
        parts = one["compute"] + one["state"] + one["in_host"] + one["between"] - one["hidden"]
        assert parts == pytest.approx(one["seconds"])
        assert one["in_host"] + one["between"] == pytest.approx(one["traffic"][-1]["seconds"])
    for word in ("between hosts", "lacks", "this step", "40% of the 0.25", "jax.checkpoint"):
        assert word in text
    assert f"chosen: {found.chosen.code}" in text


def test_nothing_fits() -> None:
    found = jaxdist.fit(*case(jaxdist.zero(ADAM, 0)), topology=of_memory(1000), levels=(3,))
    assert found.chosen is None
    assert found.why.startswith("nothing fits: level 3 comes nearest, and ")
    for word in ("missing on each device", "more devices", "value_and_grad(..., microbatches=k)", "jax.checkpoint"):
        assert word in found.why
    said = json.loads(found.to_json())
    assert (said["chosen"], said["code"]) == (None, None)
    assert all(one["missing"] == one["peak"] - 1000 for one in said["candidates"])
    assert "chosen" not in str(found)
    assert "jaxdist.zero around the optimizer" in jaxdist.fit(*case(ADAM), topology=of_memory(1000)).why


def test_a_larger_share_of_the_memory_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1e-6")
    monkeypatch.setattr(planning.compat, "gpus_elsewhere", lambda *_: (_ for _ in ()).throw(ImportError("none here")))
    found = jaxdist.fit(*case(ADAM, 1 << 14), topology="2xH100")
    assert found.chosen is None
    assert "a larger XLA_PYTHON_CLIENT_MEM_FRACTION (it fits with 0.00 of the memory)" in found.why


def test_without_zero_there_is_one() -> None:
    found = jaxdist.fit(*case(ADAM), topology="4xcpu")
    assert [(one.row.level, one.row.own) for one in found.candidates] == [(None, True)]
    assert found.chosen is found.candidates[0]
    assert found.chosen is not None
    assert found.chosen.code == ""
    assert "nothing to choose from" in found.why
    assert "chosen: the step as it is written" in str(found)
    assert "in host" not in str(found)


def test_groups_of_the_steps_own() -> None:
    found = jaxdist.fit(*case(jaxdist.zero(ADAM, 3, within=2)), topology=EIGHT, levels=(3,))
    assert [(one.row.within, one.row.own) for one in found.candidates] == [(None, False), (2, True), ("host", False)]
    peaks = [one.row.peak for one in found.candidates]
    assert peaks[0] < peaks[2] < peaks[1]
    assert found.candidates[1].code == "tx = jaxdist.zero(tx, level=3, within=2)"


def test_flops_are_those_of_a_device() -> None:
    def of(topology: str) -> int:
        return jaxdist.fit(*case(ADAM, 1024), topology=topology).candidates[0].row.flops

    products = 3 * 2 * 1024 * WIDTH * (LAYERS * WIDTH + 13) - 2 * 1024 * WIDTH * WIDTH  # the batch has no gradient
    assert products < of("1xcpu") < 1.2 * products
    assert products < 4 * of("4xcpu") < 1.4 * products  # each device updates all of the state


def test_what_is_hidden() -> None:
    """Not more than there is to compute, and only what the schedule overlaps."""
    kind = KINDS["h100"]
    there = cast(Any, SimpleNamespace(topology=Topology(2, 2, kind), compiled_for="cuda"))

    def candidate(flops: float, *overlapped: bool) -> Any:
        groups = (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        sent = tuple(Collective("all-reduce", "f32", 10**9, g, 1, o) for g, o in zip(groups, overlapped, strict=True))
        row = LevelPlan(1, True, {"parameters": 10**9}, 0, True, (), sent, 0, None, int(flops * kind.flops * REACHED))
        return candidates.candidate(row, there)

    one = candidate(1, True, False)
    in_host, between = 1e9 / kind.link + kind.latency, 1e9 / kind.network + kind.network_latency
    assert (one.in_host, one.between) == pytest.approx((in_host, between))
    assert one.hidden == pytest.approx(in_host)
    assert one.seconds == pytest.approx(1 + 2e9 / kind.bandwidth + between)
    assert candidate(1e-3, True, True).hidden == pytest.approx(1e-3)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"decorated with jaxdist\.data_parallel"):
        jaxdist.fit(lambda x: x, 1, topology="8xcpu")
    with pytest.raises(ValueError, match="no ZeRO level 4"):
        jaxdist.fit(*case(ADAM), topology="8xcpu", levels=(4,))


def test_state_in_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ImportError("no plugin")

    monkeypatch.setattr("jaxdist.compat.gpus_elsewhere", missing)
    kept, away = (
        jaxdist.fit(*case(jaxdist.zero(ADAM, 1, offload=offload)), topology="4xH100", levels=(0, 1)).candidates
        for offload in (False, True)
    )
    assert away[1].code == "tx = jaxdist.zero(tx, level=1, offload=True)"
    assert away[1].row.peak < kept[1].row.peak
    pcie = 2 * away[1].row.host / 64e9
    assert pcie / 2 < away[1].state - kept[1].state < pcie  # it is not read from the device
    assert away[0].seconds == kept[0].seconds
