"""Single operations on a state and a batch, by name: each ``f(w, b) -> anything``."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

Operation = Callable[[Any, Any], Any]


def _last_infinite(x: Any) -> Any:
    return jnp.where(jnp.arange(len(x))[:, None] == len(x) - 1, jnp.inf, x)


def recurrence(a: Any, u: Any) -> Any:
    """h[t] = a[t] * h[t - 1] + u[t]."""
    return lax.associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (a, u))[1]


def state() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {"w": (6, 6), "v": (6,), "table": (9, 5), "kernel": (3, 3, 2, 4), "deep": (3, 3, 1, 4), "wave": (3, 6, 2)}
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()} | {"s": jnp.asarray(1.7)}


def batch(rows: int) -> dict[str, np.ndarray]:
    """A batch whose last example is the largest: a padding that counts is seen."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6)) * np.linspace(0.5, 3, rows)[:, None]
    spd = rng.normal(size=(rows, 3, 3))
    return {
        "x": x,
        "y": rng.normal(size=(rows, 6)),
        "z": rng.normal(size=(rows, 4, 3)),
        "spd": spd @ spd.transpose(0, 2, 1) + 3 * np.eye(3),
        "image": rng.normal(size=(rows, 5, 5, 2)),
        "i": rng.integers(0, 9, rows).astype(np.int32),
        "k": rng.integers(0, 6, (rows, 2)).astype(np.int32),
        "perm": rng.permutation(rows).astype(np.int32),
        "m": rng.uniform(size=rows) < 0.5,
        "flags": rng.uniform(size=(rows, 4)) < 0.8,
        "u8": rng.integers(0, 256, (rows, 4)).astype(np.uint8),
        "i8": rng.integers(-128, 128, (rows, 4)).astype(np.int8),
        "u32": rng.integers(0, 2**32, (rows, 4)).astype(np.uint32),
        "c": rng.normal(size=(rows, 3)) + 1j * rng.normal(size=(rows, 3)),
        "p": rng.uniform(0.1, 0.9, (rows, 3)),
    }


NHWC = ("NHWC", "HWIO", "NHWC")


@jax.custom_batching.custom_vmap
def _doubled(x: Any) -> Any:
    return 2 * x


@_doubled.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    return _doubled(x), batched[0]


@dataclasses.dataclass(frozen=True, eq=False)  # its hash is its identity
class Held:
    """A static parameter of an operation, as packages make them, which holds a jaxpr."""

    jaxpr: Any
    kind: str = dataclasses.field(init=False, default="a")


holds_p = jex.core.Primitive("holds")
"""Evaluates a jaxpr that it holds, with the first operand as its constant."""


@holds_p.def_impl
def _evaluate(constant: Any, x: Any, *, held: Any) -> Any:
    held = held.jaxpr if isinstance(held, Held) else held
    jaxpr = held[0] if isinstance(held, (tuple, list)) else held["jaxpr"] if isinstance(held, dict) else held
    return jaxpr_as_fun(jex.core.ClosedJaxpr(jaxpr, [constant]))(x)[0]


holds_p.def_abstract_eval(lambda constant, x, **_: x)
mlir.register_lowering(holds_p, mlir.lower_fun(_evaluate, multiple_results=False))
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "open": lambda jaxpr: jaxpr, "in a tuple": lambda jaxpr: (jaxpr, 1), "in a record": lambda jaxpr: Held(jaxpr),
    "in a record's list": lambda jaxpr: Held([jaxpr]), "in a record's dictionary": lambda jaxpr: Held({"jaxpr": jaxpr}),
}  # fmt: skip


def holding(holder: str, v: Any, x: Any, axis: str = "") -> Any:
    """`holds_p` of a jaxpr with a constant, which may name an axis of size one."""
    constant = jnp.arange(6.0)
    summed = lambda x: lax.psum(x * constant, axis) if axis else x * constant
    closed = jax.make_jaxpr(summed, axis_env=[(axis, 1)] if axis else None)(v)
    evaluated = lambda x: holds_p.bind(constant, x, held=HOLDERS[holder](closed.jaxpr))
    return evaluated(v) + evaluated(x.mean(0))


def _out_of_bounds(x: Any, zero: Any) -> Any:
    """Starts are moved to where the whole slice is in the array: also where it is then made on slices."""
    n, twice = len(x), jnp.concatenate([x, 2 * x])
    small = zero.astype(jnp.int8)
    return [
        lax.dynamic_slice(x, (zero + n, zero + 1), (2, 4)),
        lax.dynamic_slice(twice, (zero + 2 * n - 1, zero), (n, 6)) * x,
        lax.dynamic_slice(twice, (zero - 10 * n, zero + 3), (n, 6)) * x,
        lax.dynamic_slice(jnp.tile(x, (400 // n + 1, 1)), (small + 127, small), (n, 6)) * x,
        lax.dynamic_update_slice(x, twice[:2, :3], (zero + n - 1, zero + 3)),
        lax.dynamic_update_slice(twice, x, (zero + 2 * n - 1, zero))[:n] * x,
    ]


def _nested_out_of_bounds(x: Any, zero: Any) -> Any:
    n, twice = len(x), jnp.concatenate([x, 2 * x])
    window = lambda i: lax.dynamic_slice(twice, (zero + i, zero), (n, 6))
    return [
        jax.jit(window)(2 * n - 1) * x,
        lax.scan(lambda c, i: (c + window(i * n), window(i * n)), x, jnp.arange(4, dtype=zero.dtype)),
        lax.fori_loop(0, zero + 3, lambda i, c: c * 0.5 + window(i * n), x) * x,
        lax.cond(zero > 3, lambda: x, lambda: window(2 * n)) * x,
        jax.checkpoint(window)(zero + 2 * n) * x,
        jax.vmap(lambda i: lax.dynamic_slice(twice, (i, zero), (2, 6)))(jnp.arange(n, dtype=zero.dtype) + n + 1),
        jax.grad(lambda twice: (lax.dynamic_slice(twice, (zero + 2 * n, zero), (n, 6)) * x).sum())(twice)[n:] * x,
    ]


def _conv(x: Any, kernel: Any, groups: int = 1, **how: Any) -> Any:
    how = {"window_strides": (1, 1), "padding": "SAME", **how}
    return lax.conv_general_dilated(x, kernel, dimension_numbers=NHWC, feature_group_count=groups, **how)


def _pool(x: Any, how: str) -> Any:
    fun, init = (lax.max, -jnp.inf) if how == "max" else (lax.add, 0.0)
    return lax.reduce_window(x, init, fun, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _pieces(x: Any) -> Any:
    n = x.shape[0]
    return [x[1:], x[:3], x[::2], x[-1], x[n // 2], x[-2:], x[1:-1], x[:, 1:4], x[0, 1]]


SHAPES: dict[str, Operation] = {
    "ravel and back": lambda w, b: jnp.sin(b["z"].ravel()).reshape(b["z"].shape),
    "merge outer and sum": lambda w, b: b["z"].reshape(-1, 3).sum(0),
    "other rows": lambda w, b: b["z"].reshape(3, -1),
    "other columns": lambda w, b: b["z"].reshape(-1, 6),
    "time-major, merged, and back": lambda w, b:
        (jnp.cos(jnp.swapaxes(b["z"], 0, 1).reshape(-1, 3)).reshape(4, -1, 3).swapaxes(0, 1).mean(1)),
    "time-major, cut in time": lambda w, b: jnp.swapaxes(b["z"], 0, 1).reshape(-1, 3)[: b["z"].shape[0]],
    "merged last, summed": lambda w, b: jnp.moveaxis(b["z"], 0, 2).reshape(4, -1).sum(1),
    "expand and squeeze": lambda w, b: jnp.squeeze(jnp.expand_dims(jnp.expand_dims(b["x"], 0), 2), (0, 2)),
    "broadcast": lambda w, b: jnp.broadcast_to(b["x"], (3, *b["x"].shape)),
    "pairs, summed": lambda w, b: (jnp.exp(b["x"][:, None] - b["x"][None, :])).sum((0, 1)),
    "concatenate and sum": lambda w, b: jnp.concatenate([b["x"], b["y"], b["x"]]).mean(0),
    "concatenate one twice": lambda w, b: jnp.concatenate([b["x"], b["x"]]).var(0),
    "concatenate pieces": lambda w, b: jnp.concatenate([b["x"], b["y"][:2]]).sum(0),
    "concatenate and halve": lambda w, b: (lambda c, n: c[:n] * c[n:])(jnp.concatenate([b["x"], b["y"]]), len(b["x"])),
    "stack": lambda w, b: [jnp.stack([b["x"], b["y"]], a) for a in range(3)],
    "tile and sum": lambda w, b: jnp.tile(b["x"], (3, 2)).sum(0),
    "tile a state": lambda w, b: jnp.tile(w["v"], (b["x"].shape[0], 1)) * b["x"],
    "repeat and sum": lambda w, b: jnp.repeat(b["x"], 3, 0).sum(0),
    "pad": lambda w, b: [jnp.pad(b["x"], ((0, 0), (1, 2))), jnp.pad(b["x"], ((1, 2), (0, 0))).sum(0)],
    "pad inside": lambda w, b: lax.pad(b["x"], 0.5, ((0, 0, 1), (1, -1, 0))),
    "slices": lambda w, b: _pieces(b["x"]),
    "reverse": lambda w, b: [b["x"][::-1], b["x"][:, ::-1], b["m"][::-1], b["z"][::-1, :, ::-1]],
    "roll": lambda w, b: [jnp.roll(b["x"], 1, 0), jnp.roll(b["x"], -2, 1), jnp.roll(b["x"], 3)],
    "halves": lambda w, b: (lambda x: x[: len(x) // 2].mean(0) - x[len(x) // 2 :].mean(0))(b["x"] @ w["w"]),
    "dynamic slice": lambda w, b: [
        lax.dynamic_slice(b["x"], (b["i"][0] % 3, b["i"][1] % 3), (2, 4)),
        lax.dynamic_slice_in_dim(b["x"], b["i"][0] % 3, 2, 1)],
    "a slice at a sum": lambda w, b:  # a device alone has counted fewer
        lax.dynamic_slice(w["table"].ravel(), (jnp.sum(b["m"], dtype=jnp.uint32),), (1,)),
    "dynamic update": lambda w, b: [
        lax.dynamic_update_slice(b["x"], w["w"][:2], (1, 0)), lax.dynamic_update_slice(b["x"], b["y"][:, :2], (0, 3)),
        lax.dynamic_update_slice(w["w"], b["x"][:1, :4], (b["i"][0] % 3, b["i"][1] % 2))],
    "slices out of bounds": lambda w, b: _out_of_bounds(b["x"], b["i"][-1] * 0),
    "slices out of bounds, nested": lambda w, b: _nested_out_of_bounds(b["x"], b["i"][-1] * 0),
    "set a row": lambda w, b: [b["x"].at[0].set(0.0), b["x"].at[-1].add(1.0), b["x"].at[:, 2].mul(3.0)],
    "iota": lambda w, b: [
        b["x"][:, 0] * jnp.arange(len(b["x"])), jnp.eye(len(b["x"])) * b["x"][:, :1], jnp.arange(6) * b["x"],
        jnp.linspace(0, 1, len(b["x"])) * b["x"][:, 1]],
    "triangle": lambda w, b: jnp.tril(b["x"] @ b["y"].T).sum(1),
    "diagonal": lambda w, b: [jnp.diagonal(b["x"] @ b["y"].T), jnp.trace(b["x"] @ b["y"].T)],
    "barrier": lambda w, b: lax.optimization_barrier({"x": b["x"] * 2, "s": b["x"].sum(), "w": w["v"], "i": b["i"]}),
    "clip": lambda w, b: [jnp.clip(b["x"], -1, 1), lax.clamp(w["v"] * 0 - 1, b["x"][0], w["v"] * 0 + 1)],
    "bits": lambda w, b: [lax.bitcast_convert_type(b["x"], jnp.uint32), lax.bitcast_convert_type(b["u32"], jnp.int32)],
    "every second": lambda w, b: [
        b["x"][::2], b["x"][1::2], b["x"][3:-1:2].max(0), b["z"][::3, ::2], b["i"][2::2].sum(), b["x"][::2][:2],
        jax.grad(lambda x: jnp.sin(x[1::2]).sum() + jnp.cos(x[:-1:2]).sum())(b["x"]),
        lax.pad(b["x"], 9.0, ((0, 1, 1), (0, 1, 1))).min(0), lax.pad(b["y"], 7.0, ((2, 0, 2), (0, 0, 0))).max(0),
        lax.pad(b["x"], 9.0, ((-1, -2, 1), (0, 0, 0))).min(0), lax.pad(b["i"], np.int32(0), ((-2, 1, 0),)),
        jax.grad(lambda x: jnp.sin(lax.pad(x, 0.0, ((1, 2, 1), (0, 0, 0)))).sum())(b["x"])],
    "associative scans": lambda w, b: [
        *(lax.associative_scan(f, b["x"], reverse=back) for f in (jnp.add, jnp.maximum) for back in (False, True)),
        lax.associative_scan(jnp.logical_or, b["m"]), lax.associative_scan(jnp.matmul, b["spd"]),
        jax.grad(lambda x: jnp.sin(recurrence(jnp.tanh(x), b["y"])).sum())(b["x"])],
}  # fmt: skip

REDUCTIONS: dict[str, Operation] = {
    "over an axis that vmap names": lambda w, b: [
        jax.vmap(lambda x, reduce=reduce: reduce(x * w["v"], "rows"), axis_name="rows")(b["x"])
        for reduce in (lax.psum, lax.pmean, lax.pmax, lax.pmin, lambda x, axis: lax.all_gather(x, axis).sum(1))],
    "of one sign": lambda w, b: [  # a zero for padding would be the largest, or the smallest
        reduce(one) for one in (1 + b["y"] ** 2, -1 - b["y"] ** 2, 1 + b["i"], -1 - b["i"], b["i8"] // 2 - 65)
        for reduce in (lambda x: [x.max(0), x.min(0), x.max(), x.argmax(0), x.argmin(0), lax.cummax(x), lax.cummin(x)],
                       lambda x: [lax.cummax(x, reverse=True), jnp.sort(x, 0), lax.top_k(x.T, 2), x.prod(0)])],
    "sum": lambda w, b: [b["x"].sum(0), b["x"].sum(1), b["x"].sum(), b["z"].sum((0, 2)), b["x"].sum(0, keepdims=True)],
    "mean and variance": lambda w, b: [b["x"].mean(0), b["x"].var(0), b["x"].std(1), b["z"].var((0, 1), ddof=1)],
    "extremes": lambda w, b: [f(b["x"], a) for f in (jnp.max, jnp.min) for a in (0, 1, None)],
    "extremes of complex numbers": lambda w, b: [f(b["c"], a) for f in (jnp.max, jnp.min) for a in (0, 1, None)],
    "where the extremes are": lambda w, b: [f(b["x"], a) for f in (jnp.argmax, jnp.argmin) for a in (0, 1, None)],
    "product": lambda w, b: [b["x"].prod(0), b["x"].prod(1), b["p"].prod()],
    "any and all": lambda w, b: [f(b["flags"], a) for f in (jnp.any, jnp.all) for a in (0, 1, None)],
    "bitwise": lambda w, b: [
        f.reduce(b[k], axis=a) for f in (jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor) for k in ("u8", "i8")
        for a in (0, 1)],
    "logsumexp": lambda w, b: [jax.nn.logsumexp(b["x"], 0), jax.nn.logsumexp(b["x"]), jax.nn.softmax(b["x"], 0)],
    "cumulative": lambda w, b: [f(b["x"], a) for f in (jnp.cumsum, jnp.cumprod) for a in (0, 1)],
    "more cumulative": lambda w, b: [
        lax.cummax(b["x"], 0), lax.cummin(b["x"], 1, reverse=True), lax.cumlogsumexp(b["x"], 0), lax.cumsum(b["i"], 0)],
    "so far, along the batch": lambda w, b: [
        f(x, axis=0, reverse=back) for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)
        for x in (b["x"], 1 + b["y"] ** 2, -1 - b["y"] ** 2, b["i"], b["c"][:, :1].real) for back in (False, True)]
        + [lax.cumlogsumexp(b["x"], 0, reverse=back) for back in (False, True)]
        + [jax.grad(lambda x: jnp.sin(jnp.cumsum(x, 0)).sum())(b["x"]), jnp.cumsum(b["c"], 0)],
    "differences of neighbors": lambda w, b: [
        jnp.diff(b["x"], axis=0), jnp.diff(b["x"], n=2, axis=0), jnp.diff(b["i"]), jnp.unwrap(3 * b["x"], axis=0),
        jnp.diff(b["x"], axis=0, prepend=0.0, append=w["v"][None]), jnp.diff(b["z"], axis=0).sum(0),
        jax.grad(lambda x: jnp.sin(jnp.diff(x, axis=0)).sum())(b["x"]), b["x"][:-1].max(0), b["x"][1:].min(0),
        jax.grad(lambda x: jnp.sin(jnp.unwrap(3 * x, axis=0)).sum())(b["x"]), jnp.diff(b["x"], axis=0)[::-1],
        lax.pad(b["y"], 7.0, ((1, 0, 0), (0, 1, 1))).max(0), lax.pad(b["x"], 9.0, ((0, 1, 0), (0, 0, 0))).min(0),
        jnp.concatenate([w["w"][:1], b["x"]]), jnp.concatenate([b["x"][1:], w["w"][:1]]), b["x"][:2], b["x"][-1:],
        jax.grad(lambda x: jnp.sin(x[:1]).sum())(b["x"]), (b["x"] > 0)[1:], b["x"].astype(jnp.bfloat16)[1:].sum(0)],
    "sort": lambda w, b: [
        jnp.sort(b["x"], 0), jnp.sort(b["x"], 1), jnp.argsort(b["x"], 0), jnp.argsort(b["x"], 1),
        jax.device_put(jnp.sort(b["x"], 0)).sum(1)],
    "top k": lambda w, b: [lax.top_k(b["x"], 2), lax.top_k(b["x"].T, 2), lax.top_k(b["y"][:, 0], 3)],
    "approximate top k": lambda w, b: lax.approx_max_k(b["x"], 2),
    "order statistics": lambda w, b: [jnp.median(b["x"], 0), jnp.quantile(b["x"], 0.3), jnp.percentile(b["x"], 70, 1)],
    "histogram": lambda w, b: jnp.histogram(b["x"], jnp.linspace(-2, 2, 5))[0],
    "unique": lambda w, b: jnp.unique(b["i"], size=9, fill_value=-1),
    "extremes by group": lambda w, b: [
        jax.ops.segment_max(b["x"], b["i"], 9), jax.ops.segment_min(b["u8"], b["i"], 9),
        w["table"].at[b["k"][:, 0] - 3].max(b["x"][:, :5]), w["table"].at[:, b["i"]].min(b["p"][:, 0], mode="drop"),
        jnp.zeros((999, 6)).at[b["i"]].max(b["x"])],
    "segments": lambda w, b: [
        jax.ops.segment_sum(b["x"], b["i"], 9), jax.ops.segment_max(b["x"], b["i"], 9),
        jax.ops.segment_prod(b["p"], b["i"], 9)],
    "by a function of one's own": lambda w, b: lax.reduce(b["x"], 0.0, lambda a, c: jnp.maximum(a, c) * 1.0, (0,)),
    "correlation": lambda w, b: [jnp.cov(b["x"], rowvar=False), jnp.corrcoef(b["x"].T)],
}  # fmt: skip

CONTRACTIONS: dict[str, Operation] = {
    "w x": lambda w, b: w["w"] @ b["x"].T,
    "xT y": lambda w, b: b["x"].T @ b["y"],
    "a square twice": lambda w, b: (lambda g: g @ g)(b["x"] @ b["y"].T),
    "a view with itself": lambda w, b: (lambda z: z @ z.T)(jnp.concatenate([b["x"], b["y"]])),
    "einsums": lambda w, b: [
        jnp.einsum(e, *args) for e,
        *args in (("bi,bj->bij", b["x"], b["y"]), ("bi,bi->b", b["x"], b["y"]), ("bi,bi->", b["x"], b["y"]),
        ("bti,bsi->bts", b["z"], b["z"]), ("bti,bsi->ts", b["z"], b["z"]), ("bti,ij->btj", b["z"], b["spd"][0]),
        ("ji,bi->bj", w["w"], b["x"]), ("bi,ci,di->bcd", b["x"], b["x"], b["y"]), ("bi->i", b["x"]))],
    "outer of raveled ones": lambda w, b: jnp.outer(b["x"].ravel(), w["v"]),
    "of integers": lambda w, b: [b["u8"].T @ b["u8"], b["i8"] @ b["i8"].T, b["u32"].T @ b["u32"]],
    "of booleans": lambda w, b: [b["flags"].T @ b["flags"], b["flags"] @ b["flags"].T],
    "of complex numbers": lambda w, b: [b["c"].conj().T @ b["c"], jnp.vdot(b["c"], b["c"])],
    "wider result": lambda w, b:
        lax.dot_general(b["u8"], b["u8"], (((0,), (0,)), ((), ())), preferred_element_type=jnp.int32),
    "convolution, strided": lambda w, b: _conv(b["image"], w["kernel"], window_strides=(2, 2), rhs_dilation=(2, 2)),
    "convolution, gradients": lambda w, b:
        jax.grad(lambda k, x: jnp.sin(_conv(x, k)).sum(), (0, 1))(w["kernel"], b["image"]),
    "depthwise, gradients": lambda w, b:
        jax.grad(lambda k, x: jnp.sin(_conv(x, k, 2)).sum(), (0, 1))(w["deep"], b["image"]),
    "transposed": lambda w, b:
        jax.grad(lambda k: jnp.sin(lax.conv_transpose(b["image"], k, (2, 2), "SAME")).sum())(w["kernel"]),
    "along the batch": lambda w, b:
        lax.conv_general_dilated(b["x"][None], w["wave"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
    "along the batch, infinite at the end": lambda w, b: jax.grad(lambda k: (lax.conv_general_dilated(
        _last_infinite(b["x"])[None], k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0]
        * b["y"][:, :2]).sum())(w["wave"]),
    "along the batch, gradients": lambda w, b: jax.grad(lambda k, x: jnp.sin(lax.conv_general_dilated(
        x[None], k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))).sum(), (0, 1))(w["wave"], b["x"]),
    "groups of the batch": lambda w, b:
        lax.conv_general_dilated(jnp.concatenate([b["image"], b["image"] * 2]), w["kernel"], (1, 1), "SAME",
        dimension_numbers=NHWC, batch_group_count=2),
    "pools, gradients": lambda w, b: [
        jax.grad(lambda x, how=how: jnp.sin(_pool(x, how)).sum())(b["image"]) for how in ("max", "sum")],
    "windows along the batch": lambda w, b: lax.reduce_window(b["x"], 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    "pools along the batch": lambda w, b: [
        lax.reduce_window(_last_infinite(b["x"]), -jnp.inf, lax.max, (2, 1), (1, 1), "VALID").min(0),
        lax.reduce_window(b["x"], 0.0, lax.add, (2, 2), (2, 1), "VALID"),
        lax.reduce_window(b["i"], np.int32(9), lax.min, (1,), (2,), "VALID"),
        jax.grad(lambda x: jnp.sin(lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "VALID")).sum())(b["x"])],
    "attention": lambda w, b: jax.nn.dot_product_attention(b["z"][:, :, None], b["z"][:, :, None], b["z"][:, :, None]),
    "gradient of a layer": lambda w, b:
        jax.grad(lambda p: jnp.tanh(b["x"] @ p["w"] + p["v"]).mean() * p["s"])({k: w[k] for k in "wvs"}),
}  # fmt: skip

INDEXING: dict[str, Operation] = {
    "an embedding": lambda w, b: [w["table"][b["i"]], w["table"][b["i"], b["k"][:, 0] % 5]],
    "rows by rows": lambda w, b: [b["x"][b["perm"]], b["x"][b["perm"]].mean(0), b["m"][b["perm"]], b["u8"][b["perm"]]],
    "rows by a key": lambda w, b: jax.random.permutation(jax.random.key(0), b["x"]),
    "columns": lambda w, b: [b["x"][:, jnp.array([1, 1, 4])], jnp.take_along_axis(b["x"], b["k"], 1)],
    "one of each row, gradient": lambda w, b:
        jax.grad(lambda x: jnp.sin(x[jnp.arange(len(x)), b["k"][:, 0]]).sum())(b["x"]),
    "out of bounds": lambda w, b: [
        b["x"].at[b["i"] * 3].get(mode="fill", fill_value=-1.0), b["x"].at[b["i"] * 3].get(mode="clip"),
        w["v"].at[b["i"]].get(mode="fill", fill_value=jnp.nan), w["v"].at[b["i"]].add(1.0, mode="drop")],
    "scatters into a state": lambda w, b: [
        getattr(w["table"].at[b["i"]], how)(b["y"][:, :5]) for how in ("add", "max", "min", "mul")],
    "unique scatters": lambda w, b: [
        jnp.zeros((len(b["x"]), 6)).at[b["perm"]].set(b["x"]), b["x"].at[b["perm"]].add(b["y"]),
        b["x"].at[b["perm"]].subtract(b["y"])],
    "scatters of integers": lambda w, b: [
        jnp.zeros(9, jnp.int8).at[b["i"]].add(b["i8"][:, 0]), jnp.zeros(9, jnp.uint8).at[b["i"]].max(b["u8"][:, 0]),
        jnp.zeros(9, bool).at[b["i"]].set(True)],
    "scatters into rows": lambda w, b: [
        b["x"].at[:, 1].set(b["y"][:, 0]), b["x"].at[jnp.arange(len(b["x"])), b["k"][:, 1]].add(1.0)],
    "own rows in several ways": lambda w, b: [
        b["z"][jnp.arange(len(b["z"]))[:, None], jnp.arange(4)[None], b["k"][:, :1] % 3],
        jax.grad(lambda z: jnp.sin(z[jnp.arange(len(z))[:, None], jnp.arange(4), b["k"][:, 1:] % 3]).sum())(b["z"]),
        b["x"].at[jnp.arange(len(b["x"])), b["i"]].set(0.0),
        b["x"].at[jnp.arange(len(b["x"]), dtype=jnp.int64), b["k"][:, 0]].multiply(b["y"][:, 0]),
        (b["x"] @ b["y"].T)[jnp.arange(len(b["x"])), b["perm"]],
        (b["x"] @ b["y"].T)[b["perm"], jnp.arange(len(b["x"]))],
        (b["x"] @ b["y"].T)[jnp.arange(len(b["x"])), jnp.arange(len(b["x"]))],
        jnp.take_along_axis((b["x"] @ b["y"].T).T, jnp.arange(len(b["x"]))[:, None], 1),
        jnp.take_along_axis(b["x"] @ b["y"].T, jnp.arange(len(b["x"]))[None], 0),
        jax.grad(lambda x: jnp.take_along_axis((x @ b["y"].T).T, jnp.arange(len(x))[:, None], 1).sum())(b["x"]),
        b["z"][jnp.arange(len(b["z"])), b["i"] % 4, :].sum(0), b["x"][jnp.arange(len(b["x"])) - 1, b["k"][:, 0]],
        b["m"][jnp.arange(len(b["m"]))]],
    "own rows, counted in a byte": lambda w, b: (lambda x: x[jnp.arange(len(x)).astype(jnp.uint8), 0])(
        jnp.repeat(b["x"], 60, 0)),
    "rows of others": lambda w, b: (lambda i: [  # but for the wrapping of negative ones, as own rows are read
        b["x"][jnp.where(i < 3, i + 1, i), b["k"][:, 0]], b["x"][jnp.where(i < 0, i + 1, i), b["k"][:, 0]],
        b["x"][jnp.where(i < 3, i + len(i), i), b["k"][:, 0]]])(jnp.arange(len(b["x"]))),
    "places without a sign": lambda w, b: [
        w["table"][b["u32"][:, 0] % 9], b["x"][b["u32"][:, 1]], w["table"].at[b["u32"][:, 0] % 16].add(b["y"][:, :5])],
    "nothing": lambda w, b: (lambda x: [
        x.sum(0), x.max(0), x.T @ b["y"], b["y"] @ jnp.zeros((6, 0)), jax.grad(lambda e: (x @ e).sum())(w["w"][:0])])(
            b["x"][:, :0]),
    "batched windows": lambda w, b: jax.vmap(lambda x, k: lax.dynamic_slice(x, (k[0] % 3,), (3,)))(b["x"], b["k"]),
    "batched updates": lambda w, b:
        jax.vmap(lambda x, y, k: lax.dynamic_update_slice(x, y[:2], (k[0] % 4,)))(b["x"], b["y"], b["k"]),
    "batched windows of a state": lambda w, b:
        jax.vmap(lambda k: lax.dynamic_slice(w["w"], (k[0] % 3, k[1] % 3), (2, 3)))(b["k"]),
    "search": lambda w, b: [
        jnp.searchsorted(jnp.sort(b["x"][:, 0]), w["v"]), jnp.searchsorted(jnp.sort(w["v"]), b["x"][:, 0])],
    "where it is": lambda w, b: jnp.nonzero(b["m"], size=4, fill_value=-1)[0],
    "interpolation": lambda w, b: [
        jnp.interp(b["x"][:, 0], jnp.sort(w["v"]), w["v"]), jnp.digitize(b["x"], jnp.sort(w["v"]))],
}  # fmt: skip

OTHERS: dict[str, Operation] = {
    "cholesky": lambda w, b: jnp.linalg.cholesky(b["spd"]),
    "solve": lambda w, b: [jnp.linalg.solve(b["spd"], b["z"].swapaxes(1, 2)), jnp.linalg.inv(b["spd"])],
    "solve with the gram matrix": lambda w, b: jnp.linalg.solve(b["x"].T @ b["x"] + jnp.eye(6), b["x"].T @ b["y"]),
    "cholesky of the gram matrix": lambda w, b: jnp.linalg.cholesky(b["x"].T @ b["x"] + jnp.eye(6)),
    "right-hand sides": lambda w, b: [
        jax.grad(lambda a: jnp.sin(jax.scipy.linalg.solve_triangular(a, b["x"].T, lower=True)).sum())(
            w["w"] + 4 * jnp.eye(6)),
        lax.linalg.triangular_solve(w["w"] + 4 * jnp.eye(6), b["x"], lower=True), jnp.linalg.solve(w["w"], b["x"].T),
        lax.linalg.tridiagonal_solve(w["v"].at[0].set(0), 9 + w["v"], w["v"].at[-1].set(0), b["x"].T)],
    "qr": lambda w, b: jnp.abs(jnp.linalg.qr(b["spd"])[1]),
    "singular values": lambda w, b: [
        jnp.linalg.svd(b["spd"], compute_uv=False), jnp.linalg.svd(b["x"], compute_uv=False)],
    "exponential": lambda w, b: jax.scipy.linalg.expm(b["spd"] * 0.1),
    "tridiagonal": lambda w, b:
        lax.linalg.tridiagonal_solve(b["x"].at[:, 0].set(0), 9 + b["y"], b["x"].at[:, -1].set(0), b["y"][..., None]),
    "fft": lambda w, b: [jnp.fft.fft(b["x"], axis=1), jnp.fft.rfft(b["x"], axis=0), jnp.fft.fft2(b["z"])],
    "special functions": lambda w, b: [
        f(b["p"]) for f in (jax.scipy.special.digamma, jax.lax.lgamma, jax.scipy.special.erfinv, jax.scipy.special.i0e,
        jax.scipy.special.logit, jnp.sinc, lambda p: jax.scipy.special.gammainc(p, p),
        lambda p: jax.scipy.special.betainc(p, p, p), lambda p: jax.scipy.special.zeta(p + 2, p),
        lambda p: jax.scipy.special.polygamma(1, p))],
    "elementwise": lambda w, b:
        ([f(b["p"]) for f in (jnp.abs, jnp.arccos, jnp.arcsin, jnp.arctan, jnp.ceil, jnp.cbrt, jnp.cosh, jnp.exp2,
        jnp.expm1, jnp.floor, jnp.log1p, jnp.round, jnp.sign, jnp.tan, lax.rsqrt, jax.nn.sigmoid, jnp.square)]
        + [f(b["p"], b["p"] * 2) for f in (jnp.arctan2, jnp.power, jnp.remainder, jnp.hypot, jnp.nextafter, jnp.fmax)]),
    "pivoted QR": lambda w, b: jax.scipy.linalg.qr(b["spd"], pivoting=True)[1:],
    **{f"a jaxpr, {holder}": lambda w, b, holder=holder: holding(holder, w["v"], b["x"]) for holder in HOLDERS},
    "custom vmap": lambda w, b: jax.vmap(_doubled)(b["x"]),
    "size one": lambda w, b: [lax.add(b["x"], b["x"][:, :1]), lax.mul(b["x"], b["x"][:1])],
    "integers": lambda w, b: [
        b["u32"] >> 3, b["u32"] << 2, ~b["u8"], b["u8"] & 7, b["i8"] // 5, b["i8"] % 5, lax.clz(b["u32"]),
        lax.population_count(b["u32"]), -b["i8"], jnp.abs(b["i8"]), b["i8"] ** 2, jnp.bitwise_xor(b["u8"], b["i8"])],
    "complex": lambda w, b: [
        b["c"].real, b["c"].imag, jnp.conj(b["c"]), jnp.abs(b["c"]), jnp.angle(b["c"]), b["c"].sum(0)],
    "less precision": lambda w, b: lax.reduce_precision(b["x"], 8, 7),
    "layers": lambda w, b: [
        jax.nn.gelu(b["x"]), jax.nn.softmax(b["x"]), jax.nn.log_softmax(b["x"]), jax.nn.relu6(b["x"]),
        jax.nn.glu(b["x"]), jax.nn.standardize(b["x"]), jax.nn.silu(b["x"])],
    "passed on whole": lambda w, b: jax.device_put(jnp.sort(b["x"], 0)) * b["x"],
    "resize": lambda w, b: jax.image.resize(b["image"], (len(b["image"]), 8, 8, 2), "bilinear"),
    "a hessian": lambda w, b: jax.hessian(lambda v: jnp.tanh(b["x"] @ v).mean())(w["v"]),
    "custom derivatives": lambda w, b: jax.grad(lambda v: _reversed(b["x"] * v).sum())(w["v"]),
}  # fmt: skip


@jax.custom_vjp
def _reversed(x: Any) -> Any:
    return jnp.sin(x)


_reversed.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (-ct * jnp.cos(x),))

GROUPS = {"shape": SHAPES, "reduce": REDUCTIONS, "contract": CONTRACTIONS, "index": INDEXING, "other": OTHERS}
OPERATIONS = {f"{group}: {name}": f for group, table in GROUPS.items() for name, f in table.items()}
