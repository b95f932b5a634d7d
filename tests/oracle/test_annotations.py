"""Models that say how they want to be cut: flax's annotations become the layouts of `parallel`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from harness.check import close
from harness.errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

TOKENS = np.random.default_rng(0).integers(0, 13, (6, 9))
# As in MaxText's table, whose axes of tensor parallelism are one here.
RULES = {
    "vocab": "model", "embed": None, "heads": "model", "kv": None, "mlp": ["model"], "norm": None,
    "activation_batch": ["data"], "activation_length": None,
}  # fmt: skip
AXES = {"embedding": ("vocab", "embed"), "qkv": ("embed", "heads", "kv"), "out": ("heads", "kv", "embed"),
        "up": ("embed", "mlp"), "down": ("mlp", "embed")}  # fmt: skip


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), (kind, kind), devices=jax.devices()[:4])


def by_rules(names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple("model" if RULES[name] in ("model", ["model"]) else None for name in names)


def partitioned(name: str) -> Any:
    return nn.with_partitioning(nn.initializers.normal(0.3), by_rules(AXES[name]))


def logical(name: str) -> Any:
    return nn.with_logical_partitioning(nn.initializers.normal(0.3), AXES[name])


class Block(nn.Module):
    annotated: Callable[[str], Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        project = lambda name: nn.DenseGeneral(
            (4, 3), kernel_init=self.annotated("qkv"), use_bias=False, name=name, param_dtype=float
        )
        y = nn.LayerNorm(param_dtype=float)(x)
        mixed = nn.dot_product_attention(project("q")(y), project("k")(y), project("v")(y))
        y = nn.DenseGeneral(
            8, axis=(-2, -1), kernel_init=self.annotated("out"), use_bias=False, name="o", param_dtype=float
        )(mixed)
        x = nn.spmd.with_logical_constraint(x + y, ("activation_batch", "activation_length", "embed"))
        y = nn.Dense(16, kernel_init=self.annotated("up"), name="up", param_dtype=float)(x)
        return x + nn.Dense(8, kernel_init=self.annotated("down"), name="down", param_dtype=float)(nn.gelu(y))


class Transformer(nn.Module):
    annotated: Callable[[str], Any]

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embedding = nn.Embed(13, 8, embedding_init=self.annotated("embedding"), param_dtype=float)
        x = embedding(tokens)
        for _ in range(2):
            x = Block(self.annotated)(x)
        return embedding.attend(x)


def next_token_loss(logits: Any, tokens: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def linen_step(state: TrainState, tokens: Any) -> Any:
    loss = lambda params: next_token_loss(state.apply_fn({"params": params}, tokens[:, :-1]), tokens)
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def train_state(annotated: Callable[[str], Any]) -> TrainState:
    model = Transformer(annotated)
    params = model.init(jax.random.key(0), TOKENS[:, :-1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))


@pytest.mark.parametrize("layouts", [None, "annotations"])
@pytest.mark.parametrize("annotated", [partitioned, logical])
def test_a_transformer_of_linen(annotated: Callable[[str], Any], layouts: Any) -> None:
    state = train_state(annotated)
    step = jaxdist.parallel(linen_step, mesh=mesh(), layouts=layouts)
    with nn.logical_axis_rules([*RULES.items()]):
        want = state
        for _ in range(2):
            (want, loss_of_one), (state, loss) = jax.jit(linen_step)(want, TOKENS), step(state, TOKENS)
            close(loss, loss_of_one)
    close(jaxdist.unshard(state.params), want.params)
    _check(nn.meta.unbox(state.params))
    (moments, *_), _ = jax.tree.flatten(state.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    _check(nn.meta.unbox(moments.mu))


def _check(params: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = next((name for name in ("embedding", "up", "down") if f"'{name}'" in str(path)), None)
        name = name or ("out" if "'o'" in str(path) else "qkv" if any(f"'{n}'" in str(path) for n in "qkv") else None)
        if name and "bias" not in str(path):
            assert (*x.sharding.spec, None, None)[: x.ndim] == by_rules(AXES[name]), (path, x.sharding)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        init = lambda *names: nnx.with_partitioning(nnx.initializers.normal(0.3), names)
        make = lambda a, b, *names: nnx.Linear(a, b, rngs=rngs, kernel_init=init(*names), param_dtype=float)
        self.attention = nnx.MultiHeadAttention(
            4, 8, kernel_init=init(None, "model", None), out_kernel_init=init("model", None, None), param_dtype=float,
            use_bias=False, decode=False, rngs=rngs,
        )  # fmt: skip
        self.norm = nnx.LayerNorm(8, rngs=rngs, param_dtype=float)
        self.up, self.down = make(8, 16, None, "model"), make(16, 8, "model", None)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(x)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxTransformer(nnx.Module):
    def __init__(self) -> None:
        rngs, init = nnx.Rngs(0), nnx.with_partitioning(nnx.initializers.normal(0.3), ("model", None))
        self.embedding = nnx.Embed(14, 8, embedding_init=init, param_dtype=float, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("under", [True, False], ids=["under the mesh", "elsewhere"])
def test_a_transformer_of_nnx(under: bool, kind: AxisType) -> None:
    def made() -> tuple[Any, Any]:
        with jax.set_mesh(mesh(kind)):
            model = NnxTransformer()
            return model, nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        loss = lambda model: next_token_loss(model(tokens[:, :-1]), tokens)
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    (model, optimizer), (plain, plain_optimizer) = made(), made()
    on_one = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)
    for each in (plain, plain_optimizer):
        nnx.update(each, on_one(nnx.state(each)))
    over = jaxdist.parallel(step, mesh=mesh(kind if under else AxisType.Auto))
    for _ in range(2):
        close(over(model, optimizer, TOKENS), nnx.jit(step)(plain, plain_optimizer, TOKENS), 1e-6)
    got, want = (nnx.to_pure_dict(jaxdist.unshard(nnx.state(each))) for each in (model, plain))
    close(got, want, 1e-6)  # JAX computes the softmax of attention in float32
    first, last = model.blocks
    assert first.up.kernel[...].sharding.spec == P(None, "model")
    assert last.down.kernel[...].sharding.spec == P("model")
    assert first.attention.query.kernel[...].sharding.spec == P(None, "model")
    assert last.attention.out.kernel[...].sharding.spec == P("model")
    assert model.embedding.embedding[...].sharding.spec == P("model")


def test_a_leaf_that_is_annotated_whole_stays_whole() -> None:
    names = lambda name: by_rules(AXES[name]) if name == "up" else (None,) * len(AXES[name])
    whole = lambda name: nn.with_partitioning(nn.initializers.normal(), names(name))
    state, _ = jaxdist.parallel(linen_step, mesh=mesh())(train_state(whole), TOKENS)
    block = nn.meta.unbox(state.params)["Block_0"]
    assert block["up"]["kernel"].sharding.spec == P(None, "model")
    assert block["down"]["kernel"].sharding.is_fully_replicated


def test_state_that_is_cut_along_the_model_axis_of_another_mesh() -> None:
    there = jax.make_mesh((4, 2), ("x", "model"), (AxisType.Explicit,) * 2)
    w = {"in": jnp.ones((8, 8)), "out": jax.device_put(np.ones((8, 8)), NamedSharding(there, P(None, ("x", "model"))))}
    loss = lambda w, x: (x @ w["in"] @ w["out"]).mean()
    step = lambda w, x: jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))
    got = jaxdist.parallel(step, mesh={"data": -1, "model": 4})(w, np.ones((8, 8)))
    assert got["out"].sharding.spec == P(None, "model")
    close(jaxdist.unshard(got), step(jax.tree.map(np.asarray, w), np.ones((8, 8))))


def test_annotations_that_are_not_there() -> None:
    step = jaxdist.parallel(lambda w, x: w - x.mean(), mesh=mesh(), layouts="annotations")
    with raises(ValueError, "annotations", "'model'", "w"):
        step(jnp.ones((4, 4)), np.ones((8, 4)))
    with raises(TypeError, "annotations"):
        jaxdist.parallel(lambda w, x: w, mesh=mesh(), layouts=["w"])  # type: ignore[arg-type]


def dense_step(init: Any, tx: optax.GradientTransformation) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    model, x = nn.Dense(16, kernel_init=init, param_dtype=float), np.random.default_rng(0).normal(size=(8, 16))
    params = model.init(jax.random.key(0), x)["params"]

    def step(state: TrainState, x: Any) -> Any:
        loss = lambda params: (state.apply_fn({"params": params}, x) ** 2).mean()
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    return step, (TrainState.create(apply_fn=model.apply, params=params, tx=tx), x)


def test_statistics_that_have_fewer_dimensions_than_their_annotation() -> None:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    step, args = dense_step(init, optax.adafactor(1e-2, min_dim_size_to_factor=8))
    got = jaxdist.parallel(step, mesh=mesh())(*args)
    close(jaxdist.unshard(got.params), jax.jit(step)(*args).params)


def test_one_logical_name_for_two_dimensions_is_no_annotation() -> None:
    """flax refuses it where there is a mesh, and nowhere else."""
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "embed"))
    step, args = dense_step(init, optax.sgd(0.1))
    with nn.logical_axis_rules([("embed", "model")]):
        close(jaxdist.data_parallel(step)(*args).params, jax.jit(step)(*args).params)


def test_rules_with_lists_for_nnx() -> None:
    rules: Any = [("embed", None), ("mlp", ["model"])]
    with nn.logical_axis_rules(rules), jax.set_mesh(mesh()):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_init=init)
        jaxdist.parallel(lambda model, x: model(x).sum(), mesh=mesh(), layouts="annotations")(model, jnp.ones((4, 8)))
