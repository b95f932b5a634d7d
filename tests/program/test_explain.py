"""`explain` lists what a step sends, to the byte: it is compared with the collectives of the step's own program."""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import flows, idioms, operations, traps
from harness import oracle
from harness.check import decorated
from harness.errors import missing
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # private: its primitives have no public names
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.placements.rules.context import RuleContext  # private: nothing else shows what it remembers

KINDS = {
    "psum": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "jaxdist_all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter", "jaxdist_reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather", "jaxdist_all_gather": "all-gather", "all_to_all": "all-to-all", "ppermute": "permute",
}  # fmt: skip


def collectives(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Those of a jaxpr, with how often each runs: a `while` counts as one iteration, and all branches as taken."""
    for eqn in jaxpr.eqns:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if eqn.primitive.name in KINDS and "data" in (axes if isinstance(axes, tuple) else [axes]):  # or one of vmap's
            yield eqn, times
        inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for value in eqn.params.values():
            for body in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(body, ClosedJaxpr):
                    yield from collectives(body.jaxpr, inner)
                elif isinstance(body, Jaxpr):
                    yield from collectives(body, inner)


def sent(step: Any, *args: Any, devices: int) -> dict[str, int]:
    """Bytes of the whole values by kind, read from the program of a device."""
    found = Counter[str]()
    program = step.program(*args).placed.emitted.program  # private: a lowered step has no counts of iterations
    for eqn, times in collectives(program.jaxpr):
        kind = KINDS[eqn.primitive.name]
        parts: Any = eqn.outvars if kind == "reduce-scatter" else eqn.invars
        for v in parts:
            size = math.prod(v.aval.shape) * v.aval.dtype.itemsize
            found[kind] += size * times * (1 if kind == "all-reduce" else devices)
    return dict(+found)


def listed(step: Any, *args: Any) -> dict[str, int]:
    found = Counter[str]()
    for row in jaxdist.explain(step, *args).rows:
        if row.what != "repeated":
            found[row.what.partition(" of ")[0]] += row.bytes
    return dict(found)


def compare(step: Callable[..., Any], *args: Any, devices: int, **settings: Any) -> None:
    over = decorated(step, devices, **settings)
    assert listed(over, *args) == sent(over, *args, devices=devices)


@pytest.mark.parametrize("name", idioms.IDIOMS)
def test_of_idioms(name: str) -> None:
    k = list(idioms.IDIOMS).index(name)
    rows, level, devices = (21, 20, 24)[k % 3], k % 4, (4, 3, 8)[k // 4 % 3]
    case = oracle.idiom(name, 24 if name in idioms.DIVISIBLE else rows, level)
    batch = jax.tree.map(lambda x: x[: 24 if name in idioms.DIVISIBLE else rows], case.batch(0))
    compare(case.step, *case.state, batch, devices=devices)


def test_a_gradient_of_gathered_rows_is_summed_straight_into_rows() -> None:
    """Although several operations take the sum."""
    case = oracle.idiom("infonce", 24)
    rows = jaxdist.explain(decorated(case.step, 4), *case.state, jax.tree.map(lambda x: x[:24], case.batch(0))).rows
    assert "reduce-scatter" in {row.what for row in rows}


@pytest.mark.parametrize("rows", [8, 5])
def test_of_operations(rows: int) -> None:
    names = [*operations.OPERATIONS]
    for some in (names[k : k + 30] for k in range(0, len(names), 30)):
        step = lambda w, b, some=some: {name: operations.OPERATIONS[name](w, b) for name in some}
        compare(step, operations.state(), operations.batch(rows), devices=4)


@pytest.mark.parametrize("devices", [3, 4])
def test_of_control_flow(devices: int) -> None:
    x = np.random.default_rng(0).normal(size=(16, 6))
    compare(lambda w, x: {name: f(w, x) for name, f in flows.FLOWS.items()}, flows.W, x, devices=devices)


def test_of_traps() -> None:
    for f, w, x, devices in traps.TRAPS.values():
        compare(f, w, x, devices=devices)


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("is_returned", [False, True])
def test_of_a_stored_matrix_whole_and_by_columns(is_returned: bool, level: Any) -> None:
    """It is gathered, and its columns are exchanged for rows all the same: the whole is not kept for that."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        turned = state.T
        of_whole = jnp.linalg.qr(turned if is_returned else state)[1][0, 0]
        out = updates + of_whole
        return (out, turned) if is_returned else (out + state * turned, state)

    tx = jaxdist.zero(optax.GradientTransformation(lambda params: params, update), level, split="slices")
    loss = lambda w, x: (jnp.tanh(x @ w) ** 2).mean()
    step = lambda w, s, x: tx.update(jax.grad(loss)(w, x), s, w)
    compare(step, jnp.eye(8), jnp.ones((8, 8)), np.ones((16, 8)), devices=4)


W, X = jnp.arange(8.0), np.random.default_rng(0).normal(size=(64, 8))


N = 32  # features of the batch
FIXED = np.linspace(-1, 1, N * N).reshape(N, N)
FAR = np.abs(np.arange(N)[:, None] - np.arange(N)).clip(0, 7)


def low_rank(p: Any, x: jax.Array) -> jax.Array:
    return ((x @ (FIXED + p["a"] @ p["b"])) ** 2).mean()


def distances(p: Any, x: jax.Array) -> jax.Array:
    return (jax.nn.softmax(x[:, :, None] * x[:, None] + p["table"][FAR].transpose(2, 0, 1)[:, None]) ** 2).mean()


def long_kernel(p: Any, x: jax.Array) -> jax.Array:
    kernel = jnp.exp(-np.arange(N)[:, None] * p["rates"]) @ p["gains"]
    spectrum = jnp.fft.rfft(x, n=2 * N, axis=1)[:, :, None] * jnp.fft.rfft(kernel, n=2 * N, axis=0)
    return (jnp.fft.irfft(spectrum, n=2 * N, axis=1) ** 2).mean()


def recurrent(p: Any, x: jax.Array) -> jax.Array:
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(x + h @ p["w"]), None), jnp.zeros_like(x), None, length=9)
    return (h**2).mean()


def settles(p: Any, x: jax.Array) -> jax.Array:
    """Whose loop ends by itself, and which no derivative is taken of."""
    w = jax.lax.stop_gradient(p["w"])
    return (p["w"] * jax.lax.while_loop(lambda h: h.max() > 0.1, lambda h: jnp.tanh(0.1 * h @ w), x).mean(0)).sum()


def couples(p: Any, x: jax.Array) -> jax.Array:
    """All pairs of examples, in each of Sinkhorn's iterations."""
    y = jnp.tanh(x @ p["w"])

    def body(f: jax.Array, _: None) -> tuple[jax.Array, None]:
        cost = (x**2).sum(-1)[:, None] + (y**2).sum(-1)[None] - 2 * x @ y.T
        g = -jax.nn.logsumexp(f[:, None] - cost, axis=0)
        return -jax.nn.logsumexp(g[None] - cost, axis=1), None

    return jax.lax.scan(body, jnp.zeros(len(x)), None, length=20)[0].mean()


@pytest.mark.parametrize(
    ("loss", "level", "most"),
    [
        # The gradients of the parameters, not of the weight that they build, and the loss.
        (low_rank, 0, 1.01), (distances, 0, 1.1), (long_kernel, 0, 1.01),
        # The weight once in each direction, and its gradient: not in each iteration.
        (recurrent, 3, 3.01), (settles, 3, 3.1),
        # The examples and their gradients once, twice as large; sums over the pairs in each iteration.
        (couples, 0, 12),
    ],
)  # fmt: skip
def test_what_is_sent_at_most(loss: Callable[..., Any], level: Any, most: float) -> None:
    """Times the bytes of the parameters."""
    shapes = {"a": (N, 2), "b": (2, N), "table": (8, 2), "rates": (3,), "gains": (3, 2), "w": (N, N), "scale": (N,)}
    p = {name: 0.1 * jnp.ones(shape) for name, shape in shapes.items() if f'"{name}"' in inspect.getsource(loss)}
    tx = jaxdist.zero(optax.sgd(0.1), level=level)

    def step(p: Any, opt: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        updates, opt = tx.update(grads, opt, p)
        return optax.apply_updates(p, updates), opt, value

    x = np.linspace(-1, 1, 64 * N).reshape(64, N)
    compare(step, p, tx.init(p), x, devices=4)
    total = sum(listed(decorated(step, 4), p, tx.init(p), x).values())
    assert total <= most * sum(leaf.nbytes for leaf in jax.tree.leaves(p)) + 16


def test_a_loop_over_microbatches_gathers_a_layer_at_a_time() -> None:
    """At level 3 of ZeRO no device holds a whole model, though gathering it before the loop would send less."""
    tx, p = jaxdist.zero(optax.sgd(0.1), level=3), [0.1 * jnp.ones((N, N)) for _ in range(6)]

    def step(p: Any, opt: Any, x: jax.Array) -> Any:
        loss = lambda p, x: (functools.reduce(lambda x, w: jnp.tanh(x @ w), p, x) ** 2).mean()
        grads = jaxdist.grad(loss, microbatches=4)(p, x)
        updates, opt = tx.update(grads, opt, p)
        return optax.apply_updates(p, updates), opt

    gathered = listed(decorated(step, 4), p, tx.init(p), np.ones((1024, N)))["all-gather"]
    assert gathered >= 4 * 2 * 3 * p[0].nbytes  # at least half of the layers each time, in both directions


def test_a_placement_prints() -> None:
    """As CONTRIBUTING shows it, to see why a value is sent."""
    step = decorated(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), 4)
    (propagation,) = step.program(W, X).placed.emitted.propagations
    lines = [line for line in str(propagation).splitlines() if "= dot_general" in line or "= sub" in line]
    _, gradient, update = lines
    assert not missing(["float64[8] partial", "split(0)"], gradient)
    assert not missing(["float64[8] whole", "sub needs all of it; all-reduce of", "64 B"], update)


def test_a_mix_of_shards_and_of_the_batch_is_of_the_batch() -> None:
    """A branch gives either: what is sent is an activation, and is kept for the backward pass."""

    def step(w: Any, x: Any) -> Any:
        either = jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: w)
        return jnp.sort(either, axis=0)

    said = jaxdist.explain(decorated(step), jaxdist.shard(jnp.ones((64, 8))), X)
    sent = [row.what for row in said.rows if row.operation == "sort" and row.what != "repeated"]
    assert sent == ["all-gather of activations"]


@pytest.mark.parametrize("name", ["transformer_scanned", "built_weights"])
def test_a_strategy_depends_on_no_more_than_it_is_looked_up_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Propagations of one block share them: one that looks at more would be of another propagation."""
    look_up = RuleContext.strategies
    facts = lambda s: (list(s.in_forms), list(s.out_placements), list(s.out_forms), list(s.sends), s.name, s.why)

    def and_anew(ctx: RuleContext, node: Any) -> Any:
        default, others = look_up(ctx, node)
        anew, others_anew = ctx._strategies(node, [ctx.placements[i] for i in node.ins])
        assert [facts(s) for s in (default, *others)] == [facts(s) for s in (anew, *others_anew)], node.name
        return default, others

    monkeypatch.setattr(RuleContext, "strategies", and_anew)
    case = oracle.idiom(name, 24, 3)
    jaxdist.explain(decorated(case.step, 4), *case.state, jax.tree.map(lambda x: x[:24], case.batch(0)))


def test_of_a_token_before_a_sequence() -> None:
    """Of its gradient nothing moves but the token's rows."""
    step = lambda w, x: jax.grad(lambda w: jnp.sin(jnp.concatenate([w[None], x])).mean())(w)
    compare(step, W, X, devices=4)


def multiply(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] @ w_ref[...] + 0 * pl.program_id(0)


def in_pallas(x: jax.Array, w: jax.Array) -> jax.Array:
    """In four blocks of rows, of which the kernel reads the number."""
    blocks = lambda columns: pl.BlockSpec((len(x) // 4, columns), lambda i: (i, 0))
    return pl.pallas_call(
        multiply, jax.ShapeDtypeStruct((len(x), w.shape[1]), x.dtype), grid=(4,),
        in_specs=[blocks(len(w)), pl.BlockSpec()], out_specs=blocks(w.shape[1]), interpret=True,
    )(x, w)  # fmt: skip


without_a_rule = custom_partitioning(lambda x, w: x @ w)
without_a_rule.def_partition(partition=lambda *_: None)
# By the name that `explain` gives them: the kernel, and why it is computed whole.
KERNELS: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], str]] = {
    "pallas_call multiply": (in_pallas, "the kernel reads program_id(0)"),
    "custom_partitioning <lambda>": (without_a_rule, "custom_partitioning needs all of it"),
    "ffi_call multiply": (
        lambda x, w: jax.ffi.ffi_call("multiply", jax.ShapeDtypeStruct((len(x), w.shape[1]), x.dtype))(x, w),
        "ffi_call needs all of it",
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_work_in_kernels_is_counted(name: str) -> None:
    """Four devices repeat a product of a kernel, and divide one of the same size: of five parts, four."""
    kernel, why = KERNELS[name]
    w, x = jnp.zeros((256, 256), np.float32), np.zeros((64, 256), np.float32)
    rows = jaxdist.explain(decorated(lambda w, x: (kernel(x, w) @ w).sum(), 4), w, x).rows
    assert [round(row.share, 1) for row in rows if (row.what, row.operation) == ("repeated", name)] == [0.8]
    assert why in [row.why for row in rows if row.operation == name]


def attention(x: jax.Array, **settings: Any) -> jax.Array:
    q = jnp.broadcast_to(x[..., None], (*x.shape, 64)).astype(jnp.bfloat16).reshape(len(x), 4, -1, 64)
    return jnp.asarray(cudnn.dot_product_attention(q, q, q, scale=1.0, **settings))


def in_blocks(x: jax.Array, rows: int) -> jax.Array:
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    body = lambda a, b: b.__setitem__(..., 2 * a[...])
    return pl.pallas_call(body, x, grid=(len(x) // rows,), in_specs=[block], out_specs=block, interpret=True)(x)


def on_cores(x: jax.Array) -> jax.Array:
    body = lambda a, b: b.__setitem__(..., 2 * a[...])
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)
    kernel: Any = pl.kernel(body, out_type=x, mesh=mesh, interpret=True)
    return kernel(x)


def total(x: jax.Array) -> jax.Array:
    """Only some blocks ask whether they are the first: here no interpreter could run it."""

    def body(a: Any, y: Any) -> None:
        clear = lambda: y.__setitem__(..., jnp.zeros(y.shape, y.dtype))
        pl.when(a[0, 0] > 0)(lambda: pl.when(pl.program_id(0) == 0)(clear))
        y[...] += a[...].sum(0, keepdims=True)

    blocks = {"in_specs": [pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))], "out_specs": pl.BlockSpec()}
    return pl.pallas_call(body, jax.ShapeDtypeStruct((1, x.shape[1]), x.dtype), grid=(len(x),), **blocks)(x)


def row_by_row(x: jax.Array, body: Callable[..., None], *memory: Any) -> jax.Array:
    block = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(body, x, grid=(len(x),), in_specs=[block], out_specs=block, scratch_shapes=memory)(x)


def at_random(a: Any, b: Any) -> None:
    b[...] = a[...] * pltpu.prng_random_bits(a.shape).astype(a.dtype)


def by_copy(a: Any, b: Any, done: Any) -> None:
    copy = pltpu.make_async_copy(a, b, done)
    copy.start()
    copy.wait()


WHY_WHOLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "its dropout draws by position in the whole batch": lambda x: attention(x, dropout_rate=0.5),
    "its blocks along dimension 0 do not divide among 4 devices": lambda x: in_blocks(x, 8),
    "it is written for a mesh of cores": on_cores,
    "the kernel uses prng_random_bits": lambda x: row_by_row(x, at_random),
    "the kernel uses dma_start": lambda x: row_by_row(x, by_copy, pltpu.SemaphoreType.DMA),
    "all steps along axis 0 of its grid write to one result, and its body depends on the place of the step": total,
}


@pytest.mark.filterwarnings("ignore:pltpu.create_tensorcore_mesh is deprecated")  # what takes its place is new in 0.11
@pytest.mark.parametrize("why", WHY_WHOLE)
def test_why_a_kernel_is_whole(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    w, x = jnp.ones(8, np.float32), np.ones((24, 8), np.float32)
    rows = jaxdist.explain(decorated(lambda w, x: WHY_WHOLE[why](x * w).sum(), 4), w, x).rows
    assert [row.why for row in rows if row.what == "all-gather of activations"] == [why]


def test_a_scan_along_the_batch_sends_few_rows() -> None:
    """JAX takes it apart into every second row, and that again: neighbors send a row each time, then one is left."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(operations.recurrence(jax.nn.sigmoid(x * w), x)).mean()

    x = np.random.default_rng(0).normal(size=(1024, 8))
    rows = jaxdist.explain(decorated(jax.grad(loss), 4), W, x).rows
    assert sum(row.bytes for row in rows if row.what != "repeated") < x.nbytes / 2


SUMMED = jaxdist.per_device(lambda x: jax.lax.psum(x, "data"), P("data"), P())


@pytest.mark.parametrize(
    ("step", "tokens"),
    [
        (lambda w, x: w + x.max(0), ("all-reduce (reduce_max)", "64 B")),
        (lambda w, x: x[::-1] * w, ("permute (rev)", "4.1 kB")),
        (
            lambda w, x: jax.lax.reduce_window(x * w, 0.0, jax.lax.add, (2, 1), (1, 1), "VALID").max(0),
            ("permute (reduce_window_sum)", "256 B"),
        ),
        (lambda w, x: (x > w).any(0), ("all-reduce (reduce_or)", "32 B")),
        (lambda w, x: jax.pure_callback(np.sin, jax.typeof(x * w), x * w), ("all-reduce (pure_callback)", "4.1 kB")),
        (lambda w, x: SUMMED(x), ("all-reduce (shard_map)", "1.02 kB")),
    ],
)
def test_what_an_operation_sends_itself(step: Any, tokens: tuple[str, ...]) -> None:
    said = str(jaxdist.explain(decorated(step, 4), W, X))
    assert not missing([*tokens, "over data"], said)
