"""What the model axis cuts where nobody says it, which mesh is chosen, and what that sends."""

import dataclasses
import math
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import programs
from harness.check import check_steps, close, compare, decorated, mesh, train_step
from harness.errors import raises
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

pytestmark = pytest.mark.usefixtures("messages_take_time")

BATCH, TIME, WIDTH, HEADS, LAYERS, WORDS = 8, 16, 64, 4, 3, 32
BOTH = {"data": 2, "model": 4}
ADAM = optax.adam(1e-2, eps=1e-3)


def random(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) / math.sqrt(shape[-2:][0]) for name, shape in shapes.items()}


def trained(loss_fn: Any, params: Any, batch: Any, tx: Any = ADAM) -> tuple[Any, tuple[Any, ...]]:
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(tx.init, params))
    return train_step(loss_fn, tx), (params, state, batch)


def mlp(inner: int = 256, layers: int = 1, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    def loss_fn(p: Any, x: Any) -> Any:
        for k in range(layers):
            x = jnp.tanh(x @ p[f"in{k}"] + p[f"bias{k}"]) @ p[f"out{k}"]
        return jnp.mean(x**2)

    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(layers):
        shapes |= {f"in{k}": (WIDTH, inner), f"bias{k}": (inner,), f"out{k}": (inner, WIDTH)}
    return trained(loss_fn, random(0, **shapes), np.random.default_rng(1).normal(size=(BATCH, WIDTH)), **options)


def gpt(heads: int = HEADS) -> tuple[Any, tuple[Any, ...]]:
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


def cuts(step: Any, args: Any, on: dict[str, int], **options: Any) -> dict[str, int]:
    return dict(jaxdist.explain(decorated(step, on, **options), *args).cut)


def of_parameters(found: dict[str, int]) -> dict[str, int]:
    return {name.split("'")[-2]: dim for name, dim in found.items() if name.startswith("params")}


def exact_cuts(step: Any, args: tuple[Any, ...], on: dict[str, int]) -> dict[str, int]:
    """What is cut of a step that is seen to be exact, two calls long."""
    *state, batch = args
    check_steps(step, tuple(state), [batch, batch], on=on, tolerance=1e-9)
    return cuts(step, args, on)


# --- what is cut


@pytest.mark.parametrize("sizes", [{"model": 4}, {"model": 2, "data": 3}], ids=str)
def test_columns_then_rows(sizes: dict[str, int]) -> None:
    found = exact_cuts(*mlp(layers=2), sizes)
    assert of_parameters(found) == {"in0": 1, "bias0": 0, "out0": 0, "in1": 1, "bias1": 0, "out1": 0}
    for moment in ("mu", "nu"):  # which follow their parameters
        assert {name[-7:]: d for name, d in found.items() if f".{moment}" in name} == {
            name[-7:]: d for name, d in found.items() if name.startswith("params")
        }


def test_heads_columns_and_rows_of_a_transformer() -> None:
    """Two messages a layer and direction over the model axis; over data the gradients of what a device holds."""
    step, args = gpt()
    found = of_parameters(cuts(step, args, BOTH))
    embed = found.pop("embed", None)
    assert found == {"q": 2, "k": 2, "v": 2, "o": 1, "up": 2, "down": 1}
    ops = programs.of(decorated(step, BOTH), *args)
    model, data = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    in_layers = [op for op in ops if op.groups == model and op.loops]
    assert {(op.name, op.size) for op in in_layers} == {("all-reduce", BATCH // 2 * TIME * WIDTH)}
    assert len(in_layers) == 4
    held = sum(x.size // 4 for x in args[0]["layers"].values()) + WORDS * WIDTH // (1 if embed is None else 4)
    assert sum(op.size for op in ops if op.name == "all-reduce" and op.groups == data) == held + 1
    own, whole = programs.flops(decorated(step, BOTH), *args), programs.flops(jax.jit(step), *args)
    assert own <= (1.05 / 8 if embed is not None else 1.5 / 8) * whole, "the work is divided"


def test_what_the_devices_do_not_divide() -> None:
    found = of_parameters(cuts(*gpt(heads=3), {"model": 4}))
    assert 2 not in {found.get(name) for name in "qkv"}
    assert (found["up"], found["down"]) == (2, 1)
    assert of_parameters(exact_cuts(*mlp(inner=255), BOTH)) == {"in0": 1, "bias0": 0, "out0": 0}


WHOLE: dict[str, tuple[dict[str, int], tuple[Any, tuple[Any, ...]]]] = {
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
    found = cuts(step, args, {"data": 2, "model": 2})
    for name, dim in {"in0": 1, "out0": 0}.items():
        parts = {leaf: d for leaf, d in found.items() if f"['{name}']" in leaf}
        assert set(parts.values()) == {dim}
        assert len(parts) == 1 + sum(np.shape(x) == np.shape(args[0][name]) for x in jax.tree.leaves(args[1]))


def test_layouts_that_are_given_are_all() -> None:
    step, args = mlp()
    assert cuts(step, args, {"model": 4}, layouts={}) == {}
    assert of_parameters(cuts(step, args, {"model": 4}, layouts={r"\['out0'\]": 1})) == {"out0": 1}


def test_what_another_step_returned_is_taken_as_it_is() -> None:
    step, (*state, batch) = mlp()
    *state, _ = decorated(step, BOTH)(*state, batch)
    shadow = jax.tree.map(lambda x: np.zeros(x.shape), state[0])
    look = lambda params, mean, x: (
        jnp.mean(jnp.tanh(x @ params["in0"] + params["bias0"]) @ params["out0"]),
        jax.tree.map(lambda p, m: 0.1 * p + 0.9 * m, params, mean),
    )
    found = cuts(look, (state[0], shadow, batch), BOTH)
    assert {name: dim for name, dim in found.items() if name.startswith("mean")} == {
        f"mean['{name}']": dim for name, dim in {"in0": 1, "bias0": 0, "out0": 0}.items()
    }


def test_explain_says_what_is_sent() -> None:
    step, args = mlp(inner=1024, layers=2)
    found = jaxdist.explain(decorated(step, BOTH), *args)
    lines = str(found).splitlines()
    shares = dict(re.findall(r"over (\w+): [\d.]+ [kM]B, (\d+)% of all bytes", str(found)))
    assert shares.keys() == {"data", "model"}
    assert sum(map(int, shares.values())) in (99, 100, 101)
    assert re.search(r"over \w+: all-reduce \(\w+\) at \S+\.py:\d+$", str(found), re.MULTILINE)
    assert (len(lines) <= 25, max(map(len, lines)) <= 100) == (True, True)
    everything = str(jaxdist.explain(decorated(step, BOTH), *args, verbose=True))
    assert len(everything.splitlines()) > len(lines)


# --- the mesh that is chosen


def halves(w: Any, x: Any) -> Any:
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


def case(rows: int, width: int, hidden: int, places: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w = {"up": rng.normal(size=(width, hidden)) / width**0.5, "down": rng.normal(size=(hidden, width)) / hidden**0.5}
    return jax.tree.map(jnp.asarray, w), rng.normal(size=(rows, places, width) if places else (rows, width))


SMALL, WIDE = case(512, 16, 16), case(1, 64, 4096, 8)


def auto(step: Any = halves, **options: Any) -> Any:
    return jaxdist.parallel(step, mesh="auto", **options)


def chosen(tree: Any) -> dict[str, int]:
    """The mesh of a result."""
    sharding: Any = next(x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return dict(sharding.mesh.shape)


@pytest.mark.parametrize(("args", "want"), [(SMALL, {"data": 8}), (WIDE, {"model": 8})])
def test_rows_are_divided_and_else_the_model(args: Any, want: dict[str, int]) -> None:
    step = auto()
    got = step(*args)
    compare(jaxdist.unshard(got), jax.jit(halves)(*args))
    assert chosen(got) == want
    assert jaxdist.explain(auto(), *args).mesh.startswith(",".join(f"{k}={v}" for k, v in want.items()))
    if args is WIDE:  # once and for all
        assert chosen(step(WIDE[0], np.ones((64, 64)))) == want
    for topology, size in (("4xcpu", 4), ("8xcpu", 8)):
        assert dict(jaxdist.plan(auto(), *args, topology=topology).mesh) == {next(iter(want)): size}


def test_the_mesh_of_state_in_slices_is_taken() -> None:
    (w, x), on = SMALL, mesh({"data": 2, "model": 4})
    cut = {"up": jax.device_put(w["up"], NamedSharding(on, P(None, "model"))), "down": w["down"]}
    got = auto()(cut, x)
    close(got, jax.jit(halves)(w, x))
    assert chosen(got) == {"data": 2, "model": 4}


def test_memory_is_a_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    context = jaxdist.get_context()
    meshes = []
    for memory in (0, 1):  # unknown, and one byte
        monkeypatch.setattr(context, "kind", dataclasses.replace(context.kind, memory=memory))
        meshes.append(jaxdist.explain(auto(), *SMALL).mesh)
    assert "memory" in meshes[1]
    assert "memory" not in meshes[0]


def test_a_chosen_mesh_is_as_if_it_had_been_given(tmp_path: Path) -> None:
    tx = jaxdist.zero(optax.adam(1e-2), level=1)
    (w, x), step = case(2, 32, 64), train_step(lambda w, x: halves(w, x)[1], jaxdist.zero(optax.adam(1e-2), level=1))
    many, plain = auto(step), jax.jit(step)
    *state, _ = many(w, tx.init(w), x)
    *first, _ = plain(w, tx.init(w), x)
    want = plain(*first, x)
    jaxdist.check_sync(state)
    jaxdist.save(tmp_path, tuple(state), 1)
    restored = jaxdist.restore(tmp_path, jax.eval_shape(lambda: (w, tx.init(w))))
    for call, given in ((many, restored), (auto(step), state)):
        close(call(*given, x), want)
    again = pickle.loads(pickle.dumps(auto(halves)))
    assert chosen(again(*WIDE)) == {"model": 8}


def test_an_error_of_the_step_is_the_steps() -> None:
    step = auto()
    with raises(TypeError, "dot_general"):
        step(SMALL[0], np.ones((8, 5)))
    assert chosen(step(*WIDE)) == {"model": 8}, "no mesh was chosen for it"


# --- a sequence in slices


def test_a_sequence_in_slices() -> None:
    """Keys and values, or heads, travel; the work is divided."""
    _, (params, opt, words) = gpt()
    words = np.random.default_rng(1).integers(0, WORDS, (1, 4 * TIME))
    on = {"sequence": 4}

    def of_slices(params: Any, opt: Any, batch: Any) -> Any:
        def loss_fn(p: Any, batch: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dhk->bthk", p["embed"][batch[0]], p["layers"][name][0]) for name in "qkv")
            scores = jnp.einsum("bthk,bshk->bhts", q, k)
            x = jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores), v, p["layers"]["o"][0])
            return optax.softmax_cross_entropy_with_integer_labels(x @ p["embed"].T, batch[1]).mean()

        return train_step(loss_fn, ADAM)(params, opt, batch)

    args = params, opt, (words, np.roll(words, 1))
    found = programs.of(decorated(of_slices, on), *args)
    kinds = Counter(op.name for op in found if op.groups)
    assert kinds["all-gather"] + kinds["all-to-all"] > 0
    assert programs.flops(decorated(of_slices, on), *args) <= 1.05 / 4 * programs.flops(jax.jit(of_slices), *args)
