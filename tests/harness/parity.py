"""One function, as it is under `jax.jit` on one device and decorated on several: the same values, types and all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxdist
from jaxdist.ir.interpreter import subjaxprs


def mesh(devices: int) -> Mesh:
    return Mesh(jax.devices()[:devices], ("data",))


def decorated(f: Callable[..., Any], devices: int, **settings: Any) -> Any:
    """`f` on so many devices; its last argument is the batch, and what it is given stays."""
    given: dict[str, Any] = {"batch_argnums": -1, "mesh": mesh(devices), "donate": False, **settings}
    return jaxdist.data_parallel(f, **given)


def check(f: Callable[..., Any], *args: Any, devices: int, tolerance: float = 1e-10, **settings: Any) -> Any:
    """Compare, and return what one device computes.

    Args:
      f: takes state and, last, a batch.
      *args: of it.
      devices: how many.
      tolerance: of floats, relative to 1 + the largest finite value of the leaf; all else is compared exactly.
      **settings: of `data_parallel`.
    """
    want = jax.jit(f)(*args)
    got = decorated(f, devices, **settings)(*args)
    compare(got, want, tolerance)
    return want


def compare(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    """Leaves alike in shape, dtype, weak type and value: NaN for NaN, infinity for infinity, -0.0 for -0.0."""
    mine, theirs = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(mine, theirs, strict=True):
        name = jax.tree_util.keystr(path)
        a, b = jnp.asarray(a), jnp.asarray(b)
        assert (a.shape, a.dtype, jax.typeof(a).weak_type) == (b.shape, b.dtype, jax.typeof(b).weak_type), name
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=name)
            continue
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), finite, err_msg=name)
        np.testing.assert_array_equal(x[~finite], y[~finite], err_msg=name)
        scale = 1 + np.abs(y[finite]).max(initial=0)
        assert np.abs(x[finite] - y[finite]).max(initial=0) <= tolerance * scale, (name, x, y)


def program(f: Callable[..., Any], *args: Any, devices: int = 8, **settings: Any) -> Any:
    """The jaxpr of what one device runs, its collectives in buckets."""
    found: list[Any] = []
    step = decorated(f, devices, **settings)
    step._traced = lambda _, closed, __: found.append(closed)
    step.lower(*args)
    return found[-1].jaxpr


COLLECTIVES = {
    "jaxdist_all_reduce": "all-reduce", "jaxdist_reduce_scatter": "reduce-scatter", "jaxdist_all_gather": "all-gather",
    "all_to_all": "all-to-all", "ppermute": "permute", "pmax": "extreme", "pmin": "extreme", "psum": "psum",
}  # fmt: skip


def collectives(jaxpr: Any, within: str = "") -> list[tuple[str, tuple[int, ...], str]]:
    """(kind, shape of the result, the loops around it: ``"scan 4/"``) of each collective of a program, in order."""
    found = []
    for eqn in jaxpr.eqns:
        if kind := COLLECTIVES.get(eqn.primitive.name):
            found.append((kind, eqn.outvars[0].aval.shape, within))
        name = eqn.primitive.name
        inner = within
        if name in ("scan", "while"):
            inner += f"{name} {eqn.params['length']}/" if name == "scan" else "while/"
        for sub in subjaxprs(eqn):
            found += collectives(sub, inner)
    return found


def flops(jaxpr: Any) -> int:
    """Of the matrix products of a program, those in loops as often as they run."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            count += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)
        for sub in subjaxprs(eqn):
            count += flops(sub) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return count
