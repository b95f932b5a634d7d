"""The collectives of `jaxdist`: random calls of them, and what each gives, on one device."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxdist

FLOATS = ["float16", "bfloat16", "float32", "float64"]
SMALL = ["float4_e2m1fn", *(f"float8_{kind}" for kind in (
    "e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))]  # fmt: skip
INTS = [f"{kind}{bits}" for bits in (8, 16, 32, 64, 2, 4) for kind in ("int", "uint")]
COMPLEX = ["complex64", "complex128"]
OPS = ["sum", "avg", "prod", "min", "max"]
KINDS = ["allreduce", "reduce", "reduce_scatter", "allgather", "all_to_all", "broadcast", "gather", "scatter"]
Call = dict[str, Any]  # ``kind``, ``shape``, ``dtype`` and the arguments of the collective


def apply(call: Call, x: Any) -> Any:
    """The collective itself."""
    args = {k: v for k, v in call.items() if k not in ("kind", "shape", "dtype")}
    return getattr(jaxdist, call["kind"])(x, **args)


def expected(call: Call, xs: Sequence[Any]) -> list[Any]:
    """The result on each device: of JAX's arrays inside a step, differentiable; of NumPy's between processes."""
    kind = call["kind"]
    groups = call.get("groups") or [list(range(len(xs)))]
    groups = [*groups, *([d] for d in range(len(xs)) if not any(d in g for g in groups))]
    return [_one(kind, call, [xs[i] for i in g], g.index(d), xs[d]) for d in range(len(xs)) for g in groups if d in g]


def on_own(f: Any) -> Any:
    """`f` of the values that each device has of stacked ones, for a step."""

    def one(*args: Any) -> Any:
        return jax.tree.map(lambda y: jnp.asarray(y)[None], f(*jax.tree.map(lambda x: x[0], args)))

    return jaxdist.per_device(one, P("data"), P("data"))


def _numpy(x: Any) -> Any:
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def _one(kind: str, call: Call, xs: list[Any], me: int, mine: Any) -> Any:
    xp = _numpy(mine)
    n, axis = len(xs), call.get("axis", 0)
    alone = call.get("groups") and n == 1
    root = 0 if alone else call.get("root", 0)
    if xp is np and kind in ("reduce", "gather") and me != root:
        return mine
    if kind in ("allreduce", "reduce", "reduce_scatter"):
        total = _reduced(xp, xs, call.get("op", "sum"))
        if kind == "reduce_scatter":
            return xp.split(total, n, axis)[me]
        return total if kind == "allreduce" or me == root else mine.astype(total.dtype)
    if kind in ("allgather", "gather"):
        whole = xp.concatenate([xp.atleast_1d(x) for x in xs], axis)
        return whole if kind == "allgather" or me == root else xp.zeros_like(whole)
    if kind == "broadcast":
        return xs[root]
    if kind == "scatter":
        return xp.split(xs[root], n, 0)[me]
    assert kind == "all_to_all"
    return xp.concatenate([xp.split(x, n, call["split_axis"])[me] for x in xs], call["concat_axis"])


def _reduced(xp: Any, xs: list[Any], op: str) -> Any:
    dtype = xs[0].dtype
    if dtype.kind == "b" and op != "avg":
        return functools.reduce(xp.logical_or if op in ("sum", "max") else xp.logical_and, xs)
    two = {"sum": operator.add, "avg": operator.add, "prod": operator.mul, "min": xp.minimum, "max": xp.maximum}[op]
    if op == "avg":
        out = jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype
        wide = "complex128" if jnp.issubdtype(out, jnp.complexfloating) else "float64"
        return (functools.reduce(two, [x.astype(wide) for x in xs]) / len(xs)).astype(out)
    wide = "float64" if jnp.issubdtype(dtype, jnp.floating) else dtype if dtype.kind == "c" else "int64"
    with np.errstate(over="ignore"):
        return xp.asarray(functools.reduce(two, [x.astype(wide) for x in xs])).astype(dtype)


def dtypes(call: Call) -> list[str]:
    """Those that the call takes."""
    return [*FLOATS, *SMALL, *INTS, "bool", *COMPLEX * (call.get("op") not in ("min", "max"))]


def random_call(rng: np.random.Generator, n: int, eager: bool = False) -> Call:
    """One of the calls that are legal inside a step on `n` devices, or between as many processes."""
    kind = str(rng.choice(KINDS))
    call: Call = {"kind": kind}
    if "reduce" in kind:
        call["op"] = str(rng.choice(OPS))
    call["dtype"] = str(rng.choice(dtypes(call)))
    order = [int(d) for d in rng.permutation(n)]
    halves = [order[: n // 2], order[n // 2 :]] if n % 2 == 0 else [[d] for d in order]
    any_size = [[order[:1], order[1:]], [order[: n - 1]]] if eager else []
    choices = [None, None, [order], halves, *any_size]
    if groups := choices[rng.integers(len(choices))]:
        call["groups"] = groups
    sizes = [len(group) for group in call.get("groups") or [order]]
    if kind in ("reduce", "broadcast", "gather", "scatter"):
        call["root"] = int(rng.integers(min(sizes)))
    least = kind in ("reduce_scatter", "all_to_all", "scatter")
    unit = int(np.lcm.reduce(sizes)) if eager else n
    shape = [int(rng.integers(0, 3)) * unit for _ in range(int(rng.integers(least, 4)))]
    if eager and shape and rng.random() < 0.2:  # to where the algorithms change
        shape = [max(size, unit) for size in shape]
        shape[0] = unit * (int(2 ** rng.uniform(10, 19)) // int(np.prod(shape[1:])))
    if (shape or eager) and kind in ("allgather", "reduce_scatter"):
        dims = max(1, len(shape))
        call["axis"] = int(rng.integers(-dims, dims))
    if kind == "all_to_all":
        call["split_axis"], call["concat_axis"] = (int(a) for a in rng.integers(-len(shape), len(shape), size=2))
    return {**call, "shape": tuple(shape)}


def data(call: Call, rng: np.random.Generator, n: int) -> np.ndarray:
    """The devices' arrays, stacked; small integers, so that sums and products are exact."""
    shape, dtype = (n, *call["shape"]), call["dtype"]
    x = rng.integers(dtype == "float8_e8m0fnu", 2 if dtype == "bool" else 3, shape)  # which has no zero
    return np.asarray(x + 1j * rng.integers(0, 3, shape) if dtype in COMPLEX else x).astype(jnp.dtype(dtype))


# --- reductions of the largest numbers, infinities and NaN

REDUCTIONS = {
    "sum": lambda x: jnp.any(x, 0) if x.dtype == bool else jnp.sum(x, 0, dtype=x.dtype),
    "prod": lambda x: jnp.all(x, 0) if x.dtype == bool else jnp.prod(x, 0, dtype=x.dtype),
    "max": lambda x: jnp.max(x, 0), "min": lambda x: jnp.min(x, 0), "any": lambda x: jnp.any(x, 0),
    "all": lambda x: jnp.all(x, 0), "count": lambda x: jnp.sum(x != 0, 0, dtype=jnp.uint8),
}  # fmt: skip


def extremes(dtype: str, rows: int, length: int) -> np.ndarray:
    """Integers from all of their range; of floats the infinities, NaN and both zeros, each beside each."""
    i = np.arange(rows * length).reshape(rows, length)
    if dtype == "bool":
        return i * 7919 % 13 % 3 == 0
    if np.dtype(jnp.dtype(dtype)).kind in "iu":
        noise = np.random.default_rng(length).bytes(i.size * np.dtype(dtype).itemsize)
        return np.frombuffer(noise, dtype).reshape(rows, length)
    kinds = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -2.0])
    return kinds[np.stack([np.arange(9, length + 9) // 7**k % 7 for k in range(rows)])].astype(jnp.dtype(dtype))


# --- a step of numbers of every dtype


def numbers(rows: int) -> dict[str, np.ndarray]:
    """Zeros and ones of each dtype, few enough for exact sums."""
    x = np.arange(rows * 3).reshape(rows, 3) // 2 % 2
    return {d: x.astype(jnp.dtype(d)) for d in [*FLOATS, *SMALL, *INTS, *COMPLEX, "bool"]}


def moved(w: Any, b: Any) -> Any:
    """What a step sends of state (in shards) and batch: whole, largest, smallest, added up."""
    summed = jax.vmap(lambda x: jax.lax.psum(x, "rows"), axis_name="rows")
    extremes = [d for d in b if d not in COMPLEX]
    return w, {
        "whole": [{d: x[::-1] for d, x in of.items()} for of in (w, b)],
        "extreme": [{d: f(b[d], 0) for d in extremes} for f in (jnp.max, jnp.min)],
        "sum": {d: summed(b[d]) for d in b if d not in ("bool", "float8_e8m0fnu")},  # which has no zero to sum from
    }
