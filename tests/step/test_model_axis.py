"""What the model axis cuts where `jaxdist.parallel` is given no layouts."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import jobs
from harness.meshes import mesh
from harness.parity import compare
from jax import lax

import jaxdist
from jaxdist.ir.wire import Transfer, transfers
from jaxdist.mesh import along, axes_of_mesh
from jaxdist.placements import search

pytestmark = pytest.mark.usefixtures("messages_take_time")

BATCH, TIME, WIDTH, HEADS, LAYERS, WORDS = 8, 16, 64, 4, 3, 32
BOTH = {"data": 2, "model": 4}
Step = Any


def random(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) / math.sqrt(shape[-2:][0]) for name, shape in shapes.items()}


def trained(loss_fn: Any, params: Any, batch: Any, tx: Any = None) -> tuple[Step, tuple[Any, ...]]:
    tx = tx or optax.adam(1e-2, eps=1e-3)  # which leaves rounding as small as it is

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, jax.tree.map(np.asarray, tx.init(params)), batch)


def mlp(inner: int = 256, layers: int = 1, **options: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss_fn(p: Any, x: Any) -> Any:
        for k in range(layers):
            x = jnp.tanh(x @ p[f"in{k}"] + p[f"bias{k}"]) @ p[f"out{k}"]
        return jnp.mean(x**2)

    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(layers):
        shapes |= {f"in{k}": (WIDTH, inner), f"bias{k}": (inner,), f"out{k}": (inner, WIDTH)}
    return trained(loss_fn, random(0, **shapes), np.random.default_rng(1).normal(size=(BATCH, WIDTH)), **options)


def gpt(heads: int = HEADS) -> tuple[Step, tuple[Any, ...]]:
    """Layers in a scan, attention that is float64 throughout."""
    width = WIDTH // HEADS

    def layer(x: Any, p: Any) -> Any:
        norm = lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        h = norm(x)
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
        scores = jnp.where(jnp.tri(TIME, dtype=bool), jnp.einsum("bthk,bshk->bhts", q, k), -1e9)
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
        x += jnp.einsum("bthk,hkd->btd", mixed, p["o"])
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None

    def loss_fn(p: Any, words: Any) -> Any:
        x, _ = lax.scan(layer, p["embed"][words[:, :-1]], p["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["embed"].T, words[:, 1:]).mean()

    shape = (LAYERS, WIDTH, heads, width)
    layers = random(0, q=shape, k=shape, v=shape, up=(LAYERS, WIDTH, 4 * WIDTH), down=(LAYERS, 4 * WIDTH, WIDTH))
    layers |= random(1, o=(LAYERS, heads, width, WIDTH))
    words = np.random.default_rng(1).integers(0, WORDS, (BATCH, TIME + 1))
    return trained(loss_fn, {"layers": layers, **random(2, embed=(WORDS, WIDTH))}, words)


def parallel(step: Step, sizes: dict[str, int], **options: Any) -> Any:
    return jaxdist.parallel(step, mesh=mesh(sizes), **options)


def cuts(decorated: Any, *args: Any) -> dict[str, int]:
    """What is cut, as `explain` says."""
    return dict(jaxdist.explain(decorated, *args).cut)


def exact_cuts(step: Step, args: tuple[Any, ...], sizes: dict[str, int]) -> dict[str, int]:
    """The same, after the step is seen to be exact, two calls long."""
    decorated, plain = parallel(step, sizes), jax.jit(step)
    *state, batch = args
    want, got = plain(*plain(*state, batch)[:-1], batch), decorated(*decorated(*state, batch)[:-1], batch)
    compare(jaxdist.unshard(got), want, 1e-9)
    return cuts(decorated, *args)


@functools.cache
def of_a_gpt() -> tuple[Any, tuple[Any, ...], dict[str, int]]:
    """Decorated for both axes, its arguments, and what is cut."""
    step, args = gpt()
    decorated = parallel(step, BOTH)
    return decorated, args, cuts(decorated, *args)


def of_parameters(found: dict[str, int]) -> dict[str, int]:
    return {name.split("'")[-2]: dim for name, dim in found.items() if name.startswith("params")}


def sent(decorated: Any, *args: Any, axis: str = "model") -> dict[Transfer, int]:
    """What a device sends along an axis."""
    program = decorated.program(*args)
    axes = axes_of_mesh(decorated._mesh)
    found = transfers(program.emitted()[0], axes)
    return {one: count for one, count in found.items() if one.groups == along(axes, [axis])}


@pytest.mark.parametrize("sizes", [{"model": 4}, {"model": 2, "data": 3}], ids=str)
def test_columns_then_rows(sizes: dict[str, int]) -> None:
    found = exact_cuts(*mlp(layers=2), sizes)
    assert of_parameters(found) == {"in0": 1, "bias0": 0, "out0": 0, "in1": 1, "bias1": 0, "out1": 0}
    for moment in ("mu", "nu"):  # which follow their parameters
        assert {name[-7:]: d for name, d in found.items() if f".{moment}" in name} == {
            name[-7:]: d for name, d in found.items() if name.startswith("params")
        }


def test_messages_of_columns_then_rows() -> None:
    step, args = mlp()
    found = sent(parallel(step, BOTH), *args)
    assert [(one.kind, one.elements) for one in found] == [("all-reduce", BATCH // 2 * WIDTH)]
    assert sum(found.values()) == 1  # forward alone: nobody asks for the gradient of x


def test_heads_columns_and_rows_of_a_transformer() -> None:
    """And two messages a layer and direction; over the axis of data gradients of what a device holds, and the loss."""
    decorated, args, cut = of_a_gpt()
    found = {name: dim for name, dim in of_parameters(cut).items() if name != "embed"}
    assert found == {"q": 2, "k": 2, "v": 2, "o": 1, "up": 2, "down": 1}
    layers = {one: count for one, count in sent(decorated, *args).items() if one.place}
    assert {one.kind for one in layers} == {"all-reduce"}
    assert {one.elements for one in layers} == {BATCH // 2 * TIME * WIDTH}
    assert sum(one.times * count for one, count in layers.items()) == 4 * LAYERS
    held = {name: x.size // (4 if f"params['layers']['{name}']" in cut else 1) for name, x in args[0]["layers"].items()}
    embed = args[0]["embed"].size // (4 if "params['embed']" in cut else 1)
    sums = {one: count for one, count in sent(decorated, *args, axis="data").items() if one.kind == "all-reduce"}
    assert sum(one.elements * one.times * count for one, count in sums.items()) == sum(held.values()) + embed + 1


def test_heads_that_the_devices_do_not_divide() -> None:
    step, args = gpt(heads=3)
    found = of_parameters(cuts(parallel(step, {"model": 4}), *args))
    assert 2 not in {found.get(name) for name in "qkv"}
    assert found.get("o") != 1
    assert (found["up"], found["down"]) == (2, 1)


def test_sizes_that_the_devices_do_not_divide() -> None:
    assert of_parameters(exact_cuts(*mlp(inner=255), BOTH)) == {"in0": 1, "bias0": 0, "out0": 0}
    step, args = mlp(inner=5)
    found = of_parameters(cuts(parallel(step, {"model": 4}), *args))  # three of eight would be padding
    assert (found.get("in0"), found.get("bias0"), found.get("out0")) in [(None,) * 3, (0, None, 1)]


WHOLE: dict[str, tuple[dict[str, int], tuple[Step, tuple[Any, ...]]]] = {
    "one device": ({"data": 2, "model": 1}, mlp()),
    "a small step": (
        {"model": 4},
        trained(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), np.eye(8), np.ones((BATCH, 8)), optax.sgd(0.1)),
    ),
    "numbers": (
        BOTH,
        (lambda scale, count, x: (scale - 0.1 * jnp.mean(scale * x), count + 1, jnp.mean(x)),
         (np.float64(2), np.int32(0), np.ones((BATCH, 3)))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole(name: str) -> None:
    sizes, (step, args) = WHOLE[name]
    assert exact_cuts(step, args, sizes) == {}


@pytest.mark.parametrize("wrap", [lambda tx: optax.apply_if_finite(tx, 3), lambda tx: optax.MultiSteps(tx, 2)])
def test_an_optimizer_in_a_branch_follows_its_parameters(wrap: Any) -> None:
    step, args = mlp(tx=wrap(optax.adam(1e-2)))
    found = cuts(parallel(step, {"data": 2, "model": 2}), *args)
    for name, dim in {"in0": 1, "out0": 0}.items():
        parts = {leaf: d for leaf, d in found.items() if f"['{name}']" in leaf}
        assert set(parts.values()) == {dim}
        assert len(parts) == 1 + sum(np.shape(x) == np.shape(args[0][name]) for x in jax.tree.leaves(args[1]))


def test_keys_stay_whole() -> None:
    def step(w: Any, keys: Any, x: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.normal(key, (256,)))(keys)
        loss = lambda w: jnp.mean((jnp.tanh(x @ w["in"] + noise.mean(0)) @ w["out"]) ** 2)
        grads = jax.grad(loss)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys)

    args = random(0, **{"in": (WIDTH, 256), "out": (256, WIDTH)}), jax.random.split(jax.random.key(0), 8)
    assert cuts(parallel(step, {"model": 4}), *args, np.ones((BATCH, WIDTH))) == {"w['in']": 1, "w['out']": 0}


def test_layouts_that_are_given_are_all() -> None:
    step, args = mlp()
    assert cuts(parallel(step, {"model": 4}, layouts={}), *args) == {}
    named = parallel(step, {"model": 4}, layouts={r"\['out0'\]": 1})
    assert of_parameters(cuts(named, *args)) == {"out0": 1}


@pytest.fixture
def placings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many entries as there were placings of searches."""
    found: list[int] = []
    cost = search._Cost.__call__
    monkeypatch.setattr(search._Cost, "__call__", lambda self, cuts: (found.append(1), cost(self, cuts))[1])
    return found


def test_one_search_for_all_calls(placings: list[int]) -> None:
    step, (*state, batch) = mlp()
    decorated = parallel(step, BOTH)
    *state, _ = decorated(*state, batch)
    searched = len(placings)
    assert searched
    for _ in range(2):
        *state, _ = decorated(*state, batch)
    # Another step that is given what this one returned takes it as it is, and the rest follows.
    shadow = jax.tree.map(lambda x: np.zeros(x.shape), state[0])
    look = parallel(
        lambda params, mean, x: (
            jnp.mean(jnp.tanh(x @ params["in0"] + params["bias0"]) @ params["out0"]),
            jax.tree.map(lambda p, m: 0.1 * p + 0.9 * m, params, mean),
        ),
        BOTH,
    )
    found = cuts(look, state[0], shadow, batch)
    assert {name: dim for name, dim in found.items() if name.startswith("mean")} == {
        f"mean['{name}']": dim for name, dim in {"in0": 1, "bias0": 0, "out0": 0}.items()
    }
    look(state[0], shadow, batch)
    assert len(placings) == searched


def test_layers_alike_are_searched_together(placings: list[int]) -> None:
    step, args = mlp(layers=8)
    found = of_parameters(cuts(parallel(step, {"model": 4}), *args))
    assert found == {f"{name}{k}": dim for k in range(8) for name, dim in {"in": 1, "bias": 0, "out": 0}.items()}
    assert len(placings) < 60


def test_no_more_placings_than_allowed(placings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_FEWEST", 5)
    monkeypatch.setattr(search, "_OPERATIONS", 0)
    step, args = gpt()
    cuts(parallel(step, {"model": 4}), *args)
    assert len(placings) == 5


SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import test_model_axis as here
print(json.dumps(here.in_order()))
"""


def in_order() -> list[Any]:
    step, args = mlp(layers=2)
    return [[list(one) for one in cut.items()] for cut in (of_a_gpt()[2], cuts(parallel(step, BOTH), *args))]


def test_every_process_finds_the_same() -> None:
    folder = Path(__file__).parent
    devices = "--xla_force_host_platform_device_count=8"
    env = {"PYTHONHASHSEED": "1", "XLA_FLAGS": devices, "JAX_ENABLE_X64": "1", "JAXDIST_MACHINE": "cpu"}
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(folder), str(folder.parent)])]
    done = subprocess.run(command, env=jobs.environment(env), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == in_order()
