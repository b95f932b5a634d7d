"""What each collective of `jaxdist` gives inside a step, on one device, and random calls of them."""

from __future__ import annotations

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
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COMPLEX = ["complex64", "complex128"]
OPS = {"sum": operator.add, "avg": operator.add, "prod": operator.mul, "min": jnp.minimum, "max": jnp.maximum}
KINDS = [
    "allreduce",
    "reduce",
    "reduce_scatter",
    "allgather",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "permute",
]
Call = dict[str, Any]
"""``kind``, ``shape``, ``dtype`` and the arguments of the collective."""


def on_each(f: Any) -> Any:
    """Of the devices' values, stacked: `f` of each device's own, stacked again."""

    def one(*args: Any) -> Any:
        return jax.tree.map(lambda y: jnp.asarray(y)[None], f(*jax.tree.map(lambda x: x[0], args)))

    return jaxdist.per_device(one, P("data"), P("data"))


def apply(call: Call, x: Any) -> Any:
    """The collective itself, inside a step."""
    args = {k: v for k, v in call.items() if k not in ("kind", "shape", "dtype")}
    return getattr(jaxdist, call["kind"])(x, **args)


def expected(call: Call, xs: Sequence[Any]) -> list[Any]:
    """The result on each device, from the devices' arrays; differentiable."""
    kind = call["kind"]
    if kind == "permute":
        return [sum((xs[s] for s, t in call["perm"] if t == d), jnp.zeros_like(xs[d])) for d in range(len(xs))]
    groups = call.get("groups") or [list(range(len(xs)))]
    groups = [*groups, *([d] for d in range(len(xs)) if not any(d in g for g in groups))]
    return [_one(kind, call, [xs[i] for i in g], g.index(d), xs[d]) for d in range(len(xs)) for g in groups if d in g]


def _one(kind: str, call: Call, xs: list[Any], me: int, mine: Any) -> Any:
    n, axis = len(xs), call.get("axis", 0)
    alone = call.get("groups") and n == 1
    root = 0 if alone else call.get("root", 0)
    if kind in ("allreduce", "reduce", "reduce_scatter"):
        total = _reduced(xs, call.get("op", "sum"))
        if kind == "reduce_scatter":
            return jnp.split(total, n, axis)[me]
        return total if kind == "allreduce" or me == root else mine.astype(total.dtype)
    if kind in ("allgather", "gather"):
        whole = jnp.concatenate([jnp.atleast_1d(x) for x in xs], axis)
        return whole if kind == "allgather" or me == root else jnp.zeros_like(whole)
    if kind == "broadcast":
        return xs[root]
    if kind == "scatter":
        return jnp.split(xs[root], n, 0)[me]
    assert kind == "all_to_all"
    return jnp.concatenate([jnp.split(x, n, call["split_axis"])[me] for x in xs], call["concat_axis"])


def _reduced(xs: list[Any], op: str) -> Any:
    dtype = xs[0].dtype
    if dtype.kind == "b" and op != "avg":
        return functools.reduce(jnp.logical_or if op in ("sum", "max") else jnp.logical_and, xs)
    if op == "avg":
        out = jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype
        return (
            functools.reduce(operator.add, [x.astype(jnp.promote_types(out, "float64")) for x in xs]) / len(xs)
        ).astype(out)
    wide = [x.astype("float64") for x in xs] if jnp.issubdtype(dtype, jnp.floating) else xs
    return functools.reduce(OPS[op], wide).astype(dtype)


def random_call(rng: np.random.Generator, n: int, kinds: Sequence[str] = (), dtypes: Sequence[str] = ()) -> Call:
    """One of the calls that are legal inside a step on `n` devices."""
    kind = str(rng.choice(kinds or KINDS))
    call: Call = {"kind": kind}
    reduces = "reduce" in kind
    if reduces:
        call["op"] = str(rng.choice(list(OPS)))
    ordered = call.get("op") not in ("min", "max")
    call["dtype"] = str(rng.choice(dtypes or [*FLOATS, *INTS, "bool", *COMPLEX * ordered]))
    order = [int(d) for d in rng.permutation(n)]
    if kind == "permute":
        k = int(rng.integers(1, n + 1))
        call["perm"] = list(zip(order[:k], [int(d) for d in rng.permutation(n)[:k]], strict=True))
    else:
        halves = [order[: n // 2], order[n // 2 :]] if n % 2 == 0 else [[d] for d in order]
        any_size = [[order[:1], order[1:]], [order[: n - 1]]] if kind in ("allreduce", "reduce", "broadcast") else []
        choices = [None, None, [order], halves, *any_size]
        if groups := choices[rng.integers(len(choices))]:
            call["groups"] = groups
    size = min(map(len, call.get("groups") or [order]))
    if kind in ("reduce", "broadcast", "gather", "scatter"):
        call["root"] = int(rng.integers(size))
    least = kind in ("reduce_scatter", "all_to_all", "scatter")
    shape = [int(rng.integers(0, 3)) * n for _ in range(int(rng.integers(least, 4)))]
    if shape and kind in ("allgather", "reduce_scatter"):
        call["axis"] = int(rng.integers(-len(shape), len(shape)))
    if kind == "all_to_all":
        call["split_axis"], call["concat_axis"] = (int(a) for a in rng.integers(len(shape), size=2))
    return {**call, "shape": tuple(shape)}


def data(call: Call, rng: np.random.Generator, n: int) -> np.ndarray:
    """The devices' arrays, stacked; small integers, so that sums and products are exact."""
    top = 2 if call["dtype"] == "bool" else 3
    return rng.integers(0, top, (n, *call["shape"])).astype(jnp.dtype(call["dtype"]))


def check(calls: Sequence[Call], xs: Sequence[np.ndarray], first: int, mine: int) -> int:
    """Run all calls in one step and compare; returns how many results were compared.

    Args:
      calls: the collectives.
      xs: for each, the devices' arrays, stacked.
      first: of this process's devices.
      mine: how many devices it has.
    """

    @jaxdist.data_parallel
    def step(batch: Any) -> Any:
        return on_each(lambda xs: [apply(call, x) for call, x in zip(calls, xs, strict=True)])(batch)

    outs = step([x[first : first + mine] for x in xs])
    # Together: one program to compile, not one for each operation on each shape.
    wants = jax.jit(lambda xs: [expected(call, list(x)) for call, x in zip(calls, xs, strict=True)])(list(xs))
    for call, want, out in zip(calls, wants, outs, strict=True):
        shards = sorted(out.addressable_shards, key=lambda s: s.device.id)
        for d, shard in enumerate(shards):
            got, right = np.asarray(shard.data), np.asarray(want[first + d])[None]
            if not right.size:  # XLA does not shard what is empty
                assert (got.dtype, got.shape[1:]) == (right.dtype, right.shape[1:]), (call, got.shape, right.shape)
                continue
            assert (got.dtype, got.shape) == (right.dtype, right.shape), (call, got.dtype, got.shape, right.shape)
            tolerance = float(jnp.finfo(right.dtype).eps) * 4 if jnp.issubdtype(right.dtype, jnp.inexact) else 0
            wide = complex if jnp.issubdtype(right.dtype, jnp.complexfloating) else "float64"
            if right.dtype.kind in "iub":
                np.testing.assert_array_equal(got, right, err_msg=str(call))
            else:
                np.testing.assert_allclose(
                    got.astype(wide), right.astype(wide), tolerance, tolerance, err_msg=str(call)
                )
    return len(calls)
