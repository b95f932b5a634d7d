"""Kernels that bring a rule of their own, calls of the user's under `jax.vmap`, products of groups, twins."""

import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.check import On, check, decorated
from harness.errors import missing, raises
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # private: its primitives have no public names
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import BATCHING, ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import placements

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(24, 6)), RNG.normal(size=(6, 5))
EXPERTS, SIZES = RNG.normal(size=(5, 6, 4)), jnp.array([5, 0, 9, 7, 3], jnp.int32)
Function = Callable[..., Any]


def sent(step: Function, *args: Any, on: On = 4, **settings: Any) -> set[str]:
    """What a step sends, but for sums: an empty set, if it is divided."""
    rows = jaxdist.explain(decorated(step, on, **settings), *args).rows
    return {row.what for row in rows if row.what != "all-reduce"}


# --- custom_partitioning


def partitioned(f: Function, rule: Any, program: Function | None = None, **kinds: Any) -> Function:
    """`f` with a rule; `program(shardings of the operands)` is what a device runs, by default `f`."""
    kernel = custom_partitioning(f)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        given, made = (jax.tree.map(lambda x: x.sharding, tree) for tree in (operands, results))
        return mesh, program(given) if program else f, made, given

    kernel.def_partition(partition=partition, sharding_rule=rule, **kinds)
    return kernel


def product(is_summed: bool) -> Function:
    """A product; over devices it is added up, or not: as its author wrote its program."""

    def program(given: Any) -> Function:
        axis = given[0].spec[1]
        return lambda x, w: lax.psum(x @ w, axis) if axis and is_summed else x @ w

    return partitioned(lambda x, w: x @ w, "i j, j k -> i k", program, reduction_factors=("j",))


def with_gradient(multiply: Function) -> Function:
    f = jax.custom_vjp(multiply)
    f.defvjp(lambda x, w: (multiply(x, w), (x, w)), lambda xw, g: (multiply(g, xw[1].T), multiply(xw[0].T, g)))
    return f


softmax = partitioned(
    lambda x: jax.nn.softmax(x, -1),
    SdyShardingRule((ArrayMapping(BATCHING, "i"),), (ArrayMapping(BATCHING, "i"),), need_replication_factors=("i",)),
)
merged = partitioned(lambda x: x.reshape(-1), "i j -> (i j)")
by_rank = partitioned(lambda x: 2 * x, lambda mesh, ins, outs: f"{'i j'[: 2 * ins[0].rank - 1]} -> i j")
multiply = with_gradient(product(is_summed=True))
RULES: dict[str, Function] = {
    "a product": lambda w, x: jax.grad(lambda w: jnp.sin(multiply(x, w)).mean())(w),
    "any batch, one dimension whole": lambda w, x: jnp.sin(softmax(x.reshape(-1, 2, 3)) @ w[:3]).mean(),
    "two factors in a dimension": lambda w, x: jnp.sin(merged(x)).mean() + w,
    "a function": lambda w, x: jnp.sin(by_rank(x) @ w).mean(),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("on", [2, 3, {"data": 2, "model": 2}], ids=str)
def test_of_custom_partitioning(name: str, on: On) -> None:
    check(RULES[name], W, X, on=on)
    check(RULES[name], W, X[:22], on=on)
    assert sent(RULES[name], W, X, on=on) == set()


def test_a_partition_of_a_value_that_is_whole_as_well() -> None:
    doubled = partitioned(lambda x: 2 * x, "i j -> i j")
    check(lambda w, x: (w, doubled(jnp.sort(x, axis=0))), W, X[:8], on=4)


def test_a_partition_of_views_whose_slices_are_no_whole_turns() -> None:
    kernel = partitioned(lambda x: jnp.cos(x.reshape(-1, 4, x.shape[1])), "(h w) c -> h w c")
    check(lambda w, x: (w, kernel(jnp.stack([x, 3 * x]).reshape(-1, x.shape[1])).sum(0)), W, X[:12], on=2)


def test_what_a_partition_divides_stays_a_kernel_for_the_next_axis() -> None:
    """By its own rule: what is inside does not divide along rows."""
    kernel = partitioned(lambda x: jnp.sort(x, 0) - jnp.sort(x, 0) + 2 * x, "i j -> i j")
    step = lambda w, x: jnp.sin(kernel(x @ w)).mean()
    on = {"data": 2, "model": 2}
    check(step, RNG.normal(size=(6, 8)), X, on=on, layouts={"": 1})
    assert sent(step, RNG.normal(size=(6, 8)), X, on=on, layouts={"": 1}) == set()


def test_a_partition_that_adds_nothing_up_is_not_trusted_to() -> None:
    step = lambda w, x: jax.grad(lambda w: jnp.sin(with_gradient(product(is_summed=False))(x, w)).mean())(w)
    check(step, W, X, on=4)
    assert sent(step, W, X) == {"all-gather of activations", "repeated"}


def test_a_result_that_a_partition_does_not_add_up_is_not_trusted_to() -> None:
    kernel = partitioned(lambda x: (2 * x, x.sum(0)), "i j -> i j, j")
    check(lambda w, x: (kernel(x)[0].sum() * w, kernel(x)[1]), W, X, on=4)


def test_of_callbacks_without_a_rule() -> None:
    kernel = custom_partitioning(lambda x: jax.nn.softmax(x, -1))
    rows_only = lambda mesh, x: NamedSharding(mesh, P(x.sharding.spec[0], None))
    kernel.def_partition(
        lambda mesh, ins, out: (mesh, jax.nn.softmax, rows_only(mesh, ins[0]), (rows_only(mesh, ins[0]),)),
        infer_sharding_from_operands=lambda mesh, ins, out: rows_only(mesh, ins[0]),
    )  # fmt: skip
    step = lambda w, x: jnp.sin(kernel(x) @ w).mean()
    jax.config.update("jax_use_shardy_partitioner", False)  # else JAX refuses it
    try:
        check(step, W, X, on=4)
        assert sent(step, W, X) == set()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_a_rule_of_dimensions_of_other_lengths_is_not_cut() -> None:
    kernel = partitioned(lambda x: x[:-1] + x[1:], "i j -> i j")
    check(lambda w, x: jnp.sin(kernel(x) @ w).mean(), W, X, on=3)


class Scaled:
    """As TransformerEngine writes its primitives: the rule is that of the class, the parameters are static."""

    impl_static_args = (1,)
    outer_primitive = Primitive("te_scaled_wrapper")
    sizes: ClassVar[list[int]] = []  # of the slices for which its partition was asked

    @staticmethod
    def impl(x: Any, factor: float) -> Any:
        return x * factor

    @classmethod
    def partition(cls, factor: float, mesh: Any, ins: Any, out: Any) -> Any:
        cls.sizes.append(ins[0].shape[0] // mesh.size)
        return mesh, lambda x: x * factor, out.sharding, (ins[0].sharding,)

    infer_sharding_from_operands = None

    @staticmethod
    def shardy_sharding_rule(factor: float, mesh: Any, ins: Any, outs: Any) -> str:
        return "... -> ..."


def test_primitives_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed here: its registry is imitated."""
    p = Scaled.outer_primitive
    p.def_impl(Scaled.impl)
    p.def_abstract_eval(lambda x, factor: x)
    mlir.register_lowering(p, mlir.lower_fun(Scaled.impl, multiple_results=False))
    base = types.SimpleNamespace(_primitive_registry={"Scaled": Scaled})
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.cpp_extensions.base", base)
    step = lambda w, x: jnp.sin(p.bind(x, factor=3.0) @ w).mean()
    check(step, W, X, on=4)
    assert sent(step, W, X) == set()
    assert 6 in Scaled.sizes


# --- products of groups


def ragged(w: Any, x: Any) -> Any:
    sizes = jnp.minimum(SIZES, len(x) // 4)
    return jax.value_and_grad(lambda w: jnp.sin(lax.ragged_dot(jnp.tanh(x * w[0, 0, 0]), w, sizes)).mean())(w)


@pytest.mark.parametrize("on", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [24, 22])
def test_rows_of_groups(on: int, rows: int) -> None:
    check(ragged, EXPERTS, X[:rows], on=on)
    assert sent(ragged, EXPERTS, X[:rows], on=on) == set()


def test_rows_of_groups_before_which_come_others() -> None:
    """Merged with time, the rows of a device are not one run of them."""
    sizes = jnp.array([10, 0, 30, 20, 12], jnp.int32)
    step = lambda w, x: jnp.sin(lax.ragged_dot(jnp.stack([x, 2 * x, 3 * x]).reshape(-1, 6), w, sizes)).mean()
    check(step, EXPERTS, X, on=4)


@pytest.mark.parametrize("on", [{"model": 4}, {"model": 3}, {"data": 2, "model": 4}, {"data": 2, "model": 3}], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_groups_or_widths_over_a_model_axis(on: dict[str, int], dim: int) -> None:
    """Few rows, and large weights: it pays to add up results, and to keep the weights apart."""
    w, x = RNG.normal(size=(8, 32, 48)), RNG.normal(size=(8, 32))
    sizes = jnp.array([0, 1, 3, 0, 2, 1, 1, 0], jnp.int32)
    step = lambda w, x: jax.value_and_grad(lambda w: jnp.sin(lax.ragged_dot(x, w["up"], sizes)).mean())(w)
    check(step, {"up": w}, x, on=on, layouts={"up": dim})
    assert "all-gather of shards" not in sent(step, {"up": w}, x, on=on, layouts={"up": dim})


def test_products_of_scaled_blocks() -> None:
    of_8_bits = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float8_e4m3fn)
    powers = lambda *shape: jnp.asarray(np.exp2(RNG.integers(-2, 2, shape)), jnp.float8_e8m0fnu)
    w, x = (of_8_bits(64, 8), powers(2, 8)), (of_8_bits(24, 64), powers(24, 2))
    step = lambda w, x: jnp.sin(lax.scaled_dot(x[0], w[0], lhs_scale=x[1], rhs_scale=w[1])).mean()
    for on in (2, 3, {"data": 2, "model": 2}):
        check(step, w, x, on=on, tolerance=1e-2)  # results of 16 bits
    assert sent(step, w, x) == set()


# --- calls of the user's


def call(f: Function, method: str) -> Function:
    return lambda x, *more: jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), x, *more, vmap_method=method)


@pytest.mark.parametrize("method", ["broadcast_all", "expand_dims", "sequential"])
def test_callbacks_that_treat_examples_apart(method: str) -> None:
    host = lambda x, w: np.sort(x, -1) * np.asarray(w)[..., :1, 0]
    step = lambda w, x: jnp.sin(jax.vmap(call(host, method), (0, None))(x, w)).mean()
    for rows in (24, 22):
        check(step, W, X[:rows], on=4)
    assert sent(step, W, X) == set()


def test_a_callback_that_declares_nothing_of_its_operand_gets_all_of_it() -> None:
    """Not under vmap, or with what all examples share, the first dimension is no batch."""
    host = lambda x: x - np.asarray(x).mean(0)
    check(lambda w, x: call(host, "broadcast_all")(x) @ w, W, X, on=4)
    check(lambda w, x: jax.vmap(lambda r: (call(host, "broadcast_all")(x) @ w) * r[0])(X), W, X, on=4)


def cholesky(x: Any) -> Any:
    layout = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], np.int32)
    layouts: dict[str, Any] = {"input_layouts": [layout], "output_layouts": [layout, layout[: x.ndim - 2]]}
    target = jax.ffi.ffi_call("lapack_dpotrf_ffi", results, vmap_method="broadcast_all", **layouts)
    return target(x, uplo=np.uint8(ord("L")))[0]


def test_ffi_calls() -> None:
    """Under vmap a target is divided; called with a batch, it may do what it wants, until it has a twin."""
    x = jnp.einsum("bij,bkj->bik", RNG.normal(size=(24, 4, 4)), RNG.normal(size=(24, 4, 4))) + 9 * jnp.eye(4)
    jnp.linalg.cholesky(x)  # loads LAPACK
    vmapped, plain = (lambda w, x, f=f: (w * jnp.tril(f(x))).sum(0) for f in (jax.vmap(cholesky), cholesky))
    for step in (vmapped, plain):
        check(step, 2.0, x, on=4)
    assert (sent(vmapped, 2.0, x), sent(plain, 2.0, x)) == (set(), {"all-gather of activations", "repeated"})
    said = str(jaxdist.explain(decorated(plain, 4), 2.0, x))
    assert not missing(["lapack_dpotrf_ffi"], said)
    placements.register("lapack_dpotrf_ffi", like=lambda x, uplo: (jnp.linalg.cholesky(x), jnp.zeros(len(x), np.int32)))
    check(plain, 2.0, x, on=3)
    assert sent(plain, 2.0, x) == set()


# --- twins


def primitive(name: str, f: Function) -> Primitive:
    p = Primitive(name)
    p.def_impl(f)
    p.def_abstract_eval(lambda *avals: jax.make_jaxpr(f)(*avals).out_avals[0])
    mlir.register_lowering(p, mlir.lower_fun(f, multiple_results=False))
    return p


def test_what_a_twin_can_do_on_slices_its_kernel_does() -> None:
    examples = primitive("kernel_of_examples", lambda x, w: jnp.tanh(x @ w))
    placements.register(examples, like=lambda x, w: jnp.tanh(x @ w), on=(X, W))
    step = lambda w, x: jnp.sin(examples.bind(x, w)).mean()
    for rows, on in ((24, 4), (22, 3)):
        check(step, W, X[:rows], on=on)
    assert sent(step, W, X) == set()
    rows = jaxdist.explain(decorated(lambda w, x: examples.bind(x[::-1], w), 4), W, X).rows
    assert rows, "reversing sends"


@pytest.mark.parametrize("f", [lambda x: x.mean(0), lambda x: x * jnp.arange(len(x))[:, None], lambda x: x / len(x)])
def test_a_twin_that_counts_its_rows_is_computed_whole(f: Function) -> None:
    kernel = primitive(f"kernel_{f.__code__.co_firstlineno}_{len(f.__code__.co_code)}", f)
    placements.register(kernel, like=f)
    check(lambda w, x: jnp.sin(kernel.bind(x)).mean() * w, W, X, on=4)


def test_a_twin_of_what_is_whole_as_well_or_has_a_result_of_its_own() -> None:
    product = primitive("kernel_of_rows", lambda x: jnp.prod(x, 0))
    placements.register(product, like=lambda x: jnp.prod(x, 0))
    check(lambda w, x: (w, product.bind(jnp.sort(x, 0))), W, X[:8], on=2)
    ones = primitive("kernel_of_ones", lambda x: jnp.ones(x.shape[0]))
    placements.register(ones, like=lambda x: jnp.ones(x.shape[0]))
    check(lambda w, x: (w, ones.bind(x).sum(), x.sum()), W, X[:8], on=2)


def test_a_letter_is_for_one_dimension() -> None:
    with raises(ValueError, "bb->b"):
        placements.register("kernel_of_diagonals", "bb->b")


def test_a_twin_with_other_results_is_refused() -> None:
    kernel = primitive("kernel_with_a_false_twin", lambda x: 2 * x)
    with raises(ValueError, "kernel_with_a_false_twin", "twin"):
        placements.register(kernel, like=lambda x: 2.01 * x, on=(X,))
    with raises(ValueError, "on=", "kernel_by_name"):
        placements.register("kernel_by_name", like=lambda x: x, on=(X,))
    with raises(ValueError, "like", "both"):
        placements.register(kernel, "b... -> b...", like=lambda x: x)


@pytest.mark.parametrize("name", ["pad", "reshape", "scan"])
def test_a_kernel_with_the_name_of_an_operation_is_not_that(name: str) -> None:
    one = lambda x: pl.pallas_call(lambda a, b: b.__setitem__(..., 2 * a[...]), x, name=name, interpret=True)(x)
    step = lambda w, x: jnp.sin(jax.vmap(one)(x) @ w).mean()
    check(step, W, X, on=4)
    assert sent(step, W, X) == set()


# --- cuDNN's attention, with a program for CPUs in its place


def attention(q: Any, k: Any, v: Any, bias: Any, lengths: Any, scale: float) -> Any:
    """(B, T, N, H); several heads of queries share one of keys; keys beyond an example's length do not count."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    weights = jnp.einsum("btnh,bsnh->bnts", q, k) * scale + bias
    real = jnp.arange(k.shape[1]) < lengths[:, None, None, None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(real, weights, -1e9)), v)


def forward(q: Any, k: Any, v: Any, bias: Any, lengths: Any, *more: Any, scale: float, **settings: Any) -> Any:
    return attention(q, k, v, bias, lengths, scale), q[:, :, :, 0].swapaxes(1, 2).astype(jnp.float32)


def backward(q: Any, k: Any, v: Any, bias: Any, lengths: Any, *more: Any, scale: float, **settings: Any) -> Any:
    return jax.vjp(lambda q, k, v, bias: attention(q, k, v, bias, lengths, scale), q, k, v, bias)[1](more[-1])


def in_8_bits(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Attention of numbers of 8 bits, without their scales, and the largest weight."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * scale)
    return jnp.einsum("bnts,bsnh->btnh", weights, v), jnp.max(weights).reshape(1, 1, 1, 1)


def largest(x: Any) -> Any:
    return jnp.max(jnp.abs(x)).reshape(1, 1, 1, 1)


def forward_8(q: Any, k: Any, v: Any, *scales: Any, scale: float, is_training: bool, **settings: Any) -> Any:
    out, weight = in_8_bits(q, k, v, scale)
    statistics = [q[:, :, :, 0].swapaxes(1, 2).astype(jnp.float32)] if is_training else []
    return [out.astype(q.dtype), weight, largest(out), *statistics]


def backward_8(q: Any, k: Any, v: Any, out: Any, ct: Any, *rest: Any, scale: float, **settings: Any) -> Any:
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    grads = jax.vjp(lambda q, k, v: in_8_bits(q, k, v, scale)[0], *wide)[1](ct.astype(jnp.float32))
    return [*(g.astype(q.dtype) for g in grads), *map(largest, grads), largest(out.astype(jnp.float32))]


@pytest.fixture
def on_cpus() -> None:
    for p, f in (
        (cudnn._dot_product_attention_fwd_p, forward),
        (cudnn._dot_product_attention_bwd_p, backward),
        (cudnn._dot_product_attention_fp8_fwd_p, forward_8),
        (cudnn._dot_product_attention_fp8_bwd_p, backward_8),
    ):
        mlir.register_lowering(p, mlir.lower_fun(f, multiple_results=True), platform="cpu")


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("on", [2, 3, {"data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("examples_share_the_bias", [False, True])
def test_attention_of_cudnn(on: On, examples_share_the_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples and heads are divided; the gradient of a bias that examples share is a sum over them."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    rng, heads, keys, dim = np.random.default_rng(0), 4, 2, 8

    def step(w: Any, batch: Any) -> Any:
        x, bias, lengths = batch

        def loss(w: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[name]).astype(jnp.bfloat16) for name in "qkv")
            b = (w["bias"] if examples_share_the_bias else bias).astype(jnp.bfloat16)
            y: Any = cudnn.dot_product_attention(
                q, k, v, b, q_seqlen=lengths, kv_seqlen=lengths, mask_type=cudnn.MaskType.PADDING, scale=0.3
            )
            return (y.astype(jnp.float32) ** 2).sum() / len(x)

        return jax.value_and_grad(loss)(w)

    w = {name: rng.normal(size=(16, heads if name == "q" else keys, dim)) for name in "qkv"}
    w |= {"bias": rng.normal(size=(1, heads, 12, 12))} if examples_share_the_bias else {}
    batch = (
        rng.normal(size=(12, 12, 16)),
        rng.normal(size=(12, heads, 12, 12)),
        rng.integers(1, 12, 12).astype(np.int32),
    )
    check(step, w, batch, on=on, tolerance=2e-2)  # in bfloat16
    assert sent(step, w, batch, on=on) == set()


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("on", [2, 4, {"data": 2, "model": 2}], ids=str)
def test_attention_of_cudnn_in_8_bits(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest numbers, by which the next step scales, are those of all examples and heads."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    scales = {name: jnp.ones((1, 1, 1, 1), jnp.float32) for name in cudnn.fp8_params_keys}

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any, scales: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[name]).astype(jnp.float8_e4m3fn) for name in "qkv")
            results: Any = cudnn.dot_product_attention(q, k, v, scale=0.3, use_fp8=True, fp8_params=scales)
            y, *amax = results
            return (y.astype(jnp.float32) ** 2).sum() / len(x), amax

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(w, scales)

    rng = np.random.default_rng(0)
    w = {name: 0.1 * rng.normal(size=(16, 4, 128)).astype(np.float32) for name in "qkv"}
    check(step, w, rng.normal(size=(8, 128, 16)).astype(np.float32), on=on, tolerance=1e-5)
    assert sent(step, w, rng.normal(size=(8, 128, 16)).astype(np.float32), on=on) == set()
