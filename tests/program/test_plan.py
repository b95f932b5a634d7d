"""`plan` and `fit`: what they say of devices that are not here is what a run then holds and sends."""

import functools
import gc
import importlib
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import programs
from harness.check import decorated, train_step
from harness.errors import missing, raises
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import planning

pytestmark = pytest.mark.usefixtures("messages_take_time")  # in a job as in a plan

N, WIDTH, LAYERS = 8, 32, 3
ROWS = 2048 * N  # so many that no step is small
ADAM = optax.adam(1e-3)
SHAPES = {"layers": (LAYERS, WIDTH, WIDTH), "odd": (WIDTH, 13), "small": (3,)}
"""`odd` has padding on 8 devices, `small` is smaller than they are many."""


def compiler(module: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"NO COMPILER of jaxdist[{extra}]: its programs are not tested; CI's newest run has it, no device",
    )


for_gpus, for_tpus = compiler("jax_cuda12_plugin", "cuda12"), compiler("libtpu", "tpu")


def make_params() -> dict[str, Any]:
    return {name: jnp.full(shape, 0.1, jnp.float32) for name, shape in SHAPES.items()}


def loss_fn(p: Any, x: Any) -> Any:
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, p["layers"])
    return jnp.mean((x @ p["odd"]) ** 2) * p["small"].sum()


def abstract(tx: Any = ADAM, rows: int = ROWS) -> tuple[Any, Any, Any]:
    params = jax.eval_shape(make_params)
    return params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def step_of(tx: Any) -> Any:
    return jaxdist.data_parallel(train_step(loss_fn, tx), donate=True)


def planned(level: Any, topology: str = f"{N}xcpu", within: Any = None, **options: Any) -> Any:
    tx = jaxdist.zero(ADAM, level, within)
    return jaxdist.plan(step_of(tx), *abstract(tx), topology=topology, **options)


@pytest.fixture(scope="module")
def plan() -> Any:
    return planned(2)


# --- what is kept and sent


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_plan_is_what_a_run_holds_and_sends(level: Any, plan: Any) -> None:
    tx, params, x = jaxdist.zero(ADAM, level), make_params(), np.ones((ROWS, WIDTH), np.float32)
    step = step_of(tx)
    state = step(params, tx.init(params), x)[:2]
    rows = {
        row.kind: row.device for row in planning.memory(dict(zip(("params", "opt_state"), state, strict=True))).rows
    }
    found = plan.candidates[level]
    assert found.bytes["parameters"] == rows["params"]
    assert found.bytes["optimizer state"] == rows["opt_state"]
    assert found.bytes["batch"] == ROWS // N * WIDTH * 4
    assert sum(found.bytes.values()) == found.peak
    if level == 3:  # arrays in shards will do as well
        assert (
            jaxdist.plan(step, *state, x, topology="4xcpu", levels=()).own.bytes
            == planned(3, "4xcpu", levels=()).own.bytes
        )
    kinds: Counter[str] = Counter()
    for op in programs.of(step, params, tx.init(params), x):
        if op.groups:  # the result of a reduce-scatter is a part of what is sent
            kinds[op.name] += op.size * 4 * (LAYERS if op.loops else 1) * (N if op.name == "reduce-scatter" else 1)
    assert {row.kind: row.bytes for row in found.traffic} == dict(kinds)


def test_a_message_in_loops_counts_at_each_turn() -> None:
    turns = lambda f, n: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, n)[0]
    body = turns(turns(lambda x: lax.psum(x, "data") / N, 5), 3)
    total = jaxdist.per_device(body, P("data"), P("data"), check_vma=False)
    step = jaxdist.data_parallel(lambda w, x: (w, total(x)))
    found = jaxdist.plan(step, jnp.ones(3), np.ones((ROWS, WIDTH), np.float32), topology=f"{N}xcpu", levels=())
    assert [row.count for row in found.own.traffic] == [15]


@pytest.mark.optimised
def test_what_compiles_is_what_is_planned(plan: Any) -> None:
    tx = jaxdist.zero(ADAM, 2)
    analysis = step_of(tx).lower(*abstract(tx)).compile().memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert plan.own.peak == analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes


@pytest.mark.optimised
def test_the_memory_that_the_paper_promises() -> None:
    """Level by level no more; at level 3 parameters, gradients and state in shards beside a few layers."""
    width, layers = 128, 16

    def loss(ws: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, ws)[0] ** 2)

    ws, x = jnp.zeros((layers, width, width), jnp.float32), jnp.zeros((1024, width), jnp.float32)
    peaks, temporaries = [], []
    for level in (0, 1, 2, 3):
        tx = jaxdist.zero(ADAM, level)
        step = decorated(train_step(loss, tx), N, donate=True)
        args = ws, tx.init(ws), x
        found = planning.memory(args, step.lower(*args).compile()).compiled
        peaks.append(found["arguments"] + found["temporaries"])
        temporaries.append(found["temporaries"])
    assert peaks == sorted(peaks, reverse=True)
    activations = temporaries[0] - ws.nbytes
    assert activations < 2 * ws.nbytes, "one gradient of all layers"
    assert peaks[3] <= 4 * ws.nbytes // N + 6 * ws.nbytes // layers + activations


def test_a_level_says_the_same_whichever_the_step_is_written_with(plan: Any) -> None:
    for one in planned(0, levels=(0, 3)).candidates:
        same = plan.candidates[one.level or 0]
        assert (one.peak, one.traffic) == (same.peak, same.traffic)
    found = jaxdist.plan(step_of(ADAM), *abstract(), topology="2x4xcpu")
    assert [(one.level, one.own) for one in found.candidates] == [(None, True)]


def test_no_array_is_made() -> None:
    gc.collect()  # or arrays of other tests end meanwhile
    before = len(jax.live_arrays())
    w, key = jax.ShapeDtypeStruct((1 << 20, 1 << 14), jnp.bfloat16), jax.eval_shape(lambda: jax.random.key(0))

    @jaxdist.data_parallel
    def step(params: Any, count: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32)))(params["w"])
        return {**params, "w": params["w"] - g}, count + 1

    x = jax.ShapeDtypeStruct((16, 1 << 20), jnp.bfloat16)
    found = jaxdist.plan(step, {"w": w, "key": key}, 0, x, topology="16xcpu")
    assert found.own.bytes["parameters"] == (1 << 35) + 8
    assert len(jax.live_arrays()) == before


def test_tables_and_json_say_the_same(plan: Any) -> None:
    found, text = json.loads(plan.to_json()), str(plan)
    assert [one["level"] for one in found["candidates"]] == [0, 1, 2, 3]
    for one, level in zip(found["candidates"], plan.candidates, strict=True):
        assert one["peak"] == sum(one["bytes"].values()) == level.peak
        assert one["traffic"][-1]["sent"] == level.total.sent == sum(row["sent"] for row in one["traffic"][:-1])
    assert all(word in text for word in ("level 2", "optimizer", "examples/s", "all-gather"))
    assert max(map(len, text.splitlines())) <= 110


def test_bytes_between_hosts() -> None:
    flat, hybrid = (planned(3, "4x2xcpu", within, levels=()).own for within in (None, "host"))
    assert flat.total.between == flat.total.sent  # one ring through all
    rows = {row.kind: row for row in hybrid.traffic}
    assert rows["all-gather"].between == rows["reduce-scatter"].between == 0
    slices = (LAYERS * WIDTH * WIDTH + WIDTH * 13) // 2
    assert rows["all-reduce"].between == 2 * 1.5 * 4 * slices + 7  # a ring of four hosts for each half; the loss
    assert hybrid.bytes["parameters"] > flat.bytes["parameters"]


def test_a_ring_between_hosts_is_as_fast_as_the_host_with_least_of_it() -> None:
    """Three groups of two hosts with three devices each: one has two devices on one host, and one on the other."""
    from jaxdist.machine import KINDS, Machine  # private: in a plan, all other costs hide it

    kind = KINDS["h100"]
    machine = Machine(kind, hosts=tuple("AAABBB"))
    assert machine.speed([[0, 2, 4]]) == (kind.network, kind.network_latency)
    assert machine.speed([[0, 1, 3, 4]]) == (2 * kind.network, kind.network_latency)
    assert machine.speed([[0, 1, 2], [3, 4, 5]]) == (kind.link, kind.latency)


MEGATRON = {"in": 1, "out": 0}


def over_axes(mesh: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    tx = jaxdist.zero(ADAM, level=1)
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"]) ** 2)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("in", (32, 64)), ("out", (64, 32)))}
    step = jaxdist.parallel(train_step(loss, tx), mesh=mesh, **options)
    return step, params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((64, 32), jnp.float32)


def test_a_mesh_of_several_axes() -> None:
    step, *types = over_axes({"data": 2, "model": 4}, layouts=MEGATRON)
    found = jaxdist.plan(step, *types, topology="2x4xcpu", levels=())
    state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), types[:2])
    params, opt_state, _ = step(*state, np.zeros((64, 32), np.float32))
    for kind, kept in (("parameters", params), ("optimizer state", opt_state)):
        assert found.own.bytes[kind] == planning.memory(kept).total.device
    rows = {(row.axis, row.kind): row for row in found.own.traffic}
    activation, gradients = 64 // 2 * 32 * 4, 2 * 32 * 64 * 4 // 4
    assert (rows["model", "all-reduce"].bytes, rows["model", "all-reduce"].between) == (activation, 0)
    assert rows["model", "all-reduce"].sent == activation * 2 * 3 // 4
    assert rows["data", "reduce-scatter"].bytes == gradients
    assert rows["data", "reduce-scatter"].between == 4 * gradients // 2  # the four rings of a host
    assert json.loads(found.to_json())["mesh"] == {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("own", "topology", "given", "want"),
    [
        ({"data": -1, "model": 8}, "4x8xcpu", None, {"data": 4, "model": 8}),
        ({"data": 4, "model": 2}, "8xcpu", {"data": 2, "model": -1}, {"data": 2, "model": 4}),
    ],
)
def test_meshes_of_devices_that_are_not_here(own: Any, topology: str, given: Any, want: Any) -> None:
    step, *types = over_axes(own)
    more = {} if given is None else {"mesh": given}
    assert jaxdist.plan(step, *types, topology=topology, levels=(), **more).mesh == want


# --- topologies


NO_TOPOLOGY = {"": "DEVICESxKIND", "8": "DEVICESxKIND", "x8xH100": "DEVICESxKIND", "8xV100": "V100", "0x8xH100": "one",
               "4x2xcpu,network=x": "NAME=NUMBER"}  # fmt: skip


@pytest.mark.parametrize("text", NO_TOPOLOGY)
def test_what_is_no_topology(text: str) -> None:
    with raises(ValueError, NO_TOPOLOGY[text]):
        planned(1, text, levels=())


@pytest.mark.parametrize("find", [jaxdist.plan, jaxdist.planning.fit])
def test_a_step_without_a_batch(find: Any) -> None:
    tx = jaxdist.zero(ADAM, 1)

    @jaxdist.data_parallel(batch_argnums=())
    def decay(w: Any, opt_state: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(lambda w: jnp.sum(w**2))(w), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = jax.ShapeDtypeStruct((300, 4), jnp.float32)
    found: Any = find(decay, w, jax.eval_shape(tx.init, w), topology="4xcpu", levels=(0, 1))
    assert (found.parameters, found.batch[0], len(found.candidates)) == (1200, 0, 2)
    assert "1,200 parameters" in str(found)


def test_refused() -> None:
    tx = jaxdist.zero(ADAM, 1)
    for find in (jaxdist.plan, jaxdist.planning.fit):
        with raises(TypeError, "jaxdist.data_parallel"):
            find(lambda x: x, 1, topology="8xcpu")  # type: ignore[operator]
        with raises(ValueError, "4"):
            find(*small(ADAM), topology="8xcpu", levels=(4,))  # type: ignore[operator]
    with raises(ValueError, "empty"):
        jaxdist.plan(step_of(tx), *abstract(tx)[:-1], jax.ShapeDtypeStruct((0, WIDTH), np.float32), topology="3xcpu")
    with raises(ValueError, "8 devices"):
        jaxdist.plan(*over_axes({"data": 3, "model": 2}), topology="8xcpu")


# --- fit


def small(tx: Any, rows: int = 1 << 14) -> tuple[Any, ...]:
    loss = lambda p, x: jnp.mean((lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0] @ p["odd"]) ** 2)
    params = {name: jax.ShapeDtypeStruct(SHAPES[name], jnp.float32) for name in ("layers", "odd")}
    batch = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    return jaxdist.data_parallel(train_step(loss, tx)), params, jax.eval_shape(tx.init, params), batch


def test_fit_takes_the_fastest() -> None:
    """Whichever the step is written with; each row is what `plan` says of it."""
    found: Any = jaxdist.planning.fit(*small(jaxdist.zero(ADAM, 1, "host")), topology="2x4xcpu", levels=(0, 1))
    assert found.chosen.seconds == min(one.seconds for one in found.candidates if one.fits)
    assert [one.own for one in found.candidates].count(True) == 1
    for one in found.candidates:
        tx = jaxdist.zero(ADAM, one.level, one.within)
        same = jaxdist.plan(*small(tx), topology="2x4xcpu", levels=()).own
        assert (one.peak, one.traffic, one.flops) == (same.peak, same.traffic, same.flops)
    said = json.loads(found.to_json())
    assert said["candidates"][said["chosen"]]["seconds"] == found.chosen.seconds
    assert found.chosen.code in str(found)


def test_fit_says_when_nothing_fits() -> None:
    big = jax.ShapeDtypeStruct((1 << 19, 1 << 14), jnp.float32)
    step = jaxdist.data_parallel(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    found: Any = jaxdist.planning.fit(step, big, jax.ShapeDtypeStruct((64, 1 << 19), jnp.float32), topology="4xA100-40")
    assert found.chosen is None
    assert "nothing fits" in found.why
    assert all(not one.fits for one in found.candidates)


def test_fit_over_meshes() -> None:
    """Each as by itself, and what it says can be run."""
    loss = lambda p, x: jnp.mean((x + jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in {"up": (64, 256), "down": (256, 64)}.items()}
    args = params, jax.eval_shape(ADAM.init, params), jax.ShapeDtypeStruct((1, 64), jnp.float32)
    step = jaxdist.data_parallel(train_step(loss, ADAM))
    found: Any = jaxdist.planning.fit(step, *args, topology="4xcpu", mesh="auto")
    assert 'mesh={"model": 4}' in found.chosen.code, "one example is not divided"
    alone: Any = jaxdist.planning.fit(step, *args, topology="4xcpu", mesh={"model": 4})
    assert alone.chosen.seconds == pytest.approx(found.chosen.seconds)
    with raises(ValueError, "4"):
        jaxdist.planning.fit(step, *args, topology="4xcpu", mesh={"data": 3})


# --- programs for GPUs and TPUs, compiled without one

WHOLE = 4 * 1024 * 1024 * 4 + 1024 * 16 * 4  # bytes of the parameters of `deep` in float32


def deep(tx: Any, dtype: Any = jnp.float32, mesh: Any = None, columns: int = 16) -> tuple[Any, ...]:
    """A step through layers of a loop, each computed again in the backward pass, and its arguments."""

    def loss(p: Any, x: Any) -> Any:
        x, _ = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, p["layers"])
        return jnp.mean((x @ p["out"]) ** 2)

    params = {
        "layers": jax.ShapeDtypeStruct((4, 1024, 1024), dtype),
        "out": jax.ShapeDtypeStruct((1024, columns), dtype),
    }
    step = train_step(loss, tx)
    over = jaxdist.parallel(step, mesh=mesh, donate=True) if mesh else jaxdist.data_parallel(step, donate=True)
    return over, params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((1 << 17, 1024), dtype)


# A strategy; what is sent along which axis, relative to the bytes of the parameters. A reduction along two slices is
# one in each, and one between them. What is gathered at level 3 may be bfloat16, as TPUs multiply it, and come twice.
SENT: list[tuple[str, Any, dict[tuple[str, str], float]]] = [
    ("level 0", lambda: deep(jaxdist.zero(ADAM, 0)), {("", "all-reduce"): 1}),
    ("level 1", lambda: deep(jaxdist.zero(ADAM, 1)), {("", "reduce-scatter"): 1, ("", "all-gather"): 1}),
    ("level 3", lambda: deep(jaxdist.zero(ADAM, 3)), {("", "reduce-scatter"): 1, ("", "all-gather"): 2}),
    ("sums of bfloat16", lambda: deep(jaxdist.zero(ADAM, 0), jnp.bfloat16), {("", "all-reduce"): 1}),  # in float32
    (
        "bfloat16", lambda: deep(jaxdist.zero(ADAM, 1), jnp.bfloat16),
        {("", "reduce-scatter"): 1, ("", "all-gather"): 0.5},
    ),
    (
        "offload", lambda: deep(jaxdist.zero(ADAM, 1, offload=True)),
        {("", "reduce-scatter"): 1, ("", "all-gather"): 1},
    ),
    (
        "within 4", lambda: deep(jaxdist.zero(ADAM, 1, within=4)),
        {("", "reduce-scatter"): 1, ("", "all-reduce"): 0.25, ("", "all-gather"): 1},
    ),
    ("model", lambda: deep(ADAM, mesh={"data": -1, "model": 4}), {("data", "all-reduce"): 0.25}),
]  # fmt: skip
PEAKS = {"level 0": 3, "level 1": 1 + 2 / 8, "level 3": 3 / 8, "bfloat16": (1 + 2 / 8) / 2}  # of the state, likewise


@pytest.mark.optimised
@pytest.mark.parametrize("topology", [pytest.param("8xH100", marks=for_gpus), pytest.param("v5e:2x4", marks=for_tpus)])
@pytest.mark.parametrize(("name", "make", "sent"), SENT, ids=lambda x: x if isinstance(x, str) else "")
def test_what_a_strategy_sends(name: str, make: Any, sent: dict[tuple[str, str], float], topology: str) -> None:
    step, *args = make()
    found = jaxdist.plan(step, *args, topology=topology, levels=())
    own, mesh = found.own, step.mesh
    assert found.compiled_for == ("cuda" if "H100" in topology else "tpu")
    moved = {(row.axis, row.kind): row.bytes / WHOLE for row in own.traffic if row.bytes > WHOLE / 100}
    of_weights = {key: size for key, size in moved.items() if "model" not in key[0]}
    low = {key: (0.49 if name == "level 3" and key[1] == "all-gather" else 0.98) * size for key, size in sent.items()}
    assert of_weights.keys() == sent.keys()
    assert all(low[key] <= of_weights[key] <= 1.02 * size for key, size in sent.items()), of_weights
    assert bool(mesh) == ("model" in {axis for axis, _ in moved})
    assert own.bytes.get("results", 0) < WHOLE / 100, "the state is donated, and its memory used again"
    if name in PEAKS:
        assert own.bytes["parameters"] + own.bytes["optimizer state"] == pytest.approx(PEAKS[name] * WHOLE, rel=0.01)
    assert (own.host > 0) == (name == "offload")


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("topology", "overlapped"),
    [
        pytest.param("8xH100", {"reduce-scatter", "all-gather"}, marks=for_gpus),
        pytest.param("v5e:2x4", {"all-gather"}, marks=for_tpus),  # XLA's reductions of a loop's body wait
    ],
)
def test_messages_run_beside_the_computation(
    topology: str, overlapped: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    step, *args = importlib.import_module("gpt").planned(
        layers=2, heads=16, width=1024, context=512, bf16=True, batch_size=32, level=3
    )
    own = jaxdist.plan(step, *args, topology=topology, levels=()).own
    assert {row.kind for row in own.traffic if (row.overlapped or 0) > 0.3} >= overlapped
    gathered = sum(row.bytes for row in own.traffic if row.kind == "all-gather")
    assert 1.8 < gathered / (2 * 2 * 12 * 1024**2) < 2.4, "parameters in bfloat16, for each pass; in all turns of loops"


@for_tpus
@pytest.mark.optimised
@pytest.mark.parametrize("topology", ["v5e:2x2", "2xv5e:2x2"])
def test_reductions_in_kernels_and_between_slices_are_seen(topology: str) -> None:
    """XLA for a few chips reduces and slices in one kernel, and sends all to all between slices."""
    step, *args = deep(jaxdist.zero(ADAM, 3))
    rows = {row.kind: row for row in jaxdist.plan(step, *args, topology=topology, levels=()).own.traffic}
    reduced = sum(row.bytes for kind, row in rows.items() if kind in ("reduce-scatter", "all-reduce"))
    assert WHOLE <= reduced < 1.5 * WHOLE
    assert (sum(row.between for row in rows.values()) > 0) == (topology == "2xv5e:2x2")


@for_tpus
@pytest.mark.optimised
def test_what_slices_of_tpus_send_each_other() -> None:
    step, *args = deep(jaxdist.zero(ADAM, 1, within="host"))
    found = jaxdist.plan(step, *args, topology="2xv5e:2x4", levels=())
    own = found.own
    between = sum(row.between for row in own.traffic)
    assert between == pytest.approx(WHOLE, rel=0.02), "of each slice, an all-reduce of the gradients between two"
    assert own.bytes["optimizer state"] == pytest.approx(2 / 8 * WHOLE, rel=0.01), "in shards within a slice"
    assert "between slices" in str(found)


@for_tpus
def test_a_program_that_does_not_fit_tpus_says_what_it_lacks() -> None:
    step, *args = deep(ADAM, columns=1 << 20)
    found = jaxdist.planning.fit(step, *args, topology="v5e:2x2")
    assert found.chosen is None
    assert missing(("nothing fits", "lacks"), str(found)) == []
    assert found.own.bytes["parameters"] > 4 << 30


@for_tpus
def test_what_no_tpu_computes_says_so() -> None:
    with jax.enable_x64(True):
        step, *args = deep(jaxdist.zero(ADAM, 1), jnp.float64)
        with raises(ValueError, "TPUs", "64-bit floats", "UNIMPLEMENTED"):
            jaxdist.plan(step, *args, topology="v5e:2x4", levels=())
    for topology in ("v5p:3x2x2", "v5e:16x17", "v6e:2x2x2"):  # XLA would end the process of the second
        with raises(ValueError, topology):
            planned(0, topology)


def test_a_compiler_for_tpus_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "libtpu-0.0.1.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = planned(1, "v5e:2x4", levels=())
    assert found.compiled_for == "cpu"
    assert missing(("libtpu 0.0.1 is installed", "jaxdist[tpu]"), " ".join(found.notes)) == []


@for_gpus
@pytest.mark.parametrize(("rows", "clip"), [(64, True), (1 << 16, False)])
def test_what_the_memory_of_the_host_saves_on_gpus(rows: int, clip: bool) -> None:
    """Not only between steps: the state does not come all at once, nor while there are activations."""
    width, layers = 1024, 8
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers

    def found(offload: bool) -> Any:
        inner = optax.chain(optax.clip_by_global_norm(1.0), ADAM) if clip else ADAM
        tx = jaxdist.zero(inner, 1, offload=offload)
        loss = lambda p, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), p, x) ** 2)
        types = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((rows, width), jnp.float32)
        return jaxdist.plan(jaxdist.data_parallel(train_step(loss, tx)), *types, topology="2xH100", levels=()).own

    before, after = found(False), found(True)
    assert after.host == 2 * 4 * width**2 * layers // 2
    assert before.peak - after.peak > after.host / 2
