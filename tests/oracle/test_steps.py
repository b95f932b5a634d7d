"""What else a step does: it names axes, changes arguments, prints, checks, compresses, and runs where a mesh is set."""

import functools
import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import operations
from harness import jobs, programs
from harness.check import check, check_steps, close, compare, decorated, train_step
from harness.errors import raises
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray([1.0, -2.0, 0.5])


def loss_of(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def sgd(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(loss_of)(w, x), loss_of(w, x)


# --- names of axes


def named(w: Any, x: Any) -> Any:
    aux = {
        "total": lax.psum(jnp.sum(x), "data"), "mean": lax.pmean(x.mean(0), "data"),
        "everyone": lax.all_gather(jnp.sum(x), "data"), "largest": lax.pmax(x.max(), "data"),
        "index": lax.axis_index("data"), "size": lax.psum(1, "data"), "parts": lax.axis_size("data"),
        "scattered": lax.psum_scatter(x.T, "data", tiled=True), "moved": lax.ppermute(w, "data", [(0, 0)]),
        "exchanged": lax.all_to_all(x, "data", 0, 1, tiled=True),
    }  # fmt: skip
    grads = jax.grad(lambda w: loss_of(w, x) * lax.pmean(loss_of(w, x), "data"))(w)  # as BatchNorm over an axis does
    return w - lax.pmean(grads, "data"), aux


def test_the_axis_has_size_one() -> None:
    aux = {"total": X.sum(), "mean": X.mean(0), "everyone": X.sum()[None], "largest": X.max(), "index": 0, "size": 1,
           "parts": 1, "scattered": X.T, "moved": W, "exchanged": X}  # fmt: skip
    close(decorated(named)(W, X), (W - jax.grad(lambda w: loss_of(w, X) ** 2)(W), aux))
    assert "all-gather" not in {kind for kind, *_ in programs.sent(decorated(named), W, X)}


@pytest.mark.parametrize("holder", operations.HOLDERS)
def test_the_axis_in_a_jaxpr_among_the_parameters_of_an_operation(holder: str) -> None:
    step = lambda w, x, axis: operations.holding(holder, w, x, axis)
    w, x = jnp.ones(6), np.arange(96.0).reshape(16, 6)
    close(decorated(functools.partial(step, axis="data"))(w, x), step(w, x, ""))


def test_the_axis_by_another_name(caplog: pytest.LogCaptureFixture) -> None:
    step = lambda w, x: w - lax.pmean(jax.grad(loss_of)(w, x), "batch")
    with caplog.at_level(logging.INFO, "jaxdist"):
        close(decorated(step)(W, X), W - jax.grad(loss_of)(W, X))
    assert sum("'batch'" in m for m in caplog.messages) == 1
    own = lambda w, x: w + jax.vmap(lambda r: r.sum() - lax.pmean(r.sum(), "rows"), axis_name="rows")(x).max()
    check(own, W, X)  # an axis that the step binds itself is its own


@pytest.mark.parametrize(
    ("call", "tokens"),
    [
        (lambda x: lax.ppermute(x, "data", [(0, 1)]), ("permutation",)),
        (lambda x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]), ("groups",)),
        (lambda x: lax.pmean(lax.psum(x, "rows"), "columns"), ("'rows'", "'columns'")),
    ],
)
def test_what_reaches_beyond_the_axis_is_refused(call: Any, tokens: tuple[str, ...]) -> None:
    with raises((jaxdist.StepError, ValueError), *tokens):
        jaxdist.data_parallel(lambda w, x: (w, call(x)))(W, X)


DIVIDED: dict[str, tuple[Any, bool]] = {
    "by device_count": (lambda g: lax.psum(g, "batch") / jax.device_count(), True),
    "what was gathered": (lambda g: lax.all_gather(g, "batch").sum(0) / len(jax.devices()), True),
    "pmean": (lambda g: lax.pmean(g, "batch"), False),
    "by axis_size": (lambda g: lax.psum(g, "batch") / lax.axis_size("batch"), False),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_sum_over_the_axis_that_is_divided_by_the_devices_is_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under pmap it is the mean; here it is N times too small."""
    mean, wrong = DIVIDED[name]
    jaxdist.data_parallel(lambda w, x: w - 0.1 * mean(jax.grad(loss_of)(w, x))).lower(W, X)  # type: ignore[attr-defined]
    said = [m for m in caplog.messages if "'batch'" in m and "test_steps.py:" in m and "pmean" in m]
    assert len(said) == wrong, caplog.messages


def test_what_padding_costs_is_said_of_a_steps_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    first = decorated(lambda w, x: w + x.mean(), 3)
    for rows in (64, 1):  # a tail, too
        first(0.0, np.ones(rows))
    even = decorated(lambda w, x: w - x.mean(), 4)
    even(0.0, np.ones(64))
    said = [message for message in caplog.messages if "padding" in message]
    assert ["64 rows over 3 devices: 2 of 66" in message for message in said] == [True], said


# --- effects


def test_prints_are_of_whole_values_and_come_once(capfd: pytest.CaptureFixture[str]) -> None:
    def f(w: Any, x: Any) -> Any:
        jax.debug.print("sum {s:.3f} rows {n}", s=x.sum(), n=x[:, 0].shape[0])
        jax.debug.callback(lambda x: print("shape", x.shape), x)
        return lax.scan(lambda c, _: (jax.debug.print("turn {c}", c=c) or c + 1, None), 0, jnp.arange(3))[0]

    jax.block_until_ready(decorated(f, 4)(W, X))
    jax.effects_barrier()
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == ["shape (16, 3)", f"sum {X.sum():.3f} rows 16", "turn 0", "turn 1", "turn 2"]


def test_what_is_random_or_impure_is_the_same_on_each_device() -> None:
    calls: list[int] = []

    def now(x: Any) -> Any:
        calls.append(x.shape[0])
        return np.float64(len(calls))

    def f(w: Any, x: Any) -> Any:
        drawn = lax.rng_uniform(jnp.float32(0), jnp.float32(1), (3,))
        counted = jax.experimental.io_callback(now, jax.ShapeDtypeStruct((), np.float64), x)  # type: ignore[attr-defined]
        pure = jax.pure_callback(lambda x: x.max(0), jax.ShapeDtypeStruct((3,), np.float64), x)
        return w, {"drawn": drawn, "counted": counted, "pure": pure}

    w, aux = jax.block_until_ready(decorated(f, 4)(W, X))
    assert calls == [16], "once, with all of it"
    np.testing.assert_array_equal(aux["pure"], X.max(0))
    jaxdist.check_sync((w, aux))


CALLED: dict[str, Any] = {
    "pure": lambda host, x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "impure": lambda host, x: jax.experimental.io_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x),  # type: ignore[attr-defined]
    "debug": lambda host, x: jax.debug.callback(host, x) or x,
    "of another shape": lambda host, x: jax.pure_callback(
        lambda x: host(x)[: None if x.max() < 9 else 1], jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "in a loop": lambda host, x: lax.scan(lambda c, _: (CALLED["pure"](host, c), None), x, None, 2)[0],
    "on each device": lambda host, x: jaxdist.per_device(
        lambda x: lax.psum(CALLED["pure"](host, x), "data") / 4, P("data"), P("data"))(x),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_a_callback_that_raises(name: str) -> None:
    """The call raises, as under `jax.jit`; no device waits for ever, and the next call is as any other."""

    def host(x: Any) -> Any:
        if (x > 9).any() and name != "of another shape":
            raise ValueError("boom on purpose")
        return np.asarray(x)

    step = decorated(lambda w, x: (w, CALLED[name](host, x).sum() + (x @ w).mean()), 4)
    for _ in range(2):
        step(W, X)
        with raises(jax.errors.JaxRuntimeError, "callback", "float64[16,3]" if "shape" in name else "boom on purpose"):
            step(W, X + 10)


def taken_out(batch: Any, w: Any) -> Any:
    y = batch.pop("y")
    batch["residual"] = batch["x"] @ w - y
    return jnp.mean(batch["residual"] ** 2)


def nested(batch: Any, w: Any) -> Any:
    batch["more"]["views"].append(batch["x"] * 2)
    batch["more"]["views"][0] = batch["more"]["views"][0] + 1
    return jnp.mean((sum(batch["more"]["views"]) @ w - batch["y"]) ** 2)


@pytest.mark.filterwarnings("ignore:.*was called inside another transformation")
@pytest.mark.parametrize("use", [taken_out, nested])
def test_a_batch_to_work_in_is_as_it_was_afterwards(use: Any) -> None:
    step = lambda w, batch: w - 0.1 * jax.grad(lambda w: use(batch, w))(w)
    batch: Any = lambda: {"x": X, "y": np.ones(16), "more": {"views": [X]}}
    want, many = jax.jit(step)(W, batch()), jaxdist.data_parallel(step)
    for call in (many, jax.jit(lambda w, batch: many(w, batch))):
        given_ = batch()
        close(call(W, given_), want)
        assert jax.tree.structure(given_) == jax.tree.structure(batch())
        assert given_["x"] is X
        assert given_["more"]["views"][0] is X


def test_an_argument_that_is_changed_and_returned() -> None:
    def step(state: Any, batch: Any) -> Any:
        x = batch.pop("x")
        state["w"] -= 0.1 * x.mean(0)
        state["old"], state["older"] = state["w"], state["old"]
        return state

    state = {"w": W, "old": W, "older": W}
    close(jaxdist.data_parallel(step)(state, {"x": X}), jax.jit(step)(dict(state), {"x": X}))


# --- errors and debugging


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_an_error_of_the_step_shows_the_users_lines_alone() -> None:
    model = lambda w, x: x @ w["b"]
    step = jaxdist.data_parallel(lambda w, b: jax.tree.map(lambda p: p - jnp.mean(model(w, b["x"])), w))
    with pytest.raises(TypeError) as error:
        step({"b": jnp.ones(7)}, {"x": X})
    assert set(frames(error.value)) == {__file__}
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jaxdist.data_parallel(lambda w, batch: w if batch["x"].sum() > 0 else 2 * w)(W, {"x": X})
    assert "batch['x']" in str(error.value)


def test_an_error_between_steps_shows_no_frames_of_ours(tmp_path: Path) -> None:
    for call in (lambda: jaxdist.save(tmp_path, {"w": object()}, 1), lambda: jaxdist.restore(tmp_path / "none", W)):
        with pytest.raises((TypeError, FileNotFoundError)) as error:
            call()
        assert set(frames(error.value)) == {__file__}


def test_debug_nans_names_the_leaf_and_keeps_the_state() -> None:
    step = jaxdist.data_parallel(lambda w, x: (w - 0.1 * jnp.mean(jnp.log(x), 0), jnp.exp(1e4 * abs(x).max())))
    w, _ = step(W, abs(X))
    with jax.debug_nans(True):
        with raises(FloatingPointError, "result[0]", "NaN"):
            step(w, X)
        found, infinite = step(w, abs(X))  # the state is still there, and infinity is not NaN
    assert np.isinf(infinite)
    close(found, W - 0.2 * np.log(abs(X)).mean(0))
    with jax.debug_infs(True), raises(FloatingPointError, "result[1]", "infinite"):
        step(found, abs(X))


def test_debug_nans_does_not_fire_on_padding() -> None:
    x = np.abs(X[:5]) + 0.1
    f = lambda x: [jnp.log(x).sum(0), (1 / x).mean(0), (x / x.sum(0)).max(), jnp.sqrt(x.min(0)), x.T @ jnp.log(x)]
    with jax.debug_nans(True):
        check(f, x, on=4, batch_argnums=0)


def test_disable_jit_is_refused() -> None:
    step = jaxdist.data_parallel(lambda w, x: w - x.mean(0))
    with jax.disable_jit(), raises(TypeError, "disable_jit", "step.__wrapped__"):
        step(W, X)


def test_no_tracer_outlives_its_trace_and_no_warning_is_made() -> None:
    step = lambda w, x: jaxdist.value_and_grad(lambda w, x: loss_of(jax.checkpoint(jnp.sin)(w), x), microbatches=2)(
        w, x
    )
    with jax.checking_leaks():
        check(step, W, X)


# --- what is finite


def with_nan(row: int) -> np.ndarray:
    x = np.ones((8, 3))
    x[row, 1] = np.nan
    return x


@pytest.mark.parametrize("level", [0, 2, 3])
def test_gradients_that_are_not_finite_are_named_and_nothing_is_lost(level: Any) -> None:
    tx = jaxdist.zero(optax.adam(0.1), level)

    @jaxdist.data_parallel(check_finite=True)
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["b"] ** 2))(params)
        jaxdist.check_finite(grads, "grads")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"b": jnp.ones(13), "w": jnp.ones((3, 11))}
    params, opt_state, _ = step(params, tx.init(params), np.ones((8, 3)))
    with raises(FloatingPointError, "call 2", "grads['w']", "33 NaN"):
        step(params, opt_state, with_nan(0))
    step(params, opt_state, np.ones((8, 3)))


def test_what_a_device_has_of_its_own_names_the_device() -> None:
    step = jaxdist.data_parallel(
        lambda w, x: (w, jaxdist.check_finite({"logits": x * w, "n": jnp.arange(3)}, "out")["n"])
    )
    step(jnp.float32(1), np.ones((8, 3)))
    x = with_nan(2)
    x[6] = [np.inf, -np.inf, 1]
    with raises(FloatingPointError, "out['logits']", "1 NaN", "2 infinite", "device 2, 6"):
        step(jnp.float32(1), x)


@pytest.mark.parametrize("inner", [jax.grad, jax.vmap, lambda look: lambda w: lax.map(look, w)])
def test_a_check_inside_of_an_inner_function_is_refused(inner: Any) -> None:
    look = lambda v: jnp.sum(jaxdist.check_finite(v, "v"))
    with raises(jaxdist.StepError, "check_finite", "'v'"):
        jaxdist.data_parallel(lambda w, x: (w, jnp.sum(inner(look)(w)) + jnp.mean(x)))(jnp.ones(3), X)


def test_checks_outside_of_a_step() -> None:
    tree = {"a": jnp.ones(2), "n": 3, "p": jaxdist.shard(jnp.arange(9.0)), "h": np.array([1.0, np.inf])}
    with raises(FloatingPointError, "grads['h']", "1 infinite"):
        jaxdist.check_finite(tree, "grads")
    good = tree | {"h": np.ones(2)}
    assert jaxdist.check_finite(good) is good


# --- 16 bits on the wire

LOSS = {"bf16": 2.0**-8, "fp16": 2.0**-10}
MATRIX, ROWS = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3))), np.random.default_rng(0).normal(size=(64, 5))


def sines(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.sin(x @ w))


def accumulated(w: Any, x: Any) -> Any:
    add = lambda total, part: (total + jax.grad(sines)(w, part) / 4, None)
    return w - lax.scan(add, jnp.zeros_like(w), x.reshape(4, -1, 5))[0], sines(w, x)


@pytest.mark.parametrize(("compress", "dtype"), [("bf16", "float64"), ("fp16", "float32")])
@pytest.mark.parametrize("step", [lambda w, x: (w - jax.grad(sines)(w, x), sines(w, x)), accumulated])
def test_compressed_gradients_lose_what_is_stated_and_losses_nothing(compress: Any, dtype: str, step: Any) -> None:
    w, x = MATRIX.astype(dtype), ROWS.astype(dtype)
    (got, loss), (exact, exact_loss) = (decorated(step, 8, compress=c)(w, x) for c in (compress, None))
    parts = np.stack([jax.grad(sines)(w, part) for part in np.split(x, 8)])
    error = np.abs(np.asarray(got) - np.asarray(exact))
    assert (error <= 2 * LOSS[compress] * np.abs(parts).mean(0) + 1e-6).all()
    assert error.max() > 1e-6, "nothing was compressed"
    np.testing.assert_array_equal(loss, exact_loss)


def test_what_is_no_gradient_is_not_compressed() -> None:
    """Losses, counts, statistics of the batch and what follows from them, sums, parameters that a loop moves."""

    def step(state: Any, x: Any) -> Any:
        z = x @ state["w"]
        z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3)
        aux = {"loss": sines(state["w"], x), "mean": z.mean(0), "count": jnp.sum(z > 0, 0), "second": x.T @ x}
        return {"w": state["w"], "total": state["total"] + x.sum(0), "moments": 0.9 * state["moments"] + x.T @ x}, aux

    state = {"w": MATRIX, "total": jnp.zeros(5), "moments": jnp.zeros((5, 5))}
    got, want = (decorated(step, 8, compress=c)(state, ROWS) for c in ("bf16", None))
    close(got, want, 0)
    half = {"half": jnp.ones(3, jnp.bfloat16), "complex": jnp.asarray([1 + 1j, 0.3, 2j])}

    def of_other_types(state: Any, x: Any) -> Any:
        loss = lambda s: (
            jnp.mean(x[:, :3].astype(jnp.bfloat16) * s["half"]) + jnp.mean(jnp.abs(x[:, :3] * s["complex"]))
        )
        return jax.grad(loss)(state)

    got, want = (decorated(of_other_types, 8, compress=c)(half, ROWS) for c in ("fp16", None))
    compare(got, want, 0)


@pytest.mark.parametrize(("compress", "dtype", "wire"), [("bf16", "bfloat16", "bf16"), ("fp16", "float16", "f16")])
def test_16_bit_gradients_travel_in_32_bits_unless_compressed(compress: Any, dtype: str, wire: str) -> None:
    step = lambda w, x: w - jax.grad(lambda w: jnp.mean(jnp.tanh(x.astype(dtype) @ w).astype(jnp.float32)))(w)
    for how, travels in ((None, "f32"), (compress, wire)):
        found = programs.of(decorated(step, 8, compress=how), MATRIX.astype(dtype), ROWS)
        assert [(op.dtype, op.size) for op in found if op.name == "all-reduce"] == [(travels, 15)]


# --- microbatches


@pytest.mark.parametrize("k", [1, 3, 12])
def test_microbatches_outside_a_step(k: int) -> None:
    rows = np.tile(X, (3, 1))[:12]
    f = lambda w, x: (loss_of(w, x), {"rows": x @ w, "count": jnp.sum(x @ w > 0), "mean": x.mean(), "none": None})
    got = jaxdist.value_and_grad(f, has_aux=True, microbatches=k)(W, rows)
    close(got, jax.value_and_grad(f, has_aux=True)(W, rows))


def test_a_drop_in_for_jax() -> None:
    f = lambda a, b, x: (jnp.sum(jnp.sin(a * x) * b), {"aux": a * 2})
    for argnums in (0, 1, (0, 1), (1, 0), -2):
        for name in ("value_and_grad", "grad"):
            ours, theirs = (getattr(m, name)(f, argnums, has_aux=True)(W, 2 * W, X) for m in (jaxdist, jax))
            compare(ours, theirs, 1e-12)
    assert jaxdist.grad(lambda w, n: jnp.sum(w * n), (0, 1), allow_int=True)(W, 3)[1].dtype == jax.dtypes.float0
    close(jaxdist.grad(lambda w, *, x: loss_of(w, x))(W, x=X), jax.grad(loss_of)(W, X))


def test_microbatches_hold_every_kth_example() -> None:
    f = lambda w, x: (jnp.sum(w * x[0]), x[:, 0])
    (_, rows), grads = jaxdist.value_and_grad(f, has_aux=True, microbatches=4)(W, X)
    np.testing.assert_array_equal(rows, X[:, 0])  # in the batch's order
    close(grads, X[:4].mean(0))  # the first of each


def test_low_precision_is_accumulated_in_float32() -> None:
    x, w = jnp.ones((1024, 1), jnp.bfloat16), jnp.ones(1, jnp.bfloat16)
    grads = jaxdist.grad(lambda w, x: jnp.sum(x * w), microbatches=512)(w, x)  # a bfloat16 sum stops at 512
    assert (grads.dtype, float(grads[0])) == (jnp.bfloat16, 2)


@pytest.mark.parametrize(
    ("settings_", "args", "tokens"),
    [
        ({"microbatches": 5}, (W, X), ("16", "5")),
        ({"microbatches": 0}, (W, X), ("microbatches",)),
        ({"microbatches": 2, "batch_argnums": (0, 1)}, (W, X), ("0",)),
        ({"microbatches": 2}, (W, 3.0), ("batch_argnums",)),
        ({"microbatches": 2}, (W, X, X), ("argument 1", "batch_argnums")),
    ],
)
def test_bad_microbatches(settings_: Any, args: Any, tokens: tuple[str, ...]) -> None:
    with raises(ValueError, *tokens):
        jaxdist.value_and_grad(loss_of, **settings_)(*args)


def test_microbatches_of_a_batch_by_name() -> None:
    with pytest.raises(ValueError, match="argument y"):
        jaxdist.grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2), microbatches=2)(W, X, y=jnp.ones(len(X)))


def test_two_batches_in_microbatches() -> None:
    f = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)
    step = lambda w, x, y: w - jaxdist.grad(f, microbatches=2)(w, (x, y))
    check(step, W, X, X[:, 0], batch_argnums=(1, 2))


def test_a_number_in_the_batch_is_for_all_microbatches() -> None:
    f = lambda w, batch: batch["scale"] * jnp.mean((batch["x"] @ w) ** 2)
    step = lambda w, batch: w - jaxdist.grad(f, microbatches=2)(w, batch)
    check(step, W, {"x": X, "scale": 3.0}, batch_argnums=1)


# --- meshes of the user's own

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
@pytest.mark.parametrize(
    "entered", [lambda: jax.set_mesh(jax.make_mesh((8,), ("S",), (AUTO,))), lambda: Mesh(jax.devices(), ("S",))]
)
def test_a_step_that_names_the_axes_of_a_mesh_that_is_set(entered: Any) -> None:
    def constrained(w: Any, x: Any) -> Any:
        hidden = lambda w: lax.with_sharding_constraint(jnp.tanh(x * w), P("S"))
        return w - 0.1 * jax.grad(lambda w: jnp.mean(hidden(w) ** 2))(w)

    with entered():
        close(jaxdist.data_parallel(constrained)(W, X), jax.jit(constrained)(W, X))


@pytest.mark.parametrize(("devices", "level"), [(1, 0), (1, 3), (8, 3)])
def test_a_step_that_constrains_to_a_mesh_of_its_own(devices: int, level: Any) -> None:
    own = NamedSharding(jax.make_mesh((devices,), ("S",), (AUTO,), devices=jax.devices()[:devices]), P())
    layer = jax.checkpoint(lambda w, b, x: jnp.sin(x @ lax.with_sharding_constraint(w, own) + b))
    loss = lambda w, x: jnp.mean(jax.vmap(layer, (None, None, 0))(*w, x) ** 2)
    w, tx = [jnp.ones((3, 24)), jnp.ones(24)], optax.adam(0.1)
    check_steps(train_step(loss, jaxdist.zero(tx, level)), (w, tx.init(w)), [X, X], plain=train_step(loss, tx))


DEVICES_ = jax.devices()
SHARDED = {
    "along an axis": NamedSharding(Mesh(DEVICES_, ("S",)), P("S")),
    "along one of two": NamedSharding(Mesh(np.array(DEVICES_).reshape(2, 4), ("a", "b")), P("b")),
    "along both dimensions": NamedSharding(Mesh(np.array(DEVICES_).reshape(4, 2), ("a", "b")), P("b", "a")),
    "in another order": NamedSharding(Mesh(DEVICES_[::-1], ("data",)), P("data")),
    "explicitly": NamedSharding(jax.make_mesh((4, 2), ("a", "b"), (EXPLICIT, EXPLICIT)), P("b")),
}


@pytest.mark.parametrize(("name", "level"), [(name, 3 * (i % 2)) for i, name in enumerate(SHARDED)])
def test_state_in_shards_of_a_mesh_of_the_same_devices(name: str, level: Any) -> None:
    tx = jaxdist.zero(optax.adam(0.1), level)
    w = {"a": jnp.arange(8.0 * 8).reshape(8, 8) / 64, "b": jnp.ones((8, 8))}
    step = train_step(lambda w, x: jnp.mean((x @ w["a"] @ w["b"]) ** 2), tx)
    x, state = np.random.default_rng(0).normal(size=(16, 8)), (w, optax.adam(0.1).init(w))
    sharded = jax.tree.map(lambda x: jax.device_put(x, SHARDED[name]) if np.ndim(x) else x, state)
    check_steps(step, sharded, [x, x])


@pytest.mark.parametrize("name", SHARDED)
def test_what_a_step_closes_over_in_shards(name: str) -> None:
    """JAX keeps their mesh in the constant's type, which must not meet the step's own."""
    values = np.arange(8.0 * 8).reshape(8, 8), np.arange(8.0 * 8, dtype="f").reshape(8, 8).astype(jnp.bfloat16)
    matrix, narrow = (jax.device_put(x, SHARDED[name]) for x in values)
    keys = jax.device_put(jax.random.split(jax.random.key(0), (8, 8)), SHARDED[name])
    noise = lambda: jax.vmap(jax.vmap(jax.random.normal))(keys)

    def step(w: Any, x: Any) -> Any:
        return (
            w + x.mean() + matrix,
            w.astype(narrow.dtype) * narrow,
            w * noise(),
            lax.fori_loop(0, 3, lambda i, c: c * matrix, w),
        )

    args = np.ones((8, 8)), np.random.default_rng(0).normal(size=(16, 8))
    compare(decorated(step)(*args), step(*args), 1e-6)


def test_a_mesh_for_the_whole_process() -> None:
    env = jobs.environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"})
    path = Path(__file__).parent / "scripts" / "set_mesh.py"
    done = subprocess.run(
        [sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
