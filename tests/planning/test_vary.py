"""`fit(make, vary=...)` finds with few compilations what a sweep that compiles everything finds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import pytest
from harness.steps import train_step
from jax import lax

import jaxdist
from jaxdist.planning import candidates as searching
from jaxdist.planning.candidates import Candidate
from jaxdist.planning.topology import KINDS, Topology
from jaxdist.step.forecast import Forecast

ADAM = optax.adam(1e-3)
SMALL_GPU = dataclasses.replace(KINDS["h100"], name="cpu", target="")  # compiled without JAX's compiler for GPUs
ONE_HOST, TWO_HOSTS = Topology(1, 8, SMALL_GPU), Topology.parse("2x4xcpu")


def loss_fn(remat: bool, p: Any, x: Any) -> Any:
    """Layers one by one, and in a loop."""
    layer = (jax.checkpoint if remat else lambda f: f)(lambda x, w: (jnp.tanh(x @ w), None))
    x, _ = lax.scan(layer, layer(x, p["in"])[0], p["layers"])
    return jnp.mean(layer(x, p["out"])[0] ** 2)


def mlp(microbatches: int = 1, remat: bool = False, rows: int = 8192) -> tuple[Any, ...]:
    params = {"in": of((64, 128)), "layers": of((2, 128, 128)), "out": of((128, 24))}
    tx = jaxdist.zero(ADAM, 1)
    loss = functools.partial(loss_fn, remat)
    step = jaxdist.data_parallel(train_step(loss, tx, jaxdist.value_and_grad, microbatches=microbatches))
    return step, params, jax.eval_shape(tx.init, params), of((rows, 64))


def of(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def with_memory(topology: Topology, size: int) -> Topology:
    return dataclasses.replace(topology, kind=dataclasses.replace(topology.kind, memory=size))


@pytest.fixture
def emitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier `fit` has emitted of a step."""
    original, known = Forecast.ahead, dict[Any, Any]()

    def once(self: Any, *which: Any) -> Any:
        key = (self._settings.step, *which)
        if key not in known:
            known[key] = original(self, *which)
        return known[key]

    monkeypatch.setattr(Forecast, "ahead", once)


VARY = {"microbatches": [1, 4], "remat": [False, True]}


@pytest.mark.slow
@pytest.mark.usefixtures("emitted_once")
@pytest.mark.parametrize("topology", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])
def test_as_good_as_a_sweep(topology: Topology, compiled: list[Any]) -> None:
    """However much memory there is."""
    make = functools.cache(mlp)
    sweep: list[tuple[dict[str, Any], Candidate]] = []
    for values in itertools.product(*VARY.values()):
        choice = dict(zip(VARY, values, strict=True))
        found = jaxdist.fit(*make(**choice), topology=with_memory(topology, 1 << 40))
        sweep += [(choice, one) for one in found.candidates]
    peaks = sorted({one.row.peak for _, one in sweep})
    best_of, counts = set(), []
    for memory in [peaks[0] - 1, *peaks[::2]]:
        compiled.clear()
        found = jaxdist.fit(make, topology=with_memory(topology, memory), vary=VARY)
        counts.append(len(compiled))
        assert len(found.candidates) == len(sweep)
        for (choice, expected), one in zip(sweep, found.candidates, strict=True):
            assert (one.choice, one.row.level, one.row.within) == (choice, expected.row.level, expected.row.within)
            if one.compiled:
                assert (one.row.peak, one.seconds) == (expected.row.peak, expected.seconds)
                assert one.fits == (expected.row.peak <= memory)
            else:
                assert one.row.peak <= expected.row.peak
                assert one.seconds <= expected.seconds * (1 + 1e-9)
                assert one.fits is None or expected.row.peak > memory
        fitting = [(choice, one) for choice, one in sweep if one.row.peak <= memory]
        if not fitting:
            assert found.chosen is None
            assert found.why.startswith("nothing fits: ")
            continue
        assert found.chosen is not None, (memory, found.why)
        assert found.chosen.row.peak <= memory
        choice, best = min(fitting, key=lambda one: (one[1].seconds, one[1].row.peak))
        assert found.chosen.seconds <= 1.05 * best.seconds
        best_of.add((*choice.values(), best.row.level, best.row.within))
    assert max(counts) <= 10  # as is documented
    assert statistics.median(counts) < len(sweep) / 3
    assert len(best_of) > 2  # memory decides


def test_the_table_and_the_code() -> None:
    vary = {"microbatches": [1, 4], "remat": [True]}
    free = jaxdist.fit(mlp, topology=TWO_HOSTS, levels=(1, 3), vary=vary)
    assert free.chosen is not None
    memory = free.chosen.row.peak - 1
    found = jaxdist.fit(mlp, topology=with_memory(TWO_HOSTS, memory), levels=(1, 3), vary=vary)
    assert len(found.candidates) == 2 * 4
    one = found.chosen
    assert one is not None
    within = "" if one.row.within is None else ', within="host"'
    assert one.code == (
        f"mlp(microbatches={one.choice['microbatches']}, remat=True); "
        f"tx = jaxdist.zero(tx, level={one.row.level}{within})"
    )
    assert one.name in found.why
    assert "faster ones are too large: mlp(microbatches=" in found.why
    text = str(found)
    for word in (f"chosen: {one.code}", "microbatches", "remat", "│ > ", "not compiled", "lacks "):
        assert word in text
    assert "this step" not in text
    said = json.loads(found.to_json())
    assert said["candidates"][said["chosen"]]["choice"] == one.choice
    assert [one["compiled"] for one in said["candidates"]] == [one.compiled for one in found.candidates]
    assert {one["fits"] for one in said["candidates"]} == {True, False, None}
    assert [one.built for one in found.plan.levels] == [
        f"microbatches={one.choice['microbatches']}, remat=True" for one in found.candidates if one.compiled
    ]


def test_what_is_the_same_is_compiled_once(compiled: list[Any]) -> None:
    """And what does not change the step costs nothing."""

    def make(microbatches: int, name: str) -> Any:
        return mlp(microbatches)

    found = jaxdist.fit(
        make, topology=with_memory(ONE_HOST, 900_000), levels=(1, 2), vary={"microbatches": [1], "name": ["a", "b"]}
    )
    assert len(found.candidates) == 4
    assert all(one.compiled and not one.fits for one in found.candidates)
    assert len(compiled) == 1


def test_nothing_fits() -> None:
    found = jaxdist.fit(mlp, topology=with_memory(ONE_HOST, 1000), levels=(1, 3), vary={"microbatches": [1, 4]})
    assert found.chosen is None
    assert not any(one.compiled for one in found.candidates)
    assert found.why.startswith("nothing fits: mlp(microbatches=")
    assert "at level 3 comes nearest, and at least" in found.why
    assert "other values to vary" in found.why
    json.loads(found.to_json())
    bound = max(one.row.peak for one in found.candidates)
    found = jaxdist.fit(mlp, topology=with_memory(ONE_HOST, bound), levels=(3,), vary={"microbatches": [1]})
    assert found.chosen is None
    assert [one.compiled for one in found.candidates] == [True, True]
    assert "at least" not in found.why


def test_after_so_many_compilations_it_ends(monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    monkeypatch.setattr(searching, "MOST", 1)
    vary = {"microbatches": [1, 2]}
    peaks = [jaxdist.fit(*mlp(k), topology=ONE_HOST, levels=(1,)).candidates[0].row.peak for k in (1, 2)]
    compiled.clear()
    found = jaxdist.fit(mlp, topology=with_memory(ONE_HOST, min(peaks) - 1), levels=(1,), vary=vary)
    assert len(compiled) == 1
    assert found.chosen is None
    assert "compilations 1 faster ones were not compiled, the fastest of them mlp(microbatches=" in found.why
    assert found.why.endswith(("expected to fit: 1 of them", "expected to fit: none of them"))  # as its JAX compiles


def test_batches_of_several_sizes() -> None:
    """A smaller batch takes less time; and more for as much data."""
    found = jaxdist.fit(mlp, topology=TWO_HOSTS, levels=(1,), vary={"rows": [1024, 8192]})
    small, *_, large = found.candidates
    assert found.chosen is not None
    assert found.chosen.choice == {"rows": 8192}
    assert small.share == 1 / 8
    assert small.seconds < large.seconds
    assert "compared by the time of as much data" in str(found)


def test_what_is_refused() -> None:
    fit = functools.partial(jaxdist.fit, topology=ONE_HOST)
    with pytest.raises(TypeError, match="vary: mlp takes no argument 'layers'; it takes microbatches, remat, rows"):
        fit(mlp, vary={"layers": [1]})
    with pytest.raises(ValueError, match="no values for 'remat'"):
        fit(mlp, vary={"remat": []})
    with pytest.raises(ValueError, match="expected a list of values"):
        fit(mlp, vary={"remat": cast(Any, True)})
    with pytest.raises(TypeError, match="and with nothing else"):
        fit(mlp, 1, vary={"remat": [True]})
    with pytest.raises(TypeError, match=r"<lambda>\(a=1\) returned int, expected a tuple"):
        fit(lambda a: a, vary={"a": [1]})
    with pytest.raises(TypeError, match=r"decorated with jaxdist\.data_parallel"):
        fit(lambda a: (mlp, a), vary={"a": [1]})
    with pytest.raises(ValueError, match="microbatches") as caught:
        fit(mlp, vary={"microbatches": [3]})
    assert "in mlp(microbatches=3), as vary asks for" in caught.value.__notes__
