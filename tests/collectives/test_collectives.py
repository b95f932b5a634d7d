"""Eager collectives of one process alone, and what they stand on: arguments, buffers, reductions, descriptions."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.collectives.call import Call, merge, split
from jaxdist.collectives.numerics import reduction
from jaxdist.collectives.pool import Pool

X = np.arange(8, dtype=np.float32).reshape(4, 2)
ALONE = {
    "allreduce": lambda x: jaxdist.allreduce(x, "max"),
    "allgather": lambda x: jaxdist.allgather(x, axis=-1),
    "reduce_scatter": lambda x: jaxdist.reduce_scatter(x, "prod", axis=1),
    "broadcast": lambda x: jaxdist.broadcast(x, groups=[[0]]),
    "reduce": lambda x: jaxdist.reduce(x, op="min", groups=[]),
    "all_to_all": lambda x: jaxdist.all_to_all(x, 1, 0),
    "gather": jaxdist.gather,
    "scatter": jaxdist.scatter,
    "permute": lambda x: jaxdist.permute(x, [(0, 0)]),
}


def test_one_process_gets_its_own() -> None:
    for name, call in ALONE.items():
        x = X.copy()
        out = call({"a": x, "b": [jnp.asarray(x)]})
        x[:] = -1  # no result is a view of the caller's memory
        for leaf in jax.tree.leaves(out):
            assert isinstance(leaf, jax.Array), name
            np.testing.assert_array_equal(leaf, X, err_msg=name)


def test_dtypes_of_one_process() -> None:
    for dtype in ("bool", "int8", "uint32", "bfloat16", "complex64"):
        x = jnp.ones(2, dtype)
        assert jaxdist.allreduce(x, "avg").dtype == jnp.mean(x).dtype
        assert jaxdist.allreduce(x, "sum").dtype == x.dtype
    assert jaxdist.allgather(3).shape == (1,)
    assert not jaxdist.permute(X, []).any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxdist.allreduce(X, "mean"), ValueError, "unknown op 'mean'; valid: sum, prod, min, max, avg"),  # type: ignore[arg-type]
        (lambda: jaxdist.allreduce(X + 1j, "min"), TypeError, "complex numbers have no order"),
        (lambda: jaxdist.reduce(jnp.ones(2, "int4")), TypeError, "int4"),
        (lambda: jaxdist.allreduce(X, groups=[[0, 0]]), ValueError, "rank 0 is listed twice"),
        (lambda: jaxdist.allreduce(X, groups=[[1]]), ValueError, "rank 1 in groups=.* is out of range; valid: 0..0"),
        (lambda: jaxdist.allreduce(X, groups=[[0], []]), ValueError, "empty"),
        (lambda: jaxdist.allreduce(X, groups=[0]), ValueError, "list of lists"),  # type: ignore[list-item]
        (lambda: jaxdist.broadcast(X, 0.5), ValueError, "not an integer"),  # type: ignore[arg-type]
        (lambda: jaxdist.gather(X, root=1), ValueError, "root=1 is not a rank"),
        (lambda: jaxdist.allgather([X, 1.0], axis=1), ValueError, r"x\[1\] of shape \(\) has no axis 1"),
        (lambda: jaxdist.all_to_all({"w": X}, 2), ValueError, r"x\['w'\] of shape \(4, 2\) has no split_axis 2"),
        (lambda: jaxdist.scatter(1.0), ValueError, "has no dimension"),
        (lambda: jaxdist.permute(X, [(0, 0), (0, 0)]), ValueError, "source twice"),
        (lambda: jaxdist.permute(X, [(0, 1)]), ValueError, "destination 1"),
        (lambda: jaxdist.permute(X, [0]), ValueError, "pairs"),  # type: ignore[list-item]
        (lambda: jaxdist.broadcast("text"), TypeError, "'text', not an array"),
        (lambda: jaxdist.broadcast(np.array(["a"])), TypeError, "dtype <U1"),
        (lambda: jaxdist.broadcast(jax.random.key(0)), TypeError, "key_data"),
        (lambda: jax.jit(jaxdist.allgather)(X), TypeError, "inside jax.jit"),
        (lambda: jaxdist.send(X, 1), ValueError, "dst=1 is not a rank"),
        (lambda: jaxdist.recv(X, 0), ValueError, "nothing was sent"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_received_types_are_checked() -> None:
    x = X.copy()
    jaxdist.send(x, 0)
    x[:] = 0
    np.testing.assert_array_equal(jaxdist.recv(x, 0), X)
    jaxdist.send({"a": X}, 0)
    with pytest.raises(ValueError, match=r"expects float64\[4,2\], and rank 0 sent x\['a'\]: float32\[4,2\]"):
        jaxdist.recv(X.astype(float), 0)


def test_no_messages_in_a_step_and_a_barrier_that_does_nothing() -> None:
    for call in (lambda: jaxdist.send(1, 0), lambda: jaxdist.recv(1, 0)):
        step = jaxdist.data_parallel(lambda s, b, call=call: (s, (call(), b.sum())[1]))
        with pytest.raises((TypeError, jaxdist.StepError), match=r"jaxdist\.permute|jaxdist\.per_device"):
            step(jnp.zeros(()), np.ones(8))
        each = jaxdist.per_device(lambda b, call=call: (call(), b)[1], P("data"), P("data"))
        with pytest.raises(TypeError, match=r"use jaxdist\.permute"):
            jaxdist.data_parallel(each)(np.ones(8))
    each = jaxdist.per_device(lambda b: (jaxdist.barrier(), b)[1], P("data"), P("data"))
    assert jaxdist.data_parallel(each)(np.ones(8)).sum() == 8


def test_gradients_of_one_process() -> None:
    gradient = jax.grad(lambda x: (jaxdist.allreduce({"x": x, "n": 1}, "avg")["x"] ** 2).sum())(jnp.asarray(X))
    np.testing.assert_allclose(gradient, 2 * X)
    assert jax.grad(lambda x: jaxdist.allgather(x)[0] * 3)(2.0) == 3
    with pytest.raises(TypeError, match=r"jax\.grad"):
        jax.grad(lambda x: jaxdist.allreduce(x, "prod"))(1.0)


def test_a_buffer_is_used_again_only_when_nothing_refers_to_it() -> None:
    pool = Pool()
    shape, dtype = (1 << 18,), np.dtype(np.float32)
    host = pool.take(shape, dtype)
    host[:] = 1
    address = host.ctypes.data
    array = jax.device_put(host)
    assert array.unsafe_buffer_pointer() == address  # adopted without a copy
    del host
    assert pool.take(shape, dtype).ctypes.data != address
    view = np.asarray(array)
    more = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    del array
    gc.collect()
    assert pool.take(shape, dtype).ctypes.data != address
    assert (view == 1).all()
    assert (more == 2).all()
    del view, more
    gc.collect()
    assert pool.take(shape, dtype).ctypes.data == address


def test_the_pool_is_bounded() -> None:
    pool = Pool(idle_bytes=1 << 20)
    arrays = [pool.take((1 << 18,), np.dtype(np.float32)) for _ in range(4)]
    del arrays
    assert sum(size * len(blocks) for size, blocks in pool._idle.items()) == 1 << 20


def test_small_buffers_are_aligned_too() -> None:
    x = Pool().take((3, 5), np.dtype(jnp.bfloat16))
    assert x.ctypes.data % 64 == 0
    assert x.shape == (3, 5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_split_and_merge(axis: int) -> None:
    x = np.arange(4 * 6 * 8).reshape(4, 6, 8)
    parts = split(x, axis, 2)
    np.testing.assert_array_equal(parts, np.stack(np.split(x, 2, axis)))
    np.testing.assert_array_equal(merge(parts, axis), x)


def test_what_reductions_compute_in() -> None:
    assert reduction("sum", jnp.bfloat16).sums_in == np.float32
    assert reduction("sum", np.float16).out == np.float16
    assert reduction("sum", np.float64).native
    assert not reduction("max", np.float64).native  # MPI's loses NaNs
    assert reduction("max", np.int16).native


def test_a_call_has_its_parameters_in_its_name() -> None:
    assert str(Call("broadcast", root=2, groups=((0,),))) == "broadcast(root=2, groups=((0,),))"
