"""The one comparison: a function under `jax.jit` on one device, and decorated on several; the same values and types."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdist

On = int | dict[str, int]  # a number of devices, or the sizes of a mesh


def mesh(on: On) -> Mesh:
    """Over the first devices."""
    sizes = {"data": on} if isinstance(on, int) else on
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Mesh(devices.reshape(list(sizes.values())), tuple(sizes))


def decorated(f: Callable[..., Any], on: On = 8, **settings: Any) -> Any:
    """`f` on these devices; its last argument is the batch, and what it is given stays."""
    given: dict[str, Any] = {"batch_argnums": -1, "mesh": mesh(on), **settings}
    over: Callable[..., Any] = jaxdist.data_parallel if isinstance(on, int) else jaxdist.parallel
    return over(f, **given)


def check(f: Callable[..., Any], *args: Any, on: On = 8, tolerance: float = 1e-10, **settings: Any) -> Any:
    """Compare one call, and return what the devices compute."""
    got = jaxdist.unshard(decorated(f, on, **settings)(*args))
    compare(got, jax.jit(f)(*args), tolerance)
    return got


def check_steps(
    step: Callable[..., Any], state: Any, batches: Any, on: On = 8, tolerance: float = 1e-10,
    plain: Callable[..., Any] | None = None, **settings: Any,
) -> Any:  # fmt: skip
    """Compare each of several steps ``(*state, batch) -> (*state, aux)``; the last state, on the mesh."""
    one, many = jax.jit(plain or step), decorated(step, on, **settings)
    want, got = jaxdist.unshard(state), state
    for batch in batches:
        (*want, expected), (*got, aux) = one(*want, batch), many(*got, batch)
        compare(jaxdist.unshard((got, aux)), (want, expected), tolerance)
    return got


def compare(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    """Leaves alike in shape, dtype, weak type and value: NaN for NaN, infinity for infinity."""
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


def on_host(tree: Any) -> list[np.ndarray]:
    """The leaves; of random keys their data."""
    found = []
    for x in jax.tree.leaves(jaxdist.unshard(tree)):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        found.append(np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x))
    return found


def gap(want: Any, got: Any, narrow: float = 1) -> float:
    """The largest difference of finite results, relative to 1 + the largest value of the leaf; so much more is allowed
    in single precision."""
    worst = 0.0
    for x, y in zip(on_host(want), on_host(got), strict=True):
        assert x.shape == y.shape, (x.shape, y.shape)
        scale = narrow if x.dtype in ("float32", "complex64") else 1
        x, y = (one.astype(np.complex128 if np.iscomplexobj(one) else np.float64) for one in (x, y))
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()
        worst = max(worst, float(np.abs(x - y).max(initial=0) / (1 + np.abs(x).max(initial=0)) / scale))
    return worst


def close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    """The same values, leaf by leaf, whatever they are held in and of whatever type."""
    got, want = jaxdist.unshard(got), jaxdist.unshard(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


def train_step(
    loss_fn: Callable[[Any, Any], Any], tx: Any, value_and_grad: Callable[..., Any] = jax.value_and_grad, **options: Any
) -> Callable[[Any, Any, Any], Any]:
    """``step(params, opt_state, batch) -> (params, opt_state, loss)``, with gradients by `value_and_grad`."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(loss_fn, **options)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def held(x: Any) -> int:
    """Entries of an array on one device."""
    return jaxdist.planning.memory([x]).total.device // x.dtype.itemsize
