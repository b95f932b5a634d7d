"""`jaxdist.verify`: no false alarm; faults are seen, with the operation where each begins."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import idioms, kernels, operations
from harness import oracle, program_faults
from harness.check import On, decorated
from harness.errors import missing, raises
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.ir.primitives import all_reduce_p  # private: faults are put into what is emitted
from jaxdist.placements.emit import emitter
from jaxdist.placements.model import factors
from jaxdist.step import calls  # private: how often programs are compared

RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(6, 5)), RNG.normal(size=(22, 6))
Function = Callable[..., Any]

# --- no false alarm

MESHES: list[On] = [3, {"data": 2, "model": 2}, 4, {"model": 4}, {"data": 2, "sequence": 2}]
TURNS = [(name, MESHES[k % 5], k % 4) for k, name in enumerate(idioms.IDIOMS)]


@pytest.mark.parametrize(
    ("name", "on", "level"),
    [pytest.param(*turn, marks=() if k % 3 == 0 else pytest.mark.slow) for k, turn in enumerate(TURNS)],
)
def test_idioms(name: str, on: On, level: int) -> None:
    rows = 20 if name in idioms.DIVISIBLE else 21
    case = oracle.idiom(name, rows, level, None)
    batch = jax.tree.map(lambda x: x[:rows], case.batch(0))
    step = decorated(case.step, on, batch_argnums=None)
    assert jaxdist.verify(step, *case.state, batch, points=1)


UNCHECKED = {
    "shape: bits": "bitcast_convert_type of float64",
    "reduce: extremes of complex numbers": "reduce_max of complex numbers",
    "reduce: more cumulative": "cumlogsumexp",
    "reduce: so far, along the batch": "cumlogsumexp",
    "reduce: approximate top k": "approx_top_k",
    "reduce: segments": "scatter-mul of indices that may repeat",
    "index: scatters into a state": "scatter-mul of indices that may repeat",
    "index: own rows in several ways": "scatter-mul of indices that may repeat",
}
OWN = "other: a jaxpr"  # primitives of the catalogue's own, which have no twin
KNOWN = [name for name in operations.OPERATIONS if name not in UNCHECKED and not name.startswith(OWN)]


@pytest.mark.parametrize("names", [KNOWN[k : k + 20] for k in range(0, len(KNOWN), 20)], ids=lambda names: names[0])
def test_operations(names: list[str]) -> None:
    run = lambda w, b: {name: operations.OPERATIONS[name](w, b) for name in names}
    found = jaxdist.verify(decorated(run, 3), operations.state(), operations.batch(7), points=1)
    assert found, found


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_has_no_counterpart_is_named(name: str) -> None:
    found = jaxdist.verify(decorated(operations.OPERATIONS[name], 3), operations.state(), operations.batch(7))
    assert found.equal is None
    assert not found
    assert missing([UNCHECKED[name], "catalogue/operations.py"], str(found)) == []


@pytest.mark.parametrize("name", ["own attention", "gpu attention", "tpu flash attention", "gpu rms norm"])
def test_pallas_kernels(name: str) -> None:
    kernel = kernels.KERNELS[name]
    assert jaxdist.verify(decorated(kernel.step, 4), kernel.weights, kernel.batch(8), points=1)


def test_of_a_kernel_its_twin_is_compared() -> None:
    p = Primitive("verified_by_twin")
    p.def_abstract_eval(lambda x: x)
    step = decorated(lambda w, x: jnp.sin(p.bind(x @ w)).mean(), 4)
    assert jaxdist.verify(step, W, X).unchecked.startswith("verified_by_twin")
    jaxdist.placements.register(p, like=lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True))
    step = decorated(lambda w, x: jnp.sin(p.bind(x @ w)).mean(), 4)
    assert jaxdist.verify(step, W, X)


def until_small(s: Any, x: Any) -> Any:
    """The loop ends by a flag that it carries: in the field that might never be set."""

    def body(state: Any) -> Any:
        v, _, n = state
        new = 0.1 * jnp.tanh(x.T @ (x @ v))
        return new, jnp.abs(new - v).max() < 1e-3, n + 1

    return lax.while_loop(lambda state: ~state[1], body, (s, False, 0))


EDGES: dict[str, Function] = {
    "a loop that ends by a flag": until_small,
    "a product of complex numbers": lambda s, x: jnp.prod(x + 1j * s, 0),
    "a product of nothing": lambda s, x: jnp.prod(x[:0], 0) * s + x,
    "complex numbers beyond the end": lambda s, x: (x[0] + 1j * s).at[jnp.array([1, 9])].get(
        mode="fill", fill_value=2 + 1j),
    "random numbers of 16 bits": lambda s, x: jax.random.normal(jax.random.key(0), x.shape, jnp.bfloat16) * x + s,
    "a Python number": lambda s, x: (s[0], 3 * x.sum()),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("x64", [False, True])
def test_edges(name: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        found = jaxdist.verify(decorated(EDGES[name], 4), W[:, 0], X[:7])
    assert found, found


def test_numbers_of_python_without_64_bits() -> None:
    with jax.enable_x64(False):
        step = decorated(lambda count, rate, w, label: (count + 1, rate * 0.5, w - rate * w[label].mean()), 4)
        assert jaxdist.verify(step, 3, 0.1, X, np.arange(7) % 4)
        assert jaxdist.verify.same(lambda i, x: x * (i + 1), lambda i, x: x * (1 + i), 3, X)


def test_all_bits_of_an_integer_count() -> None:
    as_float = lambda i: lax.bitcast_convert_type(i, np.float64)
    assert jaxdist.verify.same(lambda i, x: as_float(i) * x, lambda i, x: x * as_float(i), np.int64(3 << 40), X)
    assert not jaxdist.verify.same(lambda i, x: as_float(i) * x, lambda i, x: as_float(i + (1 << 45)) * x, 3, X)


def test_types_take_the_place_of_arguments() -> None:
    step = decorated(lambda s, x: (s[0] + 1, jax.random.normal(s[1], x.shape) * x * s[0]), 4)
    state = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(jax.random.key, 0)
    assert jaxdist.verify(step, state, jax.ShapeDtypeStruct((7, 3), np.float32))


def test_keys_labels_and_counters_are_those_of_the_call() -> None:
    def step(state: Any, batch: Any) -> Any:
        key, count, w = state
        chosen = w[batch["label"]] * jax.random.normal(key, (22, 5))
        return (jax.random.split(key)[0], count + 1, w - chosen.sum(0) * (count > 3)), chosen

    labels = {"label": np.arange(22) % 6}
    assert jaxdist.verify(decorated(step, 4), (jax.random.key(0), 7, jnp.asarray(W)), labels)


# --- faults


def model(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]) + jnp.sum(w["a"] ** 2)


def sgd(w: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(model)(w, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), loss


WEIGHTS = {"a": W, "b": RNG.normal(size=(5, 3))}


def reduced(change: Function) -> Function:
    """A fault in what is added up over the devices."""
    original = emitter.Emitter._reduce
    return lambda self, i, x, summand: change(original(self, i, x, summand), x, self)


def backwards(original: Function) -> Function:
    return lambda self, x, dim, size: jnp.flip(original(self, x, dim, size), dim)


def by_entry(params: Any, ins: Any, outs: Any) -> Any:
    operands, results = (tuple(tuple(range(len(shape))) for shape in shapes) for shapes in (ins, outs))
    return factors.Factors(operands, results)


def neighbors(original: Function) -> Function:
    return lambda self, x, split: original(self, jnp.roll(x, split.chunk, split.dim), split)


FAULTS: dict[str, tuple[Any, str, Any, Function, str]] = {
    "padding counts": (emitter.Emitter, "masked", lambda self, x, split, identity: x, sgd, "reduce_sum"),
    "a sum is not added up": (
        emitter.Emitter, "_reduce", reduced(lambda out, x, e: x.astype(out.dtype)), sgd, "div"),
    "a sum is added up twice": (
        emitter.Emitter, "_reduce", reduced(lambda out, x, e: all_reduce_p.bind(out, axes=(e.axis,), wire=None)), sgd,
        "div"),
    "a sum is off by the last bit": (emitter.Emitter, "_reduce", reduced(lambda out, x, e: out * (1 + 2**-50)), sgd,
                                     "div"),
    "a sum is truncated": (
        emitter.Emitter, "_reduce", reduced(lambda out, x, e: out.astype(jnp.int32).astype(out.dtype)), sgd, "div"),
    "a slice is the neighbor's": (
        emitter.Emitter, "cut", neighbors(emitter.Emitter.cut), lambda w, x: x + jnp.sort(x, 0), "sort"),
    "slices are gathered in another order": (
        emitter.Emitter, "gather", backwards(emitter.Emitter.gather), lambda w, x: jnp.linalg.inv(x.T @ x + x[:6]),
        "slice"),
    "a rule says that rows are independent": (
        factors, "FACTORS", {**factors.FACTORS, "sort": by_entry}, lambda w, x: jnp.sort(x, 0), "sort"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, fault, step, operation = FAULTS[name]
    assert jaxdist.verify(decorated(step, 4), WEIGHTS, X)
    monkeypatch.setattr(where, attribute, fault)
    found = jaxdist.verify(decorated(step, 4), WEIGHTS, X, points=1)
    assert found.equal is False
    assert found.results
    assert found.operation == operation
    assert "test_verify.py:" in found.line


@pytest.mark.parametrize(
    ("name", "level"), [("masked_mean", 1), pytest.param("gradient_accumulation", 3, marks=pytest.mark.slow)]
)
def test_all_faults_of_a_program_are_seen(name: str, level: int) -> None:
    """Each of hundreds that changes a result, and where it is."""
    case = oracle.idiom(name, 20, level, None)
    tried = program_faults.outcomes(case.step, case.state, [idioms.batch(k, 20) for k in range(2)], 3)
    changing = [outcome for outcome in tried if outcome.changes]
    assert len(changing) > 250
    assert [outcome for outcome in changing if outcome.points is None] == []
    assert sum(outcome.named for outcome in changing) > 0.95 * len(changing)


def test_faults_are_seen_between_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any one order of the field, one constant may be above the other, and nothing is between them."""
    clipped = [lambda w, x, c=c: jnp.clip((x @ W).sum() * w, -c, c) for c in (0.1, 0.2, 0.3, 0.05, 0.7)]
    assert jaxdist.verify(decorated(clipped[0], 2), 1.0, X)
    monkeypatch.setattr(emitter.Emitter, "_reduce", reduced(lambda out, x, e: 2 * out))
    assert {jaxdist.verify(decorated(f, 2), 1.0, X).equal for f in clipped} == {False}


@pytest.mark.parametrize("c", [0.1, 0.25, 0.5, 0.9, 3.0])
def test_a_constant_is_not_below_zero_at_all_points(c: float) -> None:
    """As in dropout: a random number, which is 0 at least, is compared with a probability."""
    assert not jaxdist.verify.same(lambda x: jnp.maximum(x, 0.0) < c, lambda x: x > jnp.inf, X)


def test_a_scalar_of_the_program_stays_a_float() -> None:
    """The index is 16: of a fraction in the field, the floor would be a hash."""
    quantile = lambda x: jnp.quantile(x, 0.8, axis=0, method="lower")
    assert jaxdist.verify.same(quantile, lambda x: jnp.sort(x, axis=0)[16], X[:21])


MUON = jaxdist.zero(optax.contrib.muon(1e-2, ns_steps=1), level=1, split="owners")


def owners(w: Any, state: Any, x: Any) -> Any:
    return MUON.update(jax.grad(lambda w: sum(jnp.tanh(x @ a).sum() for a in w))(w), state, w)


def test_faults_of_owners_work_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    w = [RNG.normal(size=(4, 4)) for _ in range(2)]
    args = w, MUON.init(w), RNG.normal(size=(8, 4))
    assert jaxdist.verify(decorated(owners, 2), *args, points=1)
    right = emitter.Emitter.inlined
    monkeypatch.setattr(emitter.Emitter, "inlined", lambda *args: [2 * x for x in right(*args)])
    found = jaxdist.verify(decorated(owners, 2), *args, points=1)
    assert found.equal is False
    assert found.operation not in ("", "jaxdist_owners")


def test_a_program_that_is_not_the_step_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original, compared = calls.require_equal, list[str]()
    monkeypatch.setattr(calls, "require_equal", lambda name, *args: (compared.append(name), original(name, *args))[1])
    step = decorated(sgd, 4, verify=True)
    for rows in (22, 22, 20, 20):
        step(WEIGHTS, X[:rows])
    assert compared == ["sgd", "sgd"]  # one for each program
    monkeypatch.setattr(emitter.Emitter, "_reduce", reduced(lambda out, x, e: 2 * out))
    wrong = decorated(sgd, 4, verify=True)
    for _ in range(2):  # caught, and called again
        with raises(jaxdist.StepError, "sgd", "result[1]", "div", "test_verify.py:"):
            wrong(WEIGHTS, X)


def test_where_sums_are_rounded_counts_if_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = jnp.asarray(W, jnp.bfloat16), X.astype(jnp.bfloat16)
    step = lambda w, x: jax.grad(lambda w: jnp.sin(x @ w).sum())(w)
    assert jaxdist.verify(decorated(step, 4), w, x, strict=True)
    monkeypatch.setattr(emitter, "_summed", lambda x, summand, dtype: (x.astype(dtype), lambda y: y))
    assert jaxdist.verify(decorated(step, 4), w, x)
    assert not jaxdist.verify(decorated(step, 4), w, x, strict=True)


def root(x: Any) -> Any:
    return np.sqrt(np.abs(x))


DIFFER: dict[str, tuple[Any, Any]] = {
    "a transform and its inverse": (jnp.fft.ifft, jnp.fft.fft),
    "callbacks": (lambda x: jax.pure_callback(np.abs, x, x), lambda x: jax.pure_callback(root, x, x)),
    "an infinity": (lambda x: jnp.isfinite(jnp.where(x > 0, x, jnp.inf)), lambda x: jnp.isfinite(x)),
}


@pytest.mark.parametrize("name", DIFFER)
def test_functions_that_differ(name: str) -> None:
    f, g = DIFFER[name]
    assert not jaxdist.verify.same(f, g, X[:, 0])
    assert jaxdist.verify.same(f, f, X[:, 0])


def test_a_weak_type_is_no_difference() -> None:
    assert jaxdist.verify.same(lambda x: (x, 1.0), lambda x: (x, jnp.ones(())), X)
    with raises(ValueError, "different types"):
        jaxdist.verify.same(lambda x: (x, 1.0), lambda x: (x, jnp.ones((), np.float32)), X)


def test_a_cast_is_narrower_if_it_loses_digits_or_range() -> None:
    x = jnp.ones(4, jnp.bfloat16)
    same = lambda a, b: jaxdist.verify.same(lambda x: x.astype(a).astype(b), lambda x: x.astype(b), x, strict=True)
    assert not same(jnp.float16, jnp.float32)


def test_refused() -> None:
    applied = jaxdist.verify.same(lambda x: x.at[0].apply(jnp.sin), lambda x: x.at[0].set(0.0), X)
    assert not applied
    assert "scatter" in str(applied)
    with raises(ValueError, "points=0"):
        jaxdist.verify(sgd, WEIGHTS, X, points=0)
    with raises(ValueError, "points=True"):
        jaxdist.verify.same(sgd, sgd, WEIGHTS, X, points=True)
    with raises(jaxdist.StepError, "jax.jit"):
        jax.jit(lambda w, x: jaxdist.verify(sgd, w, x) and w)(WEIGHTS, X)
    with raises(ValueError, "compress", "strict"):
        jaxdist.verify(decorated(sgd, 4, compress="bf16"), WEIGHTS, X, strict=True)


# --- functions that are divided without us


def test_the_same_function_divided_by_xla_or_by_hand() -> None:
    over = Mesh(np.array(jax.devices()), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(RNG.normal(size=(16, 4)).astype(np.float32), NamedSharding(over, P("x")))
    columns = NamedSharding(over, P(None, "x"))
    by_xla = jax.jit(lambda x: lax.with_sharding_constraint(x @ x.T, columns))
    assert jaxdist.verify.same(by_xla, lambda x: x @ x.T, x)
    mean = lambda reduce: jax.shard_map(lambda x: reduce(x.mean(), "x"), mesh=over, in_specs=P("x"), out_specs=P())
    assert jaxdist.verify.same(mean(lax.pmean), lambda x: x.mean(), x)
    found = jaxdist.verify.same(mean(lax.psum), lambda x: x.mean(), x)
    assert (found.equal, found.results) == (False, ("result",))
    with raises(ValueError, "return", "(16, 4)"):
        jaxdist.verify.same(lambda x: x, lambda x: x.sum(0), x)


def put(x: Any, start: Any) -> Any:
    """XLA drops the update beyond the end if the columns are divided (openxla/xla#49118)."""
    return lax.dynamic_update_slice(x, 2 * x[:, :1], [jnp.int32(0), start])


def take(x: Any, start: Any) -> Any:
    """Each device clamps the start by itself (openxla/xla#49122)."""
    return lax.dynamic_slice(x, [jnp.int32(0), start], (2, 6))


@pytest.mark.parametrize("function", [put, take])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_where_xla_divides_wrong(function: Function, dtype: Any) -> None:
    """Both ways to ask for shardings; equal if this version of XLA is right."""
    over = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    columns, everywhere = NamedSharding(over, P(None, "x")), NamedSharding(over, P())
    x, start = np.arange(16, dtype=dtype).reshape(2, 8), np.int32(9)
    by_call = jax.jit(function, in_shardings=(columns, everywhere), out_shardings=columns)
    constrained = jax.jit(lambda x, start: lax.with_sharding_constraint(function(x, start), columns))
    for divided, argument in ((by_call, x), (constrained, jax.device_put(x, columns))):
        is_right = np.array_equal(divided(argument, start), function(x, start))
        assert jaxdist.verify.same(divided, function, argument, start).equal is is_right
        assert jaxdist.verify.same(divided, function, argument, np.int32(1))
