"""What may go wrong on several axes: each leaf of two calls as on one device, in float64."""

import math
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from harness.check import check, check_steps, compare, decorated, mesh, train_step
from harness.errors import raises
from jax import lax

import jaxdist
from jaxdist.checkpoint import digest
from jaxdist.placements.search import options

X = np.random.default_rng(0).normal(size=(2, 21, 6))
TOKENS = np.random.default_rng(1).integers(0, 11, (2, 21, 7))
BOTH = {"data": 2, "model": 2}


def array(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / math.sqrt(shape[0]))


PARAMS = {"in": array(6, 10), "b": array(10), "out": array(10, 4)}
LAYOUTS = {"'in'": 1, "'b'": 0, "'out'": 0}
ADAM = optax.adam(1e-2, eps=1e-2)


def mlp(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ p["in"] + p["b"]) @ p["out"]) ** 2)


def moved(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def test_a_constant_is_added_to_a_sum_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one axis the sum is made after the addition, over the other before."""

    def step(w: Any, x: Any) -> Any:
        total = jnp.einsum("btd,bte->de", x, x)
        return w, (total + 1.0).sum(0), total.sum(1)

    for seed in range(12):
        drawn = random.Random(seed)
        monkeypatch.setattr(options, "cost", lambda *_, drawn=drawn, **__: drawn.random())
        check(step, jnp.ones(3), X[:, :4], on={"data": 2, "sequence": 2})


def test_padding_of_state_does_not_keep_a_loop_going() -> None:
    def turns(n: Any) -> Any:
        until_one = lambda s: (jnp.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1)
        return lax.while_loop(lambda s: (s[0] != 1) & (s[1] < 1_000), until_one, (n, 0))[1]

    step = lambda n, x: (n, jax.vmap(turns)(n))
    state, x = jaxdist.shard(jnp.arange(1, 6)), np.ones((8, 1))
    _, counted = jaxdist.data_parallel(step)(state, x)
    assert max(int(np.max(shard.data)) for shard in getattr(counted, "array", counted).addressable_shards) < 10


# --- leaves that axes cut


def odd_sizes(p: Any, x: Any) -> Any:
    h = jnp.pad(x, ((0, 0), (0, 1))) @ p["a"] @ p["b"] + p["c"]
    return jnp.mean(h @ p["b"].T @ p["a"].T) ** 2 + jnp.mean(jax.nn.logsumexp(h, -1)) + jnp.max(p["c"])


@pytest.mark.parametrize("layouts", [{"'a'": 0, "'b'": 0, "'c'": 0}, {"'a'": 1, "'b'": 1}])
def test_sizes_that_neither_axis_divides(layouts: Any) -> None:
    """21 rows over 2, a leaf of 7 over 3 devices, and again over 2 in the same dimension, or in another one."""
    params = {"a": array(7, 5), "b": array(5, 7), "c": array(7)}
    step = train_step(odd_sizes, jaxdist.zero(ADAM, 3))
    got = check_steps(step, (params, ADAM.init(params)), X, on={"data": 2, "model": 3}, layouts=layouts)
    assert got[0]["a"].shape == (7, 5)


@pytest.mark.parametrize(("dim", "shape"), [(0, (7,)), (0, (7, 5)), (1, (2, 13))])
def test_a_leaf_that_two_axes_pad(dim: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    """On the host and in a checkpoint it has its own shape."""
    tx = jaxdist.zero(optax.sgd(0.0), 3)
    step = decorated(train_step(lambda p, x: p["w"].sum() * x.mean(), tx), {"data": 3, "model": 2}, layouts={"w": dim})
    params = {"w": np.arange(math.prod(shape), dtype=float).reshape(shape)}
    state = params, tx.init(params)
    for _ in range(2):
        *state, _ = step(*state, X)
    jaxdist.save(tmp_path, state[0], step=1)
    for one in (state[0], jaxdist.restore(tmp_path, params)):
        np.testing.assert_array_equal(np.asarray(one["w"]), params["w"])


def times_a_sum(state: Any, x: Any) -> Any:
    return {"v": state["v"], "w": (state["w"].reshape(12) * (x @ state["v"]).sum(0)).reshape(3, 4)}, 0


def plus_a_sum(state: Any, x: Any) -> Any:
    return {"v": state["v"], "w": (state["w"].reshape(12) + (x @ state["v"]).sum(0)).reshape(3, 4)}, 0


def chosen_by_a_slice(state: Any, x: Any) -> Any:
    total = (x @ state["v"]).sum(0)
    return {"v": state["v"], "w": jnp.where(state["w"].reshape(12) > 0, total, -total).reshape(3, 4)}, 0


@pytest.mark.parametrize("step", [times_a_sum, plus_a_sum, chosen_by_a_slice])
@pytest.mark.parametrize("sizes", [BOTH, {"model": 4, "data": 2}], ids=str)
def test_a_sum_over_both_axes_meets_slices_of_one(step: Any, sizes: Any) -> None:
    """Slices that no reduce-scatter makes: the sum over the model axis is not put off beyond its cut."""
    state = {"v": array(6, 12), "w": array(3, 4)}
    check_steps(step, (state,), X[:, :8], on=sizes, layouts={"'v'": 0, "'w'": 1})


@pytest.mark.parametrize("sizes", [{"sequence": 2}, {"model": 4}], ids=str)
def test_one_example(sizes: dict[str, int]) -> None:
    params = {"table": array(11, 6), "q": array(6, 6), "k": array(6, 6), "out": array(6, 11)}

    def loss_fn(p: Any, tokens: Any) -> Any:
        x = p["table"][tokens]
        scores = jnp.einsum("btd,bsd->bts", x @ p["q"], x @ p["k"])
        x = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((7, 7), bool)), scores, -1e9)) @ x
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ p["out"], tokens)
        return loss.mean() + 0.1 * jnp.max(x @ p["table"].T)

    layouts = {"'table'": 0, "'q'": 1, "'k'": 1, "'out'": 1} if "model" in sizes else None
    check_steps(train_step(loss_fn, ADAM), (params, ADAM.init(params)), TOKENS[:, :1], on=sizes, layouts=layouts)


def test_statistics_with_fewer_dimensions_than_their_parameter() -> None:
    params, tx = {"in": array(6, 8), "b": array(8), "out": array(8, 4)}, optax.adafactor(1e-2, min_dim_size_to_factor=4)
    layouts = {"in": 1, "out": -2, "b": 0}
    got = check_steps(train_step(mlp, tx), (params, tx.init(params)), X, on=BOTH, layouts=layouts)
    assert got[0]["in"].sharding.spec[1] == "model"
    assert {x.ndim for x in jax.tree.leaves(got[1]) if x.size > 1} == {1}


def test_keys_integers_and_numbers() -> None:
    def step(state: Any, x: Any) -> Any:
        key, sub = jax.random.split(state["key"])
        noise = jax.random.normal(sub, state["w"].shape)
        counts = state["counts"].at[jnp.argmax(x @ state["w"], -1)].add(1)
        return {
            "w": state["w"] - state["rate"] * jnp.mean(x) * noise, "key": key, "rate": state["rate"] * 0.9,
            "keys": jax.vmap(lambda key: jax.random.fold_in(key, 1))(state["keys"]), "n": state["n"] + 1,
            "counts": counts, "bytes": state["bytes"] * 3 + jnp.uint8(200), "even": state["even"] ^ (counts > 2),
        }, {"bits": jax.random.bits(sub, (5,)), "whole": counts // 2, "each": x @ state["w"]}  # fmt: skip

    state = {
        "w": array(6, 9), "key": jax.random.key(0), "rate": 0.1, "keys": jax.random.split(jax.random.key(1), 6), "n": 0,
        "counts": jnp.zeros(9, int), "bytes": jnp.arange(7, dtype=jnp.uint8), "even": jnp.zeros(9, bool),
    }  # fmt: skip
    layouts = {"'w'": 1, "'keys'": 0, "'counts'": 0, "'bytes'": 0, "'even'": 0}
    check_steps(step, (state,), X, on={"model": 2, "data": 2, "sequence": 2}, layouts=layouts)


@pytest.mark.parametrize("layout", [0, 1])
def test_extremes_keep_nan(layout: int) -> None:
    def step(w: Any, x: Any) -> Any:
        return w, (jnp.max(x @ w), jnp.max(w), jnp.min(w, 0), jnp.argmax(w), jnp.max(x[:, :, None] * w, (0, 1)))

    check_steps(step, (array(6, 9).at[3, 7].set(jnp.nan),), X, on=BOTH, layouts={"w": layout})


# --- optimizers


@pytest.mark.parametrize("level", [0, 3])
def test_clipping_counts_each_slice_once(level: Any) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2, eps=1e-2))

    def norms(tx: Any) -> Any:
        def step(params: Any, opt: Any, x: Any) -> Any:
            grads = jax.grad(mlp)(params, x)
            updates, opt = tx.update(grads, opt, params)
            found = optax.global_norm(grads), jax.tree.map(jnp.linalg.norm, grads)
            return optax.apply_updates(params, updates), opt, found

        return step

    step = norms(jaxdist.zero(tx, level) if level else tx)
    check_steps(step, (PARAMS, tx.init(PARAMS)), X, on=BOTH, plain=norms(tx), layouts=LAYOUTS)


@pytest.mark.parametrize(("level", "offload"), [(1, True), (3, False)])
def test_whole_matrices_and_offload_under_a_model_axis(level: Any, offload: bool) -> None:
    params, tx = {"a": array(6, 10), "b": array(10, 10), "c": array(10, 10)}, optax.contrib.muon(1e-2, ns_steps=2)

    def loss_fn(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]) ** 2 + jnp.mean((x @ p["a"]) ** 2)

    step, plain = train_step(loss_fn, jaxdist.zero(tx, level, offload=offload)), train_step(loss_fn, tx)
    check_steps(step, (params, tx.init(params)), X, on=BOTH, plain=plain, layouts={"'a'": 1, "'b'": 0})


# --- loops, branches, names


def test_loops_split_by_one_axis_and_summed_over_the_other() -> None:
    """A gradient that is added up in a loop is in slices of the model axis, and a summand of the data axis."""

    def step(params: Any, x: Any) -> Any:
        def body(total: Any, scale: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(mlp)(params, x * scale)), scale * 2

        grads, scales = lax.scan(body, jax.tree.map(jnp.zeros_like, params), jnp.arange(1.0, 4.0))

        def turn(i: Any, carried: Any) -> Any:
            p, total = carried
            return moved(p, grads), total + mlp(p, x) + i * jnp.sum(x)

        params, total = lax.fori_loop(0, 3, turn, (params, 0.0))
        small = lax.while_loop(
            lambda p: jnp.linalg.norm(p["out"]) > 0.5, lambda p: jax.tree.map(lambda w: 0.7 * w, p), params
        )
        return small, (total, scales)

    check_steps(step, (PARAMS,), X, on=BOTH, layouts=LAYOUTS)


def test_branches_on_what_one_axis_knows() -> None:
    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(mlp)(params, x)
        halve = lambda tree: jax.tree.map(lambda g: g / 2, tree)
        grads = lax.cond(jnp.max(params["in"]) > 0.5, halve, lambda tree: tree, grads)  # that of the model
        grads = lax.cond(jnp.sum(x) > 0, halve, lambda tree: tree, grads)  # that of data
        picked = lax.switch(jnp.argmax(params["b"]) % 3, [jnp.sum, jnp.max, lambda x: x[0]], x[:, 0])
        return moved(params, grads), picked

    check_steps(step, (PARAMS,), X, on=BOTH, layouts=LAYOUTS)


@pytest.mark.parametrize(("on", "layouts"), [(BOTH, LAYOUTS), ({"data": 2}, None)])
def test_names_of_axes_have_size_one(on: Any, layouts: Any) -> None:
    """Those of all axes at once, beside one name of your own."""

    def named(of: Any, at: Any) -> Any:
        return lambda params, x: (moved(params, of(jax.grad(mlp)(params, x))), at(x))

    step = named(
        lambda grads: lax.pmean(lax.psum(grads, ("data", "model")), "batch"),
        lambda x: (lax.all_gather(x.mean(), "sequence"), lax.axis_index("model"), lax.pmax(x.max(), "model")),
    )
    plain = named(lambda grads: grads, lambda x: (x.mean()[None], jnp.int32(0), x.max()))
    check_steps(step, (PARAMS,), X, on=on, plain=plain, layouts=layouts)


# --- lookups in a table that devices have in slices of rows

LOOKUPS: list[tuple[str, str, int, dict[str, int]]] = [
    ("clip", "uint8", 37, {"data": 1, "model": 4}),
    ("fill", "int8", 37, {"data": 2, "model": 3}),
    ("promise_in_bounds", "int64", 48, {"data": 2, "model": 3}),
]


@pytest.mark.parametrize(("mode", "dtype", "rows", "sizes"), LOOKUPS)
def test_a_vocabulary(mode: str, dtype: str, rows: int, sizes: dict[str, int]) -> None:
    """An embedding, logits, and those at the labels; of some tokens there are no rows."""
    rng = np.random.default_rng(rows)
    low, high = (0, rows) if mode == "promise_in_bounds" else (-3 if np.dtype(dtype).kind == "i" else 0, rows + 4)
    tokens = rng.integers(low, high, (6, 2)).astype(dtype)  # few: what is looked up travels, not the table

    def step(params: Any, tokens: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            hidden = params["table"].at[tokens].get(mode=mode, fill_value=7.0, wrap_negative_indices=False)
            filled = jnp.sum(hidden == 7)
            logits = jnp.tanh(hidden) @ params["out"]
            labels = jnp.clip(tokens, 0, rows - 1)[..., None].astype(jnp.int32)
            own = jnp.take_along_axis(logits, labels, -1, mode=mode)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - own), (filled, own)

        found, grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return moved(params, grads), found

    check_steps(
        step, ({"table": array(rows, 6), "out": array(6, rows)},), [tokens], on=sizes, layouts={"table": 0, "out": 1}
    )


@pytest.mark.parametrize(("mode", "rows", "dim", "sizes"), [
    ("clip", 37, 0, {"data": 1, "model": 4}), ("drop", 48, 0, {"data": 2, "model": 3}),
    ("clip", 48, 1, {"data": 2, "model": 3}),
])  # fmt: skip
def test_rows_that_change(mode: str, rows: int, dim: int, sizes: dict[str, int]) -> None:
    """Each kind of change, of stored rows and of zeros; rows that are not there and those that come twice."""

    def step(table: Any, x: Any) -> Any:
        mean, at = jnp.mean(x), jnp.array([1, 5, rows - 1, rows + 3, -90, 7, 5])
        for change in ("add", "multiply", "min", "max"):
            table = getattr(table.at[at], change)(mean + jnp.arange(7.0)[:, None], mode=mode)
        table = table.at[at[:2]].set(mean, mode=mode).at[at[:2], at[:2]].add(mean, mode=mode)
        made = jnp.zeros_like(table).at[at, 2].add(mean * jnp.arange(7.0), mode=mode)
        return table + made, (table[at[1:3]], jnp.sum(made), jnp.full(rows, 2.0).at[at].add(mean, mode=mode))

    check_steps(step, (array(rows, 6),), [array(12, 3)], on=sizes, layouts={"": dim})


# --- the state of one mesh on another

WAYS: dict[str, tuple[dict[str, int], dict[str, int], dict[str, Any]]] = {
    "model": ({"model": 4}, {"'a'": 1, "'b'": 0, "'d'": 0}, {}),
    "level 3": ({"data": 2, "model": 2}, {"'a'": 0, "'b'": 0, "'c'": 0, "'d'": 1}, {"level": 3}),
    "level 3 over 6": ({"data": 2, "model": 3}, {"'a'": 0, "'b'": 0, "'c'": 0}, {"level": 3}),
    "within": ({"data": 4, "model": 2}, {"'a'": 0, "'d'": 1}, {"level": 3, "within": 2}),
    "sequence": ({"data": 2, "model": 2, "sequence": 2}, {"'a'": 1}, {"level": 1}),
    "offload": ({"data": 2, "model": 2}, {"'a'": 0, "'d'": 1}, {"level": 3, "offload": True}),
}
"""Mesh, layouts, and how `zero` keeps the state."""


def stepper(tx: Any) -> Any:
    def loss_fn(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.pad(x, ((0, 0), (0, 1))) @ p["a"] @ p["b"] + p["c"]) ** 2) + jnp.mean((x @ p["d"]) ** 2)

    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], x)
        updates, opt_state = tx.update(grads, state["o"], state["p"])
        key = jax.random.split(state["key"])[0]
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state, "key": key, "n": state["n"] + 1}, loss

    return step


def start() -> dict[str, Any]:
    p = {"a": array(7, 5), "b": array(5, 7), "c": array(7), "d": array(6, 10)}
    return {"p": p, "o": ADAM.init(p), "key": jax.random.key(1), "n": 0}


def on_way(way: str) -> Any:
    sizes, layouts, zero = WAYS[way]
    return decorated(stepper(jaxdist.zero(ADAM, **zero) if zero else ADAM), sizes, layouts=layouts)


@pytest.mark.parametrize(
    ("one", "other"),
    [("level 3", "offload"),
     *(pytest.param(*pair, marks=pytest.mark.slow)
       for pair in (("within", "sequence"), ("sequence", "level 3 over 6"), ("offload", "model")))],
)  # fmt: skip
def test_from_any_mesh_to_any_other(one: str, other: str, tmp_path: Any) -> None:
    """By way of a checkpoint, and passed on where the devices are the same: the bits are kept, and training goes on."""
    rows, plain = array(9, 6), jax.jit(stepper(ADAM))
    first, second = on_way(one), on_way(other)
    state, _ = first(first(start(), rows)[0], rows)
    like, _ = second(start(), rows)
    want, _ = plain(plain(start(), rows)[0], rows)
    compare(jaxdist.unshard(state), want)
    jaxdist.check_sync(state)
    jaxdist.save(tmp_path, state, 1)
    restored = jaxdist.restore(tmp_path, like)
    assert digest(restored) == digest(state) == digest(jaxdist.restore(tmp_path, start()))
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert getattr(x, "sharding", None) == getattr(y, "sharding", None)
    then, _ = plain(want, rows)
    compare(jaxdist.unshard(second(restored, rows)[0]), then)
    if math.prod(WAYS[one][0].values()) == math.prod(WAYS[other][0].values()):
        compare(jaxdist.unshard(second(state, rows)[0]), then)
        compare(jaxdist.unshard(state), want)  # what was passed on stays
    else:
        with raises(ValueError, "state['o'][0].mu['a']", "0 to 5", "0 to 7"):
            second(state, rows)


@pytest.mark.parametrize("way", WAYS)
def test_copies_are_compared_along_each_axis(way: str) -> None:
    """`check_sync` names the device whose copy has other bits."""
    step = on_way(way)
    state, _ = step(start(), array(9, 6))
    w = state["p"]["d"]
    if not isinstance(w, jax.Array):  # padded slices
        return
    shards = [jax.device_put(np.array(s.data) + (s.device.id == 3), s.device) for s in w.addressable_shards]
    other = jax.make_array_from_single_device_arrays(w.shape, w.sharding, shards)
    (own,) = [s.index for s in w.addressable_shards if s.device.id == 3]
    if sum(s.index == own for s in w.addressable_shards) == 1:
        jaxdist.check_sync({"d": other})
        return
    with raises(jaxdist.SyncError, "['d']", "rank 0", "cpu:3"):
        jaxdist.check_sync({"d": other})


# --- heads in place of keys and values


@pytest.mark.parametrize(("keys", "on"), [(8, {"sequence": 4}), (4, {"sequence": 2, "model": 2})])
def test_attention_over_a_sequence_in_slices(keys: int, on: dict[str, int]) -> None:
    def loss(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        out = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v)
        return jnp.mean(jnp.sin(x + jnp.einsum("bthk,hkd->btd", out.reshape(*out.shape[:2], -1, 4), p["o"])))

    params = {"q": array(16, 8, 4), "k": array(16, keys, 4), "v": array(16, keys, 4), "o": array(8, 4, 16)}
    state = params, ADAM.init(params)
    check_steps(train_step(loss, ADAM), state, [array(2, 32, 16)], on=on)


# --- images cut along their height


@pytest.mark.parametrize("on", [{"sequence": 4}, {"data": 2, "sequence": 2}], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(16, 3), (15, 5), (13, 1), (9, 3)])
def test_a_convolution_along_slices(on: dict[str, int], rows: int, size: int) -> None:
    """Neighbors send the rows at the edge; where a device would have no rows of its own (9 over 4) all is gathered."""

    def loss(w: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jnp.tanh(lax.conv_general_dilated(x, w["a"], (1, 1), "SAME", dimension_numbers=numbers))
        x = lax.conv_general_dilated(x, w["b"], (1, 2), "SAME", dimension_numbers=numbers, feature_group_count=2)
        return jnp.sin(x).mean() + jnp.max(x)

    state = {"a": array(size, 3, 3, 4), "b": array(size, 2, 2, 6)}
    x = np.random.default_rng(rows).normal(size=(1, 2, rows, 6, 3))
    check_steps(train_step(loss, ADAM), (state, ADAM.init(state)), x, on=on)
    if rows == 16:
        sent = jaxdist.explain(decorated(loss, on), state, x[0]).rows
        assert {row.what for row in sent if row.operation == "conv_general_dilated"} == {"permute"}


@pytest.mark.parametrize("spec", [("data", "group"), ("group", "data")])
def test_state_on_a_mesh_of_groups_in_any_order(spec: tuple[str, str]) -> None:
    groups = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("group", "data"))
    placed = jax.sharding.NamedSharding(groups, jax.P(spec))
    step, w, x = (lambda w, x: w * x.mean()), np.arange(16.0).reshape(8, 2), np.ones((8, 3))
    compare(decorated(step, 4, batch_argnums=1)(jax.device_put(w, placed), x), step(w, x))


@pytest.mark.parametrize("on", [{"sequence": 4}, {"data": 2, "sequence": 2}], ids=str)
@pytest.mark.parametrize(("rows", "size", "stride"), [(32, 3, 1), (31, 3, 2), (30, 4, 2), (32, 1, 4), (13, 3, 1)])
def test_a_pool_along_slices(on: dict[str, int], rows: int, size: int, stride: int) -> None:
    """The next device sends the rows that windows take of it. All is gathered where strides do not divide a device's
    rows (30 over 2), or a device would have no result (13 over 4)."""
    how = {"window_dimensions": (1, size, 2, 1), "window_strides": (1, stride, 2, 1), "padding": "VALID"}

    def loss(w: Any, x: Any) -> Any:
        x = jnp.tanh(x @ w["a"])
        least, most = (lax.reduce_window(x, init, f, **how) for init, f in ((jnp.inf, lax.min), (-jnp.inf, lax.max)))
        return jnp.sin(least * most + lax.reduce_window(x, 0.0, lax.add, **how)).mean() + most.max()

    x = np.random.default_rng(rows).normal(size=(2, rows, 6, 3))
    x[:, -1] = 99
    w = {"a": array(3, 4)}
    check(loss, w, x, on=on)
    check(jax.grad(loss), w, x, on=on)
    check(lambda w, x: lax.reduce_window(x @ w["a"], 1.0, lax.mul, **how), w, x, on=on)
    if rows == 32:
        sent = jaxdist.explain(decorated(loss, on), w, x).rows
        assert {row.what for row in sent if row.operation.startswith("reduce_window")} <= {"permute"}


# --- what means nothing is refused

WRONG: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"mesh": None}, TypeError, ("mesh=None",)),
    ({"mesh": 3}, TypeError, ("mesh=3", "auto")),
    ({"mesh": "automatic"}, ValueError, ("automatic", "auto")),
    ({"mesh": {}}, ValueError, ("mesh={}",)),
    ({"mesh": {"tensor": 8}}, ValueError, ("tensor", "data, model, sequence")),
    ({"mesh": {"data": 3, "model": 2}}, ValueError, ("8 devices",)),
    ({"layouts": [("in", 1)]}, TypeError, ("layouts=",)),
    ({"layouts": {"(": 1}}, ValueError, ("'('",)),
    ({"layouts": {"in": "1"}}, TypeError, ("'1'",)),
    ({"layouts": {"in": True}}, TypeError, ("True",)),
    ({"layouts": {"'b'": 1}}, ValueError, ("params['b']", "(10,)", "dimension 1")),
    ({"layouts": {"up": 1}}, ValueError, ("'up'",)),
    ({"batch_argnum": 1}, TypeError, ("batch_argnum", "batch_argnums")),
    ({"check_every": -1}, ValueError, ("check_every=-1",)),
]


@pytest.mark.parametrize(("given", "kind", "tokens"), WRONG, ids=[str(given) for given, *_ in WRONG])
def test_refused(given: dict[str, Any], kind: type[Exception], tokens: tuple[str, ...]) -> None:
    step = lambda params, x: moved(params, jax.grad(mlp)(params, x))
    options: Any = {"mesh": {"data": 4, "model": 2}, **given}
    with raises(kind, *tokens):
        jaxdist.parallel(step, **options)(PARAMS, X[0])


def test_what_is_not_finite_is_counted_by_device() -> None:
    params = {**PARAMS, "in": PARAMS["in"].at[2, 7].set(jnp.inf)}
    step = jaxdist.parallel(train_step(mlp, ADAM), mesh=mesh(BOTH), layouts=LAYOUTS, check_finite=True)
    with raises(FloatingPointError, "['in']", "device 2, 3"):
        step(params, ADAM.init(params), X[0])
