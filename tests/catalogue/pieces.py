"""Pieces of random programs: what each takes, and what it makes of that with random choices.

Takes, a letter for each operand: ``f`` floats of rank 1 or more, ``m`` of rank 2 or more, ``i`` integers, ``b``
booleans, ``k`` keys, ``s`` a single key. Floats are between -1 and 1. ``r`` is a `random.Random`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

Piece = tuple[str, Callable[..., Any]]


def axis(r: Any, x: Any) -> int:
    return r.randrange(x.ndim)


def positive(x: Any) -> Any:
    return 0.3 + 0.5 * x * x


def definite(x: Any) -> Any:
    return jnp.eye(x.shape[-2]) * 2 + x @ jnp.swapaxes(x, -1, -2)


def fit(y: Any, shape: Any) -> Any:
    """What there is of `y`, again and again, in this shape."""
    return jnp.resize(y, shape) if y.size and y.shape != shape else y


NAMED: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("f", jnp, ("abs arccos arcsin arcsinh arctan arctanh cbrt ceil cos cosh exp exp2 expm1 floor i0 log log1p "
                "rint sign sin sinc sinh sqrt square tan tanh isfinite signbit negative"),
     lambda f, r, x: f(positive(x))),
    ("f", lax, "erf erf_inv erfc lgamma digamma bessel_i0e bessel_i1e rsqrt logistic is_finite reciprocal",
     lambda f, r, x: f(positive(x))),
    ("f", lax, "conj real imag", lambda f, r, x: f(lax.complex(x, x * 2))),
    # without hypot, whose gradient XLA gets wrong on one device at the optimization level of the tests
    ("ff", jnp, ("add subtract multiply divide power arctan2 maximum minimum remainder nextafter copysign "
                 "logaddexp heaviside greater less_equal"),
     lambda f, r, x, y: f(positive(x), positive(fit(y, x.shape)))),
    ("ff", lax, "igamma igammac igamma_grad_a random_gamma_grad zeta polygamma complex",
     lambda f, r, x, y: f(1 + positive(x), positive(fit(y, x.shape)))),
    ("f", jax.nn, "gelu silu relu6 elu celu softplus log_sigmoid hard_swish squareplus mish", lambda f, r, x: f(x)),
    ("f", jax.nn, "softmax log_softmax standardize logsumexp", lambda f, r, x: f(x, axis=axis(r, x))),
    ("f", jnp, "sum prod max min mean var std argmax argmin sort argsort flip median ptp any all nanmax count_nonzero",
     lambda f, r, x: f(x, axis=axis(r, x))),
    ("f", lax, "cumsum cumprod cummax cummin cumlogsumexp",
     lambda f, r, x: f(positive(x), axis(r, x), reverse=r.random() < 0.5)),
    ("m", jnp.linalg, "cholesky inv det eigvalsh norm slogdet svdvals", lambda f, r, x: f(definite(x))),
    ("m", lax.linalg, "lu tridiagonal", lambda f, r, x: jnp.abs(f(definite(x))[0])),
    ("f", jnp.fft, "fft rfft irfft", lambda f, r, x: f(x, axis=axis(r, x))),
    ("ii", jnp, "bitwise_and bitwise_or bitwise_xor left_shift right_shift floor_divide remainder gcd equal",
     lambda f, r, x, y: f(x, fit(y, x.shape) % 5 + 1)),
    ("i", lax, "population_count clz bitwise_not sign abs", lambda f, r, x: f(x)),
    ("bb", jnp, "logical_and logical_or logical_xor", lambda f, r, x, y: f(x, fit(y, x.shape))),
    ("s", jax.random, "uniform normal bits gumbel laplace cauchy logistic exponential rademacher maxwell",
     lambda f, r, k: f(k, (r.choice([5, 8, 12]), r.choice([3, 6])))),
    ("s", jax.random, "gamma t chisquare bernoulli", lambda f, r, k: f(k, 0.4, (r.choice([5, 8, 12]), 3))),
    ("s", jax.random, "permutation truncated_normal beta",
     lambda f, r, k: f(k, *{"permutation": [9]}.get(f.__name__, [0.5, 2.0]))),
]  # fmt: skip
"""Functions of modules: what they take, and how each is called."""


def _named_axis(r: Any, x: Any) -> Any:
    turn = lambda x, n: lax.ppermute(x, n, [(k, (k + 1) % lax.axis_size(n)) for k in range(lax.axis_size(n))])
    every = [lax.psum, lax.pmean, lax.pmax, lambda x, n: lax.all_gather(x, n).sum(0), turn,
             lambda x, n: lax.axis_index(n) * x]  # fmt: skip
    f = r.choice(every)
    return jax.vmap(lambda x: f(x, "own") * x, axis_name="own")(x)


def _solve(r: Any, x: Any, y: Any) -> Any:
    a = definite(x)
    b = fit(y, (*a.shape[:-1], 2))
    ways = [
        lambda: jnp.linalg.solve(a, b), lambda: jsp.linalg.cho_solve((jnp.linalg.cholesky(a), True), b),
        lambda: jsp.linalg.solve_triangular(a, b, lower=True), lambda: jnp.abs(jnp.linalg.qr(a)[1]),
        lambda: jsp.sparse.linalg.cg(lambda v: a @ v, b, maxiter=3)[0], lambda: jsp.linalg.expm(a / 9),
        lambda: lax.linalg.tridiagonal_solve(y.ravel()[:2], jnp.full(2, 9.0), y.ravel()[-2:], jnp.ones((2, 1)))
        if y.size > 1 else b,
    ]  # fmt: skip
    return r.choice(ways)()


def _windows(r: Any, x: Any) -> Any:
    first, reduce = r.choice([(-jnp.inf, lax.max), (0.0, lax.add), (jnp.inf, lax.min)])
    return lax.reduce_window(x, first, reduce, [r.choice([1, 2]) for _ in x.shape], [1] * x.ndim, "SAME")


_own_jvp = jax.custom_jvp(jnp.sin)
_own_jvp.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 2 * jnp.cos(xs[0]) * ts[0]))
_own_vjp = jax.custom_vjp(jnp.cos)
_own_vjp.defvjp(lambda x: (jnp.cos(x), x), lambda x, ct: (ct * jnp.sin(x) ** 2,))

_own_vmap = jax.custom_batching.custom_vmap(lambda x: x * 2)
_own_vmap.def_vmap(lambda size, batched, x: (x * 2, True))
KEPT = jax.checkpoint_policies.save_only_these_names("kept")

SHAPES: dict[str, Piece] = {
    "reshape": ("f", lambda r, x: x.reshape(r.choice([(-1,), (x.shape[0], -1), (-1, x.shape[-1]), (1, *x.shape)]))),
    "transpose": ("m", lambda r, x: jnp.transpose(x, r.sample(range(x.ndim), x.ndim))),
    "slice": ("f", lambda r, x: lax.slice_in_dim(x, int(x.shape[0] > 1), None, r.choice([1, 2]))),
    "concatenate": ("ff", lambda r, x, y: jnp.concatenate([x, fit(y, x.shape)], axis(r, x))),
    "stack": ("ff", lambda r, x, y: jnp.stack([x, fit(y, x.shape)], r.randrange(x.ndim + 1))),
    "roll": ("f", lambda r, x: jnp.roll(x, r.choice([1, -2]), axis(r, x))),
    "pad": ("f", lambda r, x: jnp.pad(x, 1, r.choice(["constant", "edge", "wrap"]))),
    "tile": ("f", lambda r, x: jnp.tile(x, 2)), "repeat": ("f", lambda r, x: jnp.repeat(x, 2, axis(r, x))),
    "split": ("f", lambda r, x: jnp.array_split(x, 2, axis(r, x))[0]), "triangle": ("m", lambda r, x: jnp.tril(x)),
    "dynamic": ("fi", lambda r, x, i: lax.dynamic_slice_in_dim(x, i.ravel()[0], -(-x.shape[0] // 2))),
    "update": ("fi", lambda r, x, i: lax.dynamic_update_slice_in_dim(x, x[: -(-len(x) // 2)] * 2, i.ravel()[-1], 0)),
    "dot": ("ff", lambda r, x, y: jnp.tensordot(x, fit(y, (x.shape[-1], 4)), 1)),
    "gram": ("m", lambda r, x: jnp.einsum("...ij,...kj->...ik", x, x)), "diagonal": ("m", lambda r, x: jnp.diagonal(x)),
    "batched": ("mf", lambda r, x, y: jnp.einsum("b...,b...->b", x, fit(y, x.shape))),
    "outer": ("ff", lambda r, x, y: jnp.outer(x.ravel()[:9], y.ravel()[:9])),
    "ragged": ("mfi", lambda r, x, w, i: lax.ragged_dot(x.reshape(-1, x.shape[-1]), fit(w, (3, x.shape[-1], 4)),
        jnp.bincount(fit(i, (x.size // x.shape[-1],)) % 3, length=3).astype(jnp.int32))),
    "conv": ("mf", lambda r, x, w: lax.conv_general_dilated(
        x.reshape(*x.shape[:2], -1), fit(w, (4, x.shape[1], 2)), (r.choice([1, 2]),), "SAME")),
    "windows": ("f", _windows), "solve": ("mf", _solve),
    "scatter": ("ffi", lambda r, x, y, i: getattr(x.at[fit(i, x.shape[:1])], r.choice(
        ["add", "multiply", "min", "max", "subtract"]))(fit(y, x.shape), mode=r.choice(["drop", "clip"]))),
    "set": ("fi", lambda r, x, i: x.at[i.ravel()[0]].set(0.5)),
    "gather": ("fi", lambda r, x, i: jnp.take(x, i, axis(r, x), mode=r.choice(["fill", "clip", "wrap"]))),
    "along": ("fi", lambda r, x, i: jnp.take_along_axis(x, fit(i, x.shape) % x.shape[-1], x.ndim - 1)),
    "sort two": ("ff", lambda r, x, y: lax.sort((x, fit(y, x.shape)), num_keys=1)[1]),
    "top_k": ("f", lambda r, x: lax.top_k(x, 1 + x.shape[-1] // 2)[0]),
    "reduce_precision": ("f", lambda r, x: lax.reduce_precision(x, 8, 12)),
    "search": ("ff", lambda r, x, y: jnp.searchsorted(jnp.sort(x.ravel()), y)), "to bool": ("f", lambda r, x: x > 0.1),
    "one-hot": ("i", lambda r, i: jax.nn.one_hot(i % 5, 5)), "from int": ("i", lambda r, i: i / 7),
    "bincount": ("i", lambda r, i: jnp.bincount(i.ravel() % 7, length=7)),
    "to int": ("f", lambda r, x: (x * 10).astype(jnp.int32)),
    "segments": ("fi", lambda r, x, i: jax.ops.segment_sum(x, fit(i, x.shape[:1]) % 4, 4)),
    "nonzero": ("b", lambda r, b: jnp.nonzero(b.ravel(), size=4, fill_value=-1)[0]),
    "where": ("bff", lambda r, b, x, y: jnp.where(fit(b, x.shape), x, fit(y, x.shape))),
    "clip": ("ff", lambda r, x, y: lax.clamp(-0.5, x, fit(y, x.shape))),
    "stop": ("f", lambda r, x: lax.stop_gradient(x)),
    "narrow": ("f", lambda r, x: (x.astype(r.choice(["float32", "int8", "int16"])) * 2).astype(jnp.float64)),
    "bits of": ("f", lambda r, x: lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) % 64),
    "reduce": ("f", lambda r, x: lax.reduce(x, 1.0, lax.mul, (axis(r, x),))), "named axis": ("m", _named_axis),
    "own sum": ("f", lambda r, x: lax.reduce(x, 0.0, lambda a, b: a + b + a * b, (axis(r, x),))),
    "xor": ("i", lambda r, i: jnp.bitwise_xor.reduce(i, axis=0)),
    "pivots": ("m", lambda r, x: lax.linalg.lu(definite(x))[2]),
    "eig": ("m", lambda r, x: jnp.sort(jnp.abs(jnp.linalg.eigvals(definite(x))))),
    "betainc": ("f", lambda r, x: jsp.special.betainc(positive(x), 0.7, positive(x))),
    "named": ("f", lambda r, x: jax.checkpoint(lambda x: jnp.sin(checkpoint_name(x * x, "kept")), policy=KEPT)(x)),
    "own vmap": ("m", lambda r, x: jax.vmap(_own_vmap)(x)), "acosh": ("f", lambda r, x: lax.acosh(1 + positive(x))),
    "iota": ("f", lambda r, x: x * lax.broadcasted_iota(jnp.float64, x.shape, axis(r, x)) / 9),
    "approximate": ("f", lambda r, x: lax.approx_max_k(x, 1)[0]),
    "attention": ("m", lambda r, x: jax.nn.dot_product_attention(*[x.reshape(1, x.shape[0], 1, -1)] * 3)),
}  # fmt: skip
FLOWS: dict[str, Piece] = {
    "switch": ("ffi", lambda r, x, y, i: lax.switch(i.sum() % 3, [
        lambda x, y: x + y, lambda x, y: x * y.sum(), lambda x, y: jnp.sort(x, 0) - y], x, fit(y, x.shape))),
    "while": ("f", lambda r, x: lax.while_loop(
        lambda s: (s[0] < 3) & (jnp.abs(s[1]).max() < 2), lambda s: (s[0] + 1, s[1] * 1.5), (0, x))[1]),
    "sums": ("mf", lambda r, x, y: lax.scan(lambda c, e: (c + e, None), fit(y, x.shape[1:]), x)[0]),
    "scan": ("mf", lambda r, x, y: lax.scan(
        lambda c, e: (c * 0.5 + e, c.sum() * e), fit(y, x.shape[1:]), x, reverse=r.random() < 0.5)[1]),
    "map": ("m", lambda r, x: lax.map(lambda row: jnp.sin(row) * row.sum(), x, batch_size=r.choice([None, 2]))),
    "fori": ("f", lambda r, x: lax.fori_loop(0, 3, lambda k, c: jnp.sin(c + k), x)),
    "associative": ("f", lambda r, x: lax.associative_scan(jnp.maximum, x, axis=axis(r, x))),
    "checkpoint": ("ff", lambda r, x, y: jax.checkpoint(lambda x, y: jnp.sin(x @ y))(x, fit(y, (x.shape[-1], 3)))),
    "own jvp": ("f", lambda r, x: _own_jvp(x)), "own vjp": ("f", lambda r, x: _own_vjp(x)),
    "jit": ("f", lambda r, x: jax.jit(lambda x: x - x.mean(0))(x)),
    "barrier": ("ff", lambda r, *xs: lax.optimization_barrier(xs)[0]),
    "gradient": ("m", lambda r, x: jax.vmap(jax.grad(lambda v: jnp.sin(v).prod()))(x)),
    "callback": ("f", lambda r, x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)),
    "debug": ("f", lambda r, x: (jax.debug.callback(lambda x: None, x), x * 2)[1]),
    "impure": ("f", lambda r, x: io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)),
    "seeds": ("i", lambda r, i: jax.vmap(jax.random.key)(i.ravel())),
    "wrapped": ("k", lambda r, k: jax.random.wrap_key_data(jax.random.key_data(k), impl=jax.random.key_impl(k))),
    "fold_in": ("ki", lambda r, k, i: jax.vmap(jax.random.fold_in)(k, fit(i, k.shape))),
    "split keys": ("k", lambda r, k: jax.vmap(lambda k: jax.random.split(k)[1])(k)),
    "keys": ("s", lambda r, k: jax.random.split(k, 5)),
    "draw each": ("k", lambda r, k: jax.vmap(lambda k: jax.random.normal(k, (3,)))(k)),
    "key data": ("k", lambda r, k: jax.random.key_data(k).astype(jnp.int32) % 64),
    "choice": ("sf", lambda r, k, x: jax.random.choice(k, x, (5,))),
    "categorical": ("sm", lambda r, k, x: jax.random.categorical(k, x)),
    "dropout": ("sf", lambda r, k, x: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0)),
}  # fmt: skip
OF_MODULES: dict[str, Piece] = {
    f"{module.__name__}.{name}": (takes, lambda r, *xs, f=f, call=call: call(f, r, *xs))
    for takes, module, names, call in NAMED for name in names.split() if (f := getattr(module, name, None))
}  # fmt: skip
PIECES = SHAPES | FLOWS | OF_MODULES
