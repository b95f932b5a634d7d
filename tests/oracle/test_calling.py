"""How a decorated step is called: which arguments are the batch, keywords, constants, donation, and what `jit` has."""

import collections
import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import idioms
from harness.check import close, compare
from harness.errors import raises
from jax import lax
from jax.sharding import Mesh

import jaxdist

RNG = np.random.default_rng(0)
X, Y, Z = RNG.normal(size=(16, 4)), RNG.normal(size=16), RNG.normal(size=(24, 4))
W = jnp.asarray(RNG.normal(size=4))
PARAMS = {"w": W, "b": jnp.zeros(())}
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 16)
Pair = collections.namedtuple("Pair", "x y")


def loss_of(w: Any, x: Any, y: Any = 0.0) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def sgd(w: Any, x: Any, lr: Any = 0.1) -> Any:
    return w - lr * jax.grad(loss_of)(w, x), loss_of(w, x)


def noise(keys: Any) -> Any:
    return jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)


def descent(loss: Any) -> Any:
    return lambda w, *batch: (w - 0.1 * jax.grad(loss)(w, *batch), loss(w, *batch))


def counted(f: Any) -> tuple[Any, list[int]]:
    """A function, and a list that has an entry for each time that it was traced."""
    traced: list[int] = []

    @functools.wraps(f)
    def count(*args: Any, **kwargs: Any) -> Any:
        traced.append(1)
        return f(*args, **kwargs)

    return count, traced


# --- which arguments are the batch


def graph_loss(w: Any, g: Any) -> Any:
    sent = jax.ops.segment_sum(jnp.tanh(g["nodes"] @ w)[g["from"]], g["to"], num_segments=g["nodes"].shape[0])
    return jnp.mean(sent**2) * jnp.mean(g["y"])


def moving(state: Any, batch: Any) -> Any:
    return {"w": state["w"] - loss_of(state["w"], batch["x"]) * batch["s"], "k": jax.random.split(state["k"])[0]}, 0.0


GRAPH = {"from": RNG.integers(0, 24, 17), "nodes": Z, "to": RNG.integers(0, 24, 17), "y": RNG.normal(size=3)}
scaled: Any = lambda w, b: loss_of(w, b["x"]) * b["s"]
TREE = {"w": W, "in": jnp.ones((4, 3)), "b": jnp.zeros(3)}
OTHER = {"u": W, "v": jnp.ones(6)}
ADAM = optax.adam(0.1)
MLP = jax.tree.map(
    lambda x: RNG.normal(size=x.shape) if isinstance(x, jax.ShapeDtypeStruct) else x,
    eqx.filter_eval_shape(eqx.nn.MLP, 4, "scalar", 8, 1, key=KEY),
)
KINDS = {"x": X, "y": Y, "s": 2.0, "n": np.float32(3), "z": jnp.asarray(2.0), "k": KEY, "kind": "mean", "none": None}


def moved(tree: Any, by: Any) -> Any:
    return jax.tree.map(lambda p: p - by * 1e-3, tree)


def gan(g: Any, d: Any, real: Any) -> Any:
    return moved(g, loss_of(d["u"], real)), moved(d, loss_of(g["w"], real)), real.mean()


def adam(p: Any, state: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: loss_of(p["w"], x, y))(p)
    updates, state = ADAM.update(grads, state, p)
    return optax.apply_updates(p, updates), state, {"loss": loss, "predicted": x @ p["w"]}


def module(model: Any, x: Any, y: Any) -> Any:
    grads = eqx.filter_grad(lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Metadata:
    """A node without leaves."""

    of: Any


class Call(NamedTuple):
    """A step, its arguments, and the names of those that are the batch; its constants, if it has some."""

    step: Any
    args: tuple[Any, ...]
    batch: str
    constants: str = ""


CALLS: dict[str, Call] = {
    # A state of several lengths, as models have.
    "state and batch": Call(lambda p, x: moved(p, loss_of(W, x)), (TREE, X), "x"),
    "x and y": Call(adam, (TREE, ADAM.init(TREE), X, Y), "x y"),
    "an evaluation": Call(lambda p, x, y: loss_of(p["w"], x, y), (TREE, X, Y), "x y"),
    "predictions": Call(lambda p, x: x @ p["in"], (TREE, X), "x"),
    "an autoencoder": Call(lambda p, x: (moved(p, x.mean()), x * p["w"]), (TREE, X), "x"),
    "predictions like the labels": Call(lambda p, x, y: (moved(p, loss_of(W, x, y)), x @ p["w"]), (TREE, X, Y), "x y"),
    "the batch first": Call(lambda x, p: moved(p, loss_of(W, x)), (X, TREE), "x"),
    "the batch in between": Call(lambda p, x, o: (moved(p, x.mean()), moved(o, x.sum())), (TREE, X, OTHER), "x"),
    "the parameters last": Call(lambda b, p: scaled(p["w"], b), ({"x": X, "s": 2.0}, TREE), "b"),
    "two states": Call(gan, (TREE, OTHER, X), "real"),
    "two states alike": Call(lambda a, b, x: (moved(a, loss_of(b["w"], x)), moved(b, x.mean())), (TREE, TREE, X), "x"),
    "a target network": Call(
        lambda p, t, x: (moved(p, loss_of(t["w"], x)), jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, t, p)),
        (TREE, TREE, X), "x"),
    "a teacher": Call(
        descent(lambda w, t, x: loss_of(w + t["w"], x) * t["b"].sum()), (W, {"w": W, "b": jnp.ones(3)}, X), "batch[1]"),
    "the mean of two states": Call(lambda a, b: jax.tree.map(lambda p, q: (p + q) / 2, a, b), (TREE, TREE), ""),
    "updates": Call(optax.apply_updates, (TREE, TREE), ""),
    "a moving average": Call(lambda new, old: optax.incremental_update(new, old, 0.1), (TREE, TREE), ""),
    "a choice": Call(
        lambda c, a, b: jax.tree.map(lambda p, q: jnp.where(c, p, q), a, b), (jnp.asarray(True), TREE, TREE), ""),
    "statistics": Call(lambda p, stats, x: loss_of(p["w"], x / stats), (TREE, jnp.ones(4), X), "x"),
    "a module of equinox": Call(module, (MLP, X, Y), "x y", "model.activation model.final_activation"),
    "a graph": Call(lambda p, g: moved(p, graph_loss(p["w"], g)), (TREE, GRAPH), "g"),
    "a graph and labels": Call(descent(lambda w, g, y: graph_loss(w, g) + y.mean()), (W, GRAPH, Y), "batch[1]"),
    "three lengths": Call(lambda p, x, z, y: moved(p, loss_of(W, x) + loss_of(W, z) + y.sum()), (TREE, X, Z, Y), "x y"),
    "time first": Call(
        lambda p, r: moved(p, (r["x"] @ p["w"]).mean() + r["y"].sum()),
        (TREE, {"x": np.ones((5, 16, 4)), "y": np.ones((5, 16))}), "r"),
    "a batch with kinds of all": Call(
        lambda p, b: moved(p, scaled(W, b) * b["n"] * b["z"]) if b["kind"] else p, (TREE, KINDS), "b", "b['kind']"),
    "keys beside the batch": Call(lambda p, x, k: moved(p, loss_of(W, x + noise(k))), (TREE, X, KEYS), "x k"),
    "keys in the batch": Call(lambda p, b: moved(p, (b["x"] + noise(b["k"])).sum()), (TREE, {"x": X, "k": KEYS}), "b"),
    "a mask": Call(lambda p, x, m: moved(p, jnp.sum(x[:, 0] * m)), (TREE, X, np.ones(16)), "x m"),
    "a function": Call(lambda f, p, x: moved(p, f(x).sum()), (jnp.tanh, TREE, X), "x", "f"),
    "a dictionary of numbers": Call(
        lambda c, p, x: moved(p, c["lr"] * x.sum()), ({"lr": 0.1, "steps": 3}, TREE, X), "x"),
    "a queue": Call(
        lambda p, q, x: (moved(p, x.mean()), jnp.concatenate([x, q])[:32]), (TREE, np.ones((32, 4)), X), "x"),
    # One array as the state.
    "a key": Call(lambda w, x, key: w - loss_of(w, x + jax.random.normal(key, x.shape)), (W, X, KEY), "x"),
    "a target": Call(lambda w, t, x: (w - 0.1 * jax.grad(loss_of)(w, x), 0.9 * t + 0.1 * w), (W, W, X), "x"),
    "two arguments": Call(lambda w, x, y: w - jax.grad(loss_of)(w, x, y), (W, X, Y), "x y"),
    "the batch before an array": Call(lambda x, w: w - jax.grad(loss_of)(w, x), (X, W), "x"),
    "a raw key": Call(
        lambda w, x, k: w - loss_of(w, x + jax.random.normal(k, x.shape)), (W, X, jax.random.PRNGKey(0)), "x"),
    "two lengths": Call(descent(lambda w, real, z: loss_of(w, real) + loss_of(w, z)), (W, X, Z), "batch[1]"),
    "a number": Call(lambda w, lr, x: w - lr * jax.grad(loss_of)(w, x), (W, 0.1, X), "x"),
    "a named tuple": Call(lambda w, b: loss_of(w, b.x, b.y), (W, Pair(X, Y)), "b"),
    "a number in the batch": Call(descent(scaled), (W, {"x": X, "s": 2.0}), "batch[0]"),
    "a 0-d array in the batch": Call(scaled, (W, {"x": X, "s": jnp.asarray(2.0)}), "b"),
    "a string in the batch": Call(
        descent(lambda w, b: loss_of(w, b["x"]) if b["kind"] == "mean" else 0.0), (W, {"x": X, "kind": "mean"}),
        "batch[0]", "batch[0]['kind']"),
    "one key in the batch": Call(
        descent(lambda w, b: loss_of(w, b["x"] + noise(b["k"][None])[0])), (W, {"x": X, "k": KEY}), "batch[0]"),
    "one row in the batch": Call(
        descent(lambda w, b: loss_of(w, b["x"] * b["one"])), (W, {"one": np.ones((1, 4)), "x": X}), "batch[0]"),
    "nothing in the batch": Call(
        descent(lambda w, b: loss_of(w, b["x"]) + b["none"].sum()), (W, {"none": np.ones((0, 2)), "x": X}), "batch[0]"),
    "a key in the state": Call(moving, ({"w": W, "k": KEY}, {"x": X, "s": 2.0}), "batch"),
    "swapped": Call(lambda w, m, x: (0.9 * m + loss_of(w, x), w - m), (W, 2 * W, X), "x"),
    "as many weights as examples": Call(
        lambda w, x, y: (w - 0.1 * jax.grad(loss_of)(w, x, y), x @ w), (jnp.ones(16), np.ones((16, 16)), Y), "x y"),
    "two states as long as the batch": Call(
        lambda p, o, x, y: (jax.tree.map(lambda p, o: p - o * loss_of(W, x, y), p, o), o, x.sum()),
        ({"a": jnp.ones(16), "b": jnp.ones(16)}, {"a": jnp.ones(16), "b": jnp.zeros(16)}, X, Y), "x y"),
    "an array without entries": Call(
        lambda w, x: (w + 1, (x @ w).sum()), (jnp.zeros((0, 8)), jnp.zeros((8, 0))), "x"),
    # In one process exact, and in several an error that asks for `batch_argnums`: arrays that may be either.
    "score": Call(lambda x, w: x @ w, (X, W), "w"),
    "an array last": Call(lambda x, y, w: loss_of(w, x, y), (X, Y, W), "w"),
    "no batch": Call(lambda w: w - jax.grad(lambda w: (w**2).sum())(w), (W,), "w"),
    "a key alone": Call(lambda key: jax.random.normal(key, (3,)), (KEY,), ""),
    "one length everywhere": Call(lambda a, b, c: a * b + c, (Y, Y + 1, Y + 2), "a b c"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_the_batch_is_found(name: str) -> None:
    step, args, batch, constants = CALLS[name]
    check_reading(step, args, batch, constants)
    plain = eqx.filter_jit(step) if constants else jax.jit(step)
    compare(arrays(jaxdist.unshard(jaxdist.data_parallel(step)(*args))), arrays(plain(*args)))


def arrays(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_array)


@pytest.mark.parametrize("name", idioms.IDIOMS)
def test_what_is_the_batch_of_an_idiom(name: str) -> None:
    step, state = idioms.IDIOMS[name](lambda tx: tx)
    check_reading(step, (*state, idioms.batch(0, 24)), "batch")


def check_reading(step: Any, args: tuple[Any, ...], batch: str, constants: str = "") -> None:
    # private: in one process no result shows what is cut
    found = jaxdist.data_parallel(step).program(*args).placed.signature
    split = [name for _, at, name in found.arguments if any(found.is_batch[i] for i in at)]
    assert split == batch.split()
    assert " ".join(name for name, _ in found.constants) == constants


@dataclasses.dataclass(frozen=True)
class Table:
    """Metadata of which equality is no truth value: that of arrays."""

    values: tuple[int, int]

    def __eq__(self, other: Any) -> Any:
        return np.equal(self.values, other.values)

    def __hash__(self) -> int:
        return 7


def test_two_states_whose_metadata_cannot_be_compared() -> None:
    with_table = lambda *values: jax.tree_util.Partial(loss_of, W, y=Metadata(Table(values)))
    step = lambda a, b, x: (a.args[0] * b.args[0] - x.mean(0), a)
    one, other = with_table(1, 2), with_table(3, 4)
    close(jaxdist.data_parallel(step)(one, other, X)[0], W * W - X.mean(0))


def is_split(x: Any) -> bool:
    return not x.sharding.is_fully_replicated


def test_the_batch_by_argument_name_and_path() -> None:
    """What is the batch comes back in slices, what is state is whole."""
    step = lambda state, data: (state["x"] * 1, data["y"] * 1)
    args = {"w": W, "x": X}, {"y": Y}
    wanted: dict[Any, tuple[bool, bool]] = {
        "data": (False, True), 1: (False, True), (-1,): (False, True), (): (False, False),
        ("data", "state['x']"): (True, True),
    }  # fmt: skip
    for argnums, split in wanted.items():
        got = jaxdist.data_parallel(step, batch_argnums=argnums)(*args)
        assert tuple(map(is_split, got)) == split, argnums
    for argnums, tokens in (("label", ("label", "state['w']")), (2, ("2",))):
        with raises(TypeError, *tokens):
            jaxdist.data_parallel(step, batch_argnums=argnums)(*args)


def test_what_earlier_calls_left_on_the_mesh() -> None:
    """An argument with something that is whole there is state; what is split over the examples is batch."""
    centre = jaxdist.data_parallel(lambda c, x: c + x.mean(0))(jnp.zeros(4), X)
    got = jaxdist.data_parallel(lambda w, c, x: (c["c"] * w, x * w))(W, {"c": centre, "t": X}, X)
    assert tuple(map(is_split, got)) == (False, True)
    features = jaxdist.data_parallel(lambda w, x: jnp.tanh(x * w), batch_argnums="x")(W, X)
    step = jaxdist.data_parallel(lambda w, b: (scaled(w, b), b["x"] * 2))
    loss, doubled = step(W, {"x": features, "s": 2.0})
    close(loss, scaled(W, {"x": np.tanh(X * W), "s": 2.0}))
    assert is_split(doubled)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (X[:0], ("x", "(0, 4)")), (np.float64(3.0), ("x",)), (3.0, ("x",)), ("digits", ("x",)),
        ({"a": X, "b": None, "c": "name"}, ("x['c']",)),
    ],
)  # fmt: skip
def test_bad_batches(batch: Any, tokens: tuple[str, ...]) -> None:
    step = jaxdist.data_parallel(lambda w, x: w, batch_argnums=1)
    with raises((ValueError, TypeError), *tokens):
        step(W, batch)
    np.testing.assert_array_equal(step(W, X), W)  # nothing is lost


# --- keywords, constants, types


def test_keywords_and_defaults() -> None:
    step = jaxdist.data_parallel(sgd)
    close(step(W, x=X), sgd(W, X))
    close(step(x=X, w=W, lr=0.5), sgd(W, X, 0.5))
    only = jaxdist.data_parallel(lambda w, *, x, lr: sgd(w, x, lr))
    close(only(W, lr=0.25, x=X), sgd(W, X, 0.25))
    several = jaxdist.data_parallel(lambda w, *xs, **more: sgd(w, sum(xs), more["lr"]))
    close(several(W, X, X, lr=0.5), sgd(W, X + X, 0.5))
    named = jaxdist.data_parallel(lambda w, a, b, lr=0.1: sgd(w, a - b, lr), batch_argnums=(1, 2))
    close(named(W, b=X[::-1], a=X, lr=0.5), sgd(W, X - X[::-1], 0.5))
    with raises(TypeError, "'x'"):
        only(W, lr=0.5)  # type: ignore[call-arg]


def test_partials_methods_and_no_decoration() -> None:
    close(jaxdist.data_parallel(functools.partial(sgd, lr=0.5))(W, X), sgd(W, X, 0.5))

    class Trainer:
        lr = 0.5

        @jaxdist.data_parallel
        def step(self, w: Any, x: Any) -> Any:  # the instance is no array: a constant
            """Doc."""
            return sgd(w, x, self.lr)

    close(Trainer().step(W, x=X), sgd(W, X, 0.5))
    assert Trainer.step.__doc__ == "Doc."
    with raises(TypeError, "sgd", "pmap"):
        jaxdist.data_parallel(jax.pmap(sgd, axis_name="batch"))


def test_static_arguments() -> None:
    def power(w: Any, x: Any, n: int, kind: str = "mean") -> Any:
        return getattr(jnp, kind)((x @ w) ** (n if n > 1 else 1))

    by_name = jaxdist.data_parallel(power, static_argnames=("n", "kind"))
    by_number = jaxdist.data_parallel(power, static_argnums=(2, -1))
    for step in (by_name, by_number):
        for n in (2, 3, 2):
            close(step(W, X, n), power(W, X, n))
        close(step(W, X, 2, kind="sum"), power(W, X, 2, "sum"))
    with raises(ValueError, "n", "list"):
        by_name(W, X, [2])  # type: ignore[arg-type]
    with raises(ValueError, "m"):
        jaxdist.data_parallel(power, static_argnames="m")
    with raises(ValueError, "4"):
        jaxdist.data_parallel(power, static_argnums=4)


class _Module(eqx.Module):
    k: Any


def test_one_and_true_are_other_constants() -> None:
    static = lambda x, k: x.sum() + (100 if isinstance(k, float) else k)
    for decorate in (jax.jit, jaxdist.data_parallel):
        step = decorate(static, static_argnums=1)
        assert [float(step(jnp.ones(8), k)) for k in (1, 1.0, True, 1)] == [9, 108, 9, 9]
    step = jaxdist.data_parallel(lambda x, m: static(x, m.k))  # (eqx.filter_jit says 9 four times)
    assert [float(step(jnp.ones(8), _Module(k))) for k in (1, 1.0, True, 1)] == [9, 108, 9, 9]


def test_a_number_is_data_and_a_choice_by_one_is_the_error_of_jit() -> None:
    step, traced = counted(lambda w, x, n: w - loss_of(w, x) * sum(range(n)))
    for decorate in (jax.jit, jaxdist.data_parallel):
        with pytest.raises(jax.errors.TracerIntegerConversionError):
            decorate(step)(W, X, 3)
    assert len(traced) == 2


@dataclasses.dataclass
class _Config:
    width: int = 3


@pytest.mark.parametrize(
    ("config", "kind"),
    [(_Config(), "_Config"), ({"a": [1, _Config()]}, "_Config"), (memoryview(bytearray(3)), "memoryview")],
)
def test_an_argument_that_can_be_neither_data_nor_constant_is_named(config: Any, kind: str) -> None:
    with raises(TypeError, "config", kind):
        jaxdist.data_parallel(lambda w, config, x: w + x.mean(0))(W, config, X)


def test_weak_types_and_one_trace_for_each_type_of_the_state() -> None:
    def step(state: Any, x: Any) -> Any:
        n = state["n"] + 1
        aux = {"n": n, "mean": x.mean() * state["lr"], "two": 2, "where": jnp.where(x[:, 0] > 0, 1, 2), "half": 0.5}
        return {"lr": state["lr"] * 0.5, "n": n, "w": state["w"] * state["lr"]}, aux | {"scaled": state["lr"] * 3}

    count, traced = counted(step)
    decorated, state, want = jaxdist.data_parallel(count), {"lr": 0.1, "n": 0, "w": jnp.ones(3)}, None
    want = state
    for _ in range(3):
        (state, aux), (want, expected) = decorated(state, X), jax.jit(step)(want, X)
        compare((state, jaxdist.unshard(aux)), (want, expected))
    assert len(traced) <= 2
    for w in (jnp.ones((3, 2)), jnp.asarray(2.0), jnp.asarray(2.0, float)):  # of the second the type is weak
        scaled = jaxdist.data_parallel(lambda s, x: {"w": s["w"] - x.mean() * s["w"], "n": s["n"] + 1})
        close(scaled({"w": w, "n": 0}, X)["w"], w - X.mean() * w)


# --- donation


def test_what_is_donated() -> None:
    def step(a: Any, b: Any, x: Any) -> Any:
        return a - 0.1 * jax.grad(loss_of)(a, x), b * 0.5

    a, b = jaxdist.data_parallel(step)(W, W * 2, X)
    jaxdist.data_parallel(step, donate_argnums=1)(a, b, X)
    assert (a.is_deleted(), b.is_deleted()) == (False, True)
    with raises(ValueError, "3"):
        jaxdist.data_parallel(step, donate_argnums=3)
    c, d = jaxdist.data_parallel(step)(W, W * 2, X)
    jaxdist.data_parallel(step, donate=True)(c, d, X)
    assert c.is_deleted()
    assert d.is_deleted()
    host = np.array(W)
    jaxdist.data_parallel(step, donate=True)(host, W * 2, X)
    np.testing.assert_array_equal(host, W)
    x = jaxdist.data_parallel(lambda x: x + 0.0)(X)  # split over the devices: the batch is never taken
    jaxdist.data_parallel(step, batch_argnums=2, donate_argnums=(0, 2))(W * 1, W * 2, x)
    np.testing.assert_array_equal(x, X)


def test_on_one_device_nothing_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    """As by jit: the first call would hold the state twice. It is compiled once, and one array may be there twice."""

    def halved(a: Any, b: Any, x: Any) -> Any:
        return a * 0.5, b * x.sum()

    step = functools.partial(jaxdist.data_parallel, halved, mesh=Mesh(jax.devices()[:1], ("data",)))
    kept, given = jnp.copy(W), jnp.copy(W)
    with jax.log_compiles():
        a, b = (one := step(donate_argnums=1))(kept, given, X)
        one(a, b, X)
    assert (kept.is_deleted(), given.is_deleted(), b.is_deleted()) == (False, True, True)
    assert sum("Compiling jit(halved)" in record.getMessage() for record in caplog.records) == 1
    twin = jnp.copy(W)
    for got, right in zip(step(donate=True)(twin, twin, X), halved(W, W, X), strict=True):
        close(got, right)
    assert twin.is_deleted()


def test_what_donate_says_of_arguments_by_structure() -> None:
    """As many results of a structure as arguments of it: these are donated; but no single number."""
    two = lambda p, q, x: (jax.tree.map(jnp.add, p, q), p | {"b": x.sum()})
    one = lambda p, q, x: jax.tree.map(lambda a, b: a + b * x.sum(), p, q)
    fresh: Any = lambda: jaxdist.data_parallel(lambda p: jax.tree.map(jnp.copy, p), batch_argnums=())(PARAMS)
    for step, gone in ((two, True), (one, False)):
        p, q = fresh(), fresh()
        jaxdist.data_parallel(step, donate=True)(p, q, X)
        assert {x.is_deleted() for x in jax.tree.leaves((p, q))} == {gone}
    rate = jaxdist.data_parallel(lambda r, x: r * 1.0)(jnp.asarray(0.1), X)
    jaxdist.data_parallel(lambda rate, w, x: (w * rate, x.sum()), donate=True)(rate, jnp.copy(W), X)
    jaxdist.data_parallel(lambda w, rate, x: (w * rate, rate * x.sum()), donate_argnames="rate")(W, rate, X)
    assert rate.is_deleted()
    with raises(ValueError, "donate_argnames", "pace"):
        jaxdist.data_parallel(sgd, donate_argnames="pace")


def test_a_donated_array_is_named_when_it_is_used() -> None:
    def train(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(loss_of)(w, x)

    step = jaxdist.data_parallel(train, donate=True)
    evaluate = jaxdist.data_parallel(lambda p, x: loss_of(p["w"], x))
    w = jaxdist.data_parallel(train)(W, X)
    other = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(X)
    last = step(w, X)
    seen = np.asarray(last)  # the memory of one device: JAX alone would say that the array is still there
    before = seen.copy()
    w = step(last, X)
    other(x)
    rows: list[tuple[Any, tuple[str, ...]]] = [
        (lambda: evaluate({"w": last}, X), ("p['w']", "train", "call 2")), (lambda: step(last, X), ("w ", "call 2")),
        (lambda: evaluate({"w": w}, x), ("x ", "jax.jit")),
    ]  # fmt: skip
    for call, tokens in rows:
        with raises(RuntimeError, *tokens):
            call()
    close(evaluate({"w": w}, X), loss_of(w, X))
    np.testing.assert_array_equal(seen, before)


# --- what `jax.jit` has


def test_lowered_to_look_at() -> None:
    count, traced = counted(sgd)
    step = jaxdist.data_parallel(count)
    lowered = step.lower(W, X, lr=0.5)
    assert "all_reduce" in lowered.as_text()
    compiled = lowered.compile()
    assert compiled.cost_analysis()
    close(compiled(W, X, lr=0.5), sgd(W, X, lr=0.5))
    close(step(W, X, lr=0.5), sgd(W, X, lr=0.5))
    assert len(traced) == 1
    step.clear_cache()
    close(compiled(W, X, lr=0.5), sgd(W, X, lr=0.5))
    close(step(W, X, lr=0.5), sgd(W, X, lr=0.5))
    assert len(traced) > 1


def test_the_stages_have_the_structure_of_those_of_jit() -> None:
    step = lambda state, x, kind="a": ({"w": state["w"] - x.sum(0), "kept": state["kept"]}, x @ state["w"])
    options: dict[str, Any] = {"static_argnames": "kind", "donate_argnums": 0}
    ours, jits = jaxdist.data_parallel(step, **options), jax.jit(step, **options)
    call = {"w": W, "kept": jnp.ones(3)}, X, "b"
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call[:2])
    assert ours.eval_shape(*types, kind="b") == jits.eval_shape(*types, kind="b")
    mine: Any = ours.trace(*types, kind="b")
    theirs: Any = jits.trace(*types, kind="b")
    for advance in (lambda stage: stage.lower(), lambda stage: stage.compile(), None):
        assert (mine.in_avals, mine.out_tree) == (theirs.in_avals, theirs.out_tree)
        shapes = lambda stage: [(x.shape, x.dtype) for x in jax.tree.leaves(stage.out_info)]
        assert shapes(mine) == shapes(theirs)
        mine, theirs = (advance(mine), advance(theirs)) if advance else (mine, theirs)
    (state, x), _ = mine.input_shardings
    assert state["w"].is_fully_replicated
    assert not x.is_fully_replicated
    assert mine.output_shardings[0]["w"].is_fully_replicated
    close(mine(*jax.tree.map(jnp.copy, call[:2]), "b"), step(*call))


def test_a_compiled_step_takes_what_it_is_compiled_for() -> None:
    compiled = jaxdist.data_parallel(sgd).lower(W, X).compile()
    with raises(TypeError, "sgd", "x", "float64[16,4]", "float64[24,4]"):
        compiled(W, np.ones((24, 4)))
    with raises(TypeError, "sgd", "structure"):
        compiled(W, X, lr=0.5)
    with raises(TypeError, "sgd", "traced"):
        jax.jit(compiled)(W, X)


def test_options_of_the_compiler() -> None:
    options = {"xla_cpu_enable_fast_math": True}
    close(jaxdist.data_parallel(sgd, compiler_options=options)(W, X), sgd(W, X))
    close(jaxdist.data_parallel(sgd).lower(W, X).compile(options)(W, X), sgd(W, X))
    for call in (
        lambda: jaxdist.data_parallel(sgd, compiler_options={"no_such": 1})(W, X),
        lambda: jaxdist.data_parallel(sgd).lower(W, X).compile({"no_such": 1}),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such"):
            call()


def test_on_tracers_it_is_the_plain_step() -> None:
    step = jaxdist.data_parallel(sgd)
    with pytest.warns(UserWarning, match="8 devices"):
        close(jax.grad(lambda w: step(w, X)[1])(W), jax.grad(lambda w: sgd(w, X)[1])(W))
    with pytest.warns(UserWarning, match="8 devices"):
        close(jax.vmap(step, (0, None))(jnp.stack([W, 2 * W]), X)[0][1], sgd(2 * W, X)[0])
    with pytest.warns(UserWarning, match="8 devices"):
        close(jax.jit(step)(W, X), sgd(W, X))
    with pytest.warns(UserWarning, match="plain step"):
        lax.scan(lambda w, x: step(w, x), W, X[None])


def test_a_decorated_step_in_a_decorated_step() -> None:
    inner = jaxdist.data_parallel(sgd)

    @jaxdist.data_parallel
    def outer(w: Any, x: Any) -> Any:
        w, first = inner(w, x)
        w, losses = lax.scan(inner, w, jnp.stack([x, 2 * x]))
        return w, [first, *losses]

    w, losses = W, []
    for x in (X, X, 2 * X):
        w, loss = sgd(w, x)
        losses.append(loss)
    close(outer(W, X), (w, losses))


def test_under_a_transfer_guard(tmp_path: Path) -> None:
    """Everything that the library moves by itself is explicit; a number is refused, as by `jax.jit`."""
    tx = jaxdist.zero(optax.adam(0.1), 3)
    params: Any = {"w": W, "matrix": jnp.ones((7, 3))}
    state: Any = (params, opt_state := tx.init(params))
    kept, odd, keys = jaxdist.shard(params), jnp.asarray(X[:13]), KEYS[:13]

    @jaxdist.data_parallel
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        x, keys = batch
        loss = lambda p: loss_of(p["w"], x + noise(keys)) + jnp.sum(p["matrix"] ** 2)
        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with jax.transfer_guard("disallow"):
        for _ in range(2):
            state = step(state[0], state[1], (odd, keys))
        sharded, whole = jaxdist.shard(params), jaxdist.unshard(kept)
        jaxdist.save(tmp_path, {"params": kept, "keys": keys}, 1)
        back = jaxdist.restore(tmp_path, {"params": kept, "keys": keys})
        jaxdist.send(params, 0)
        sent = [jaxdist.recv(params, 0), jaxdist.allreduce(params), jaxdist.broadcast(params)]
        for call in (jax.jit(sgd), jaxdist.data_parallel(sgd)):
            with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
                call(W, odd, 0.5)
    for tree in (sharded, whole, back["params"], *sent):
        close(tree, params, 0)
    first = step(params, opt_state, (odd, keys))
    compare(jaxdist.unshard(state), jaxdist.unshard(step(first[0], first[1], (odd, keys))), 0)


@pytest.mark.parametrize(
    ("settings", "kind", "token"),
    [
        ({"reduce": "sum"}, TypeError, "reduce"),
        ({"mesh": Mesh(jax.devices(), ("model",))}, ValueError, "data"),
        ({"mesh": "auto"}, TypeError, "jaxdist.parallel"),
        ({"batch_argnums": 2}, TypeError, "batch_argnums"),
        ({"compress": "int8"}, ValueError, "bf16"),
        ({"bucket_bytes": -1}, ValueError, "bucket_bytes"),
        ({"step": 3}, TypeError, "function"),
    ],
)
def test_bad_settings(settings: dict[str, Any], kind: type[Exception], token: str) -> None:
    decorate: Any = jaxdist.data_parallel
    with raises(kind, token):
        decorate(**{"step": sgd, **settings})(W, X)
