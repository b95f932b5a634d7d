"""`plan` says what a run then shows: bytes, collectives, levels; and makes no array for it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness.steps import train_step
from jax import lax
from jax.sharding import Mesh

import jaxdist
from jaxdist import compat
from jaxdist.communicators import compiler_options
from jaxdist.ir.wire import Transfer, transfers
from jaxdist.machine import KINDS, Machine
from jaxdist.mesh import Axis
from jaxdist.placements import search
from jaxdist.placements.infer import Infer
from jaxdist.planning.elsewhere import LEVELS, Elsewhere
from jaxdist.planning.report import Plan
from jaxdist.runtime import commlog
from jaxdist.step import tracing

pytestmark = pytest.mark.usefixtures("messages_take_time")  # in a job as in a plan

N, WIDTH, LAYERS = 8, 32, 3
ROWS = 2048 * N
"""So many that no step is small."""
ADAM = optax.adam(1e-3)
# `odd` has padding on 8 devices, `small` is smaller than they are many.
SHAPES = {"layers": (LAYERS, WIDTH, WIDTH), "odd": (WIDTH, 13), "small": (3,)}


for_gpus = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="NO COMPILER FOR GPUS: schedules are not tested; pip install 'jaxdist[cuda12]' (needs no GPU)",
)


def make_params() -> dict[str, Any]:
    return {name: jnp.full(shape, 0.1, jnp.float32) for name, shape in SHAPES.items()}


def loss_fn(p: Any, x: Any) -> Any:
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, p["layers"])
    return jnp.mean((x @ p["odd"]) ** 2) * p["small"].sum()


def step_of(tx: Any, loss: Any = loss_fn, decorate: Any = jaxdist.data_parallel, **options: Any) -> Any:
    return decorate(train_step(loss, tx), **options)


def abstract(tx: Any = ADAM, rows: int = ROWS) -> tuple[Any, Any, Any]:
    params = jax.eval_shape(make_params)
    return params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def planned(level: Any, topology: str = f"{N}xcpu", within: Any = None, **options: Any) -> Plan:
    tx = jaxdist.zero(ADAM, level, within)
    return jaxdist.plan(step_of(tx), *abstract(tx), topology=topology, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(2)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Counter[Transfer]]:
    """What each program sends that is lowered."""
    seen: list[Counter[Transfer]] = []
    monkeypatch.setenv("JAXDIST_LOG", "comm")
    monkeypatch.setattr(commlog, "table", lambda found: (seen.append(found), "")[1])
    return seen


def by_kind(sent: Counter[Transfer]) -> dict[str, int]:
    """The bytes."""
    found: Counter[str] = Counter()
    for one, count in sent.items():
        found[one.kind] += count * one.times * one.bytes
    return {kind: size for kind, size in found.items() if size}


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_kept_and_sent_is_that_of_a_run(level: Any, plan: Plan, sent: list[Counter[Transfer]]) -> None:
    tx = jaxdist.zero(ADAM, level)
    params = make_params()
    state = step_of(tx)(params, tx.init(params), np.ones((ROWS, WIDTH), np.float32))[:2]
    rows = {row.kind: row.device for row in jaxdist.memory(dict(zip(("params", "opt_state"), state, strict=True))).rows}
    found = plan.levels[level]
    assert found.level == level
    assert found.bytes["parameters"] == rows["params"]
    assert found.bytes["optimizer state"] == rows["opt_state"]
    assert found.bytes["batch"] == ROWS // N * WIDTH * 4
    assert sum(found.bytes.values()) == found.peak
    assert {row.kind: row.bytes for row in found.traffic} == by_kind(sent[0])


@pytest.mark.optimised
def test_what_compiles_is_what_is_planned(plan: Plan) -> None:
    tx = jaxdist.zero(ADAM, 2)
    analysis = step_of(tx).lower(*abstract(tx)).compile().memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert plan.own.peak == analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes


def test_another_level_is_that_level(plan: Plan) -> None:
    """Whichever level the step is written with."""
    assert [one.own for one in planned(0, levels=()).levels] == [True]
    for one in planned(0, levels=(0, 3)).levels:
        same = plan.levels[one.level or 0]
        assert (one.peak, one.traffic) == (same.peak, same.traffic)


def test_activations_grow_with_the_batch() -> None:
    """Also if the devices do not halve it."""

    @functools.cache
    def of(rows: int) -> dict[str, int]:
        return dict(jaxdist.plan(step_of(ADAM), *abstract(rows=rows), topology=f"{N}xcpu").own.bytes)

    small, large = of(1024), of(2048)
    assert small["activations"] > 1024 // N * WIDTH * 4 * LAYERS
    assert 1.8 < large["activations"] / small["activations"] < 2.2
    temporaries = "gradients and temporaries"
    assert small[temporaries] == pytest.approx(large[temporaries], rel=0.1)
    of_a_row = lambda rows: of(rows)["activations"] / rows
    assert all(0.8 < of_a_row(rows) / of_a_row(4 * N) < 1.25 for rows in (N, 3 * N, 3 * N - 1))


def test_no_array_is_made() -> None:
    before = len(jax.live_arrays())
    w, key = jax.ShapeDtypeStruct((1 << 20, 1 << 14), jnp.bfloat16), jax.eval_shape(lambda: jax.random.key(0))

    @jaxdist.data_parallel
    def step(params: Any, count: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32)))(params["w"])
        return {**params, "w": params["w"] - g}, count + 1

    params = {"w": w, "key": key}
    found = jaxdist.plan(step, params, 0, jax.ShapeDtypeStruct((16, 1 << 20), jnp.bfloat16), topology="16xcpu")
    assert found.own.bytes["parameters"] == (1 << 35) + 8
    assert found.own.bytes["other state"] == 4 * (1 + jax.config.read("jax_enable_x64"))
    assert len(jax.live_arrays()) == before


def test_arrays_will_do_as_well() -> None:
    tx = jaxdist.zero(ADAM, 3)
    params = make_params()
    x = np.ones((ROWS, WIDTH), np.float32)
    state = step_of(tx)(params, tx.init(params), x)[:2]  # in shards, some with padding
    found = jaxdist.plan(step_of(tx), *state, x, topology="4xcpu", levels=())
    assert found.own.bytes == jaxdist.plan(step_of(tx), *abstract(tx), topology="4xcpu", levels=()).own.bytes
    average = {name: jaxdist.shard(x) for name, x in make_params().items()}  # stays in shards whatever the level

    @jaxdist.data_parallel
    def update(average: Any, x: Any) -> Any:
        return jax.tree.map(lambda a: a + lax.pmean(x.mean(), "data"), average)

    kept = jaxdist.plan(update, average, x, topology="4xcpu").own.bytes["other state"]
    assert kept < 0.3 * sum(x.nbytes for x in make_params().values())


def test_without_zero_there_is_one_row() -> None:
    found = jaxdist.plan(step_of(ADAM), *abstract(), topology="2x4xcpu")
    assert [(one.level, one.own) for one in found.levels] == [(None, True)]
    assert any("does not use jaxdist.zero" in note for note in found.notes)
    assert found.own.bytes["parameters"] == sum(x.nbytes for x in make_params().values())
    assert "as written" in str(found)


def test_what_zero_is_not_told() -> None:
    tx = jaxdist.zero(ADAM, 1)

    @jaxdist.data_parallel
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        return tx.update(jax.grad(loss_fn)(params, x), opt_state)

    found = jaxdist.plan(step, *abstract(tx), topology="4xcpu", levels=(1, 3))
    assert [one.level for one in found.levels] == [1]
    assert any("tx.update(grads, opt_state, params)" in note for note in found.notes)


def missing(*_: Any) -> Any:
    raise ImportError("no plugin")


def layers(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"]) ** 2)


@pytest.mark.parametrize("level", [0, 3])
def test_without_their_compiler_gpus_send_what_a_job_on_gpus_sends(
    level: Any, sent: list[Counter[Transfer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are worth as much as the batch many times: CPUs would rather send that, GPUs one message less.

    (Both would compute such a small step whole, if it took them any time to send a message besides.)
    """
    for kind in (KINDS["cpu"], KINDS["h100"]):
        stall = max(kind.stall, kind.latency)
        monkeypatch.setitem(KINDS, kind.name.lower(), dataclasses.replace(kind, latency=0, stall=stall))
    monkeypatch.setattr(jaxdist.get_context(), "kind", KINDS["cpu"].of_host(N))
    monkeypatch.setattr(compat, "gpus_elsewhere", missing)
    tx = jaxdist.zero(optax.sgd(0.1), level)
    params = {"in": jnp.ones((512, 512)), "out": jnp.ones((512, 8))}
    args = params, tx.init(params), jnp.ones((2 * N, 512))
    planned = {name: Elsewhere(step_of(tx, layers), args, f"{N}x{name}", ()) for name in ("cpu", "H100")}
    forecast = [
        transfers(there.emitted().program, [Axis("data", N)], Machine(KINDS[name.lower()]))
        for name, there in planned.items()
    ]
    step_of(tx, layers).lower(*args)
    gpus = lambda axis, choose, level, machine, *rest: Infer(
        axis, choose, level, Machine(KINDS["h100"], machine.hosts), *rest
    )
    monkeypatch.setattr(tracing, "Infer", gpus)  # what it is for a job whose devices are GPUs
    step_of(tx, layers).lower(*args)
    assert forecast == sent
    assert sent[0] != sent[1]
    there = planned["H100"]
    row = there.row(there.compiled(), None, True, None)
    # Of two equal gathers XLA for CPUs makes one, which the barriers in a program for GPUs prevent.
    assert {one.kind: one.bytes for one in row.traffic} == pytest.approx(by_kind(sent[1]), rel=0.02)


def test_without_the_compiler_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "gpus_elsewhere", missing)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    found = planned(1, "2x4xH100", levels=(1,))
    assert found.compiled_for == "cpu"
    assert found.own.total.overlapped is None
    assert found.memory == KINDS["h100"].memory // 2
    assert "no plugin" in found.notes[0]
    assert "pip install 'jaxdist[cuda12]'" in " ".join(str(found).split())
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "much")
    with pytest.raises(ValueError, match="expected a number"):
        planned(1, "8xH100", levels=())


def test_tables_and_json_say_the_same(plan: Plan) -> None:
    found, text = json.loads(plan.to_json()), str(plan)
    assert [one["level"] for one in found["levels"]] == [0, 1, 2, 3]
    assert found["topology"]["kind"]["name"] == "cpu"
    for one, level in zip(found["levels"], plan.levels, strict=True):
        assert one["peak"] == sum(one["bytes"].values()) == level.peak
        assert one["traffic"][-1]["sent"] == level.total.sent == sum(row["sent"] for row in one["traffic"][:-1])
    for word in ("level 2 (this step)", "optimizer state", "activations", "fits", "all-gather", "3 GB/s each way"):
        assert word in text


def test_the_time_of_a_collective() -> None:
    tx = jaxdist.zero(ADAM, 0)
    found = jaxdist.plan(step_of(tx, bucket_bytes=1 << 30), *abstract(tx), topology="8xcpu", levels=()).own.total
    kind = KINDS["cpu"]
    assert found.seconds == pytest.approx(found.count * kind.latency + found.sent / kind.link)


@pytest.mark.slow
def test_bytes_between_hosts() -> None:
    flat, hybrid = (planned(3, "4x2xcpu", within, levels=()).own for within in (None, "host"))
    assert flat.total.between == flat.total.sent  # one ring through all
    by_kind = {row.kind: row for row in hybrid.traffic}
    assert by_kind["all-gather"].between == by_kind["reduce-scatter"].between == 0
    slices = (SHAPES["layers"][0] * WIDTH * WIDTH + WIDTH * 13) // 2  # the gradient of `small` is one number
    assert by_kind["all-reduce"].between == 2 * 1.5 * 4 * slices + 7  # a ring of four hosts for each half; the loss
    assert hybrid.total.between < 0.75 * flat.total.between
    assert hybrid.bytes["parameters"] > flat.bytes["parameters"]
    assert "between hosts" in str(planned(3, "4x2xcpu", levels=()))


def test_batches_that_the_devices_do_not_divide() -> None:
    found = planned(1, "3xcpu", levels=())
    assert found.own.bytes["batch"] == -(-ROWS // 3) * WIDTH * 4


def test_what_is_refused() -> None:
    tx = jaxdist.zero(ADAM, 1)
    step, args, empty = step_of(tx), abstract(tx), jax.ShapeDtypeStruct((0, 8), np.float32)
    with pytest.raises(TypeError, match=r"decorated with jaxdist\.data_parallel"):
        jaxdist.plan(lambda x: x, 1, topology="8xcpu")
    with pytest.raises(ValueError, match="no ZeRO level 4"):
        jaxdist.plan(step, *args, topology="8xcpu", levels=(4,))
    with pytest.raises(ValueError, match="batch is empty"):
        jaxdist.plan(step, *args[:-1], empty, topology="3xcpu")
    with pytest.raises(ValueError, match="no kind 'tpu'"):
        jaxdist.plan(step, *args, topology="8xtpu")


def test_options_of_the_compiler_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there in this version of XLA, and what the user says counts."""
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    monkeypatch.delenv("XLA_FLAGS")
    options = compiler_options(mesh)
    assert len(options) == 3, options
    jax.jit(lambda x: x + 1, compiler_options=options).lower(1.0).compile()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_gather_combine_threshold_bytes=1 --xla_gpu_pipeline_all_reduce=off")
    assert list(compiler_options(mesh)) == ["xla_gpu_enable_latency_hiding_scheduler"]
    assert not compat.compiler_knows("xla_gpu_nonsense", True)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [False, pytest.param(True, marks=for_gpus)])
def test_state_in_the_memory_of_the_host(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gpus:
        monkeypatch.setattr(compat, "gpus_elsewhere", missing)
    tx = {offload: jaxdist.zero(ADAM, 1, offload=offload) for offload in (False, True)}
    there, here = (
        jaxdist.plan(step_of(tx[o]), *abstract(tx[o]), topology=f"{N}xH100", levels=(0, 1, 3)) for o in (False, True)
    )
    assert [one.host > 0 for one in here.levels] == [False, True, True]
    for before, one in zip(there.levels[1:], here.levels[1:], strict=True):
        # What no device has a part of stays: the counter, and the moments of the small leaf.
        assert one.bytes["optimizer state"] == 4 + 2 * 3 * 4
        assert one.host + one.bytes["optimizer state"] == before.bytes["optimizer state"]
        assert one.peak == sum(one.bytes.values())
    assert there.levels[0].bytes == here.levels[0].bytes
    assert "in the host's memory" in str(here)
    assert "at PCIe's full speed, 64 GB/s" in " ".join(str(here).split())
    assert json.loads(here.to_json())["levels"][1]["host"] == here.own.host
    assert jaxdist.plan(step_of(tx[True]), *abstract(tx[True]), topology=f"{N}xcpu", levels=()).own.host == 0


@for_gpus
@pytest.mark.parametrize(("rows", "clip"), [(64, True), (1 << 16, False)])
def test_what_the_memory_of_the_host_saves(rows: int, clip: bool) -> None:
    """Not only between steps: the state does not come all at once, nor while there are activations."""
    width, layers = 1024, 8
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers

    def found(offload: bool) -> Any:
        tx = optax.chain(optax.clip_by_global_norm(1.0), ADAM) if clip else ADAM
        tx = jaxdist.zero(tx, 1, offload=offload)

        def loss(p: Any, x: Any) -> Any:
            for w in p:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        types = params, jax.eval_shape(tx.init, params), x
        return jaxdist.plan(step_of(tx, loss), *types, topology="2xH100", levels=()).own

    before, after = found(False), found(True)
    assert after.host == 2 * 4 * width**2 * layers // 2
    assert before.peak - after.peak > after.host / 2


@for_gpus
def test_for_gpus() -> None:
    found = planned(3, "2x4xH100")
    assert found.compiled_for == "cuda"
    own = found.own
    assert own.total.overlapped is not None
    assert 0 <= own.total.overlapped <= 1
    assert {row.kind for row in own.traffic} == {"all-gather", "reduce-scatter", "all-reduce"}
    whole = sum(x.nbytes for x in make_params().values())
    sent = {row.kind: row.bytes for row in own.traffic}
    assert whole <= sent["all-gather"] <= 2.5 * whole
    peaks = [one.peak for one in found.levels]
    assert peaks == sorted(peaks, reverse=True)


MEGATRON = {"in": 1, "out": 0}


def over_axes(mesh: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A decorated step, and types of its arguments."""
    tx = jaxdist.zero(ADAM, level=1)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("in", (32, 64)), ("out", (64, 32)))}
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    decorate = functools.partial(jaxdist.parallel, mesh=mesh) if mesh else jaxdist.data_parallel
    decorated = step_of(tx, layers, decorate, **options)
    return decorated, params, jax.eval_shape(tx.init, params), x


def test_a_mesh_of_several_axes_says_what_a_job_on_it_holds_and_sends() -> None:
    decorated, *types = over_axes(Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model")), layouts=MEGATRON)
    found = jaxdist.plan(decorated, *types, topology="2x4xcpu", levels=())
    state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), types[:2])
    params, opt_state, _ = decorated(*state, np.zeros((64, 32), np.float32))
    for kind, kept in (("parameters", params), ("optimizer state", opt_state)):
        assert found.own.bytes[kind] == jaxdist.memory(kept).total.device
    assert found.own.bytes["batch"] == 64 // 2 * 32 * 4
    rows = {(row.axis, row.kind): row for row in found.own.traffic}
    activation = 64 // 2 * 32 * 4
    assert rows["model", "all-reduce"].bytes == activation
    assert rows["model", "all-reduce"].sent == activation * 2 * 3 // 4
    assert rows["model", "all-reduce"].between == 0
    assert {axis for axis, _ in rows} == {"model", "data"}
    gradients = 2 * 32 * 64 * 4 // 4
    assert rows["data", "reduce-scatter"].bytes == gradients
    assert rows["data", "reduce-scatter"].between == 4 * gradients // 2  # the four rings of a host
    assert "data=2 (between hosts), model=4 (within a host)" in str(found)
    assert json.loads(found.to_json())["mesh"] == {"data": 2, "model": 4}


@pytest.mark.parametrize("mesh", [{"data": -1, "model": 8}, {"model": 8, "data": 4}])
def test_the_mesh_of_a_step_for_devices_that_are_not_here(mesh: Any) -> None:
    decorated, *types = over_axes(mesh)
    found = jaxdist.plan(decorated, *types, topology="4x8xcpu", levels=())
    assert found.mesh == {**mesh, "data": 4}


def test_another_mesh_than_that_of_the_step() -> None:
    for own in (None, {"data": 4, "model": 2}):
        decorated, *types = over_axes(own)
        there = jaxdist.plan(decorated, *types, topology="8xcpu", levels=(), mesh={"data": 2, "model": -1})
        assert there.mesh == {"data": 2, "model": 4}
        assert there.own.bytes["parameters"] == 2 * 32 * 64 * 4 // 4
    with pytest.raises(ValueError, match="8xcpu has 8 devices, which these sizes don't make"):
        jaxdist.plan(decorated, *types, topology="8xcpu", mesh={"data": 3, "model": 2})
    with pytest.raises(ValueError, match="there is no axis 'pipe'"):
        jaxdist.plan(decorated, *types, topology="8xcpu", mesh={"pipe": 8})


def test_groups_of_hosts_on_a_mesh_of_several_axes() -> None:
    decorated, *types = over_axes({"data": 4, "model": 2}, layouts=MEGATRON)
    found = jaxdist.fit(decorated, *types, topology="2x4xcpu")
    assert {one.row.within for one in found.candidates} == {None, "host"}
    one = Elsewhere(decorated, tuple(types), "2x4xcpu", ())
    assert one.in_host == one.emitted(shared=2).shared == 2
    rows = one.row(one.compiled(shared=2), 1, True, None).traffic
    assert {row.axis for row in rows} == {"data", "model"}


def test_one_search_for_all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step without layouts; and all levels and batches are cut alike."""
    searches, best = [], search._Descent.best
    monkeypatch.setattr(search._Descent, "best", lambda self, groups: (searches.append(1), best(self, groups))[1])
    decorated, *types = over_axes({"data": 2, "model": 4})
    found = jaxdist.plan(decorated, *types, topology="8xcpu")
    assert len(found.levels) == 4
    assert {one.bytes["parameters"] for one in found.levels[:3]} == {2 * 32 * 64 * 4 // 4}
    assert len(searches) == 1
