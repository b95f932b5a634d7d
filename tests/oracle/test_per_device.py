"""`per_device`: code for each device, by choice, inside a step and outside of one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness.check import close, decorated
from harness.check import mesh as on_mesh
from harness.errors import raises
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)))
PARTS = X.reshape(8, 2, 3)


def test_each_device_sees_its_part() -> None:
    of_tree = jaxdist.per_device(
        lambda t: {"rows": t["x"] - t["x"].mean(0), "sum": lax.psum(t["x"].sum(), "data"), "t": t["x"].T},
        ({"x": P("data")},), {"rows": P("data"), "sum": P(), "t": P(None, "data")},
    )  # fmt: skip
    np.testing.assert_allclose(of_tree({"x": X})["sum"], X.sum())
    np.testing.assert_array_equal(of_tree({"x": X})["t"], X.T)
    center = lambda x: of_tree({"x": x})["rows"]
    right = (PARTS - PARTS.mean(1, keepdims=True)).reshape(X.shape)
    np.testing.assert_allclose(center(X), right)  # outside of a step, over the job's mesh
    np.testing.assert_allclose(jax.jit(center)(X), right)
    np.testing.assert_allclose(jaxdist.data_parallel(lambda w, x: center(x) @ w)(W, X), right @ W)


def test_in_loops_branches_and_under_vmap() -> None:
    scale = jaxdist.per_device(lambda w, x: jnp.tanh(x * w.sum()), (P(), P("data")), P("data"))

    def step(w: Any, x: Any) -> Any:
        looped, _ = lax.scan(lambda c, _: (scale(w, c), None), x, None, length=3)
        branch = lax.cond(x.sum() > 0, lambda: scale(w, x), lambda: x)
        inner = jax.grad(lambda w: jax.checkpoint(scale)(w, x).mean())(w)
        return looped, branch, inner

    def plain(w: Any, x: Any) -> Any:
        one = lambda w, x: jnp.tanh(x * w.sum())
        for_loop = one(w, one(w, one(w, x)))
        return for_loop, jnp.where(x.sum() > 0, one(w, x), x), jax.grad(lambda w: one(w, x).mean())(w)

    close(decorated(step, 8)(W, X), plain(W, X), 1e-11)


def test_a_shard_map_of_ones_own() -> None:
    mesh = jaxdist.get_context().mesh
    each = jax.shard_map(lambda x: x - lax.pmean(x.mean(0), "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    got = jaxdist.data_parallel(lambda w, x: (w, each(x)))(W, X)[1]
    np.testing.assert_allclose(got, X - X.mean(0), atol=1e-14)
    fewer = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    other = jax.shard_map(lambda x: x, mesh=fewer, in_specs=P("data"), out_specs=P("data"))
    with raises((jaxdist.StepError, ValueError), "mesh"):
        jaxdist.data_parallel(lambda w, x: (w, other(x)))(W, X)


def test_kernels_that_types_do_not_know() -> None:
    def each(x: Any) -> Any:
        return jax.pure_callback(lambda x: np.sort(x, 0), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    step = jaxdist.data_parallel(jaxdist.per_device(each, P("data"), P("data"), check_vma=False))
    np.testing.assert_array_equal(step(X), np.sort(PARTS, 1).reshape(X.shape))


def test_what_the_devices_do_not_divide_is_refused() -> None:
    each = jaxdist.per_device(lambda x: x, P("data"), P("data"))
    for run in (each, jaxdist.data_parallel(each)):
        with raises(ValueError, "13"):
            run(X[:13])


# --- over meshes of several axes

SIZES: list[dict[str, int]] = [
    {"data": 2, "model": 2, "sequence": 2}, {"model": 4, "sequence": 1, "data": 2},
    {"sequence": 2, "model": 2, "data": 1},
]  # fmt: skip
TABLE = np.random.default_rng(2).normal(size=(16, 8, 4))


def mapped(sizes: dict[str, int]) -> Any:
    """What `per_device` is, over a mesh: JAX's own `shard_map`."""
    mesh = on_mesh(sizes)
    return lambda f, ins, outs: jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def unchecked(f: Any, ins: Any, outs: Any) -> Any:
    return jaxdist.per_device(f, ins, outs, check_vma=False)


SPECS = [P("model"), P(None, "sequence"), P("data", "model"), P(("model", "data")), P(("data", "sequence"), "model"),
         P(None, ("sequence", "model"), "data"), P()]  # fmt: skip


@pytest.mark.parametrize(("spec", "sizes"), [(spec, SIZES[i % 3]) for i, spec in enumerate(SPECS)], ids=str)
def test_specs_over_all_axes(spec: P, sizes: dict[str, int]) -> None:
    """A device sees the slice that JAX gives it, in whichever order the axes cut a dimension."""
    index = tuple(a for names in spec for a in (names if isinstance(names, tuple) else (names,)) if a)

    def each(w: Any, x: Any) -> Any:
        rank = lax.axis_index(index) if index else 0
        return x * w.sum() + rank, jnp.cumsum(x, 0), x.mean() * lax.psum(1.0, "model")

    def f(over: Any) -> Any:
        run = over(each, (P(), spec), (spec, spec, P()))

        def step(w: Any, x: Any) -> Any:
            loss = lambda w: jnp.mean(run(w, x)[0] ** 2)
            return run(w, x)[:2], jax.grad(loss)(w), jax.grad(lambda x: jnp.sum(run(w, x)[1] ** 2))(x)

        return step

    close(decorated(f(unchecked), sizes)(W, TABLE), jax.jit(f(mapped(sizes)))(W, TABLE), 1e-11)


def test_collectives_over_each_axis() -> None:
    """Of a step whose own axes they are; state comes in slices, and a sum over one axis leaves the others."""

    def each(w: Any, x: Any) -> Any:
        h = lax.psum(x @ w, "model")  # rows of the matrix are cut, and columns of the examples
        ring = lax.ppermute(h, "data", [(0, 1), (1, 0)])
        return h, ring, lax.pmax(h.max(), ("data",)), lax.all_gather(w, "model", tiled=True)

    specs = (P("model"), P("data", "model")), (P("data"), P("data"), P(), P())
    run = jaxdist.per_device(each, *specs, check_vma=False)
    w, x = np.random.default_rng(3).normal(size=(4, 3)), np.random.default_rng(4).normal(size=(8, 4))
    for layouts in (None, {"xs": 0}, {"xs": 1}):
        step = jaxdist.parallel(
            lambda *xs: (xs[0], run(xs[0], xs[1])), mesh=on_mesh({"data": 2, "model": 2}), layouts=layouts
        )
        want = x @ w, np.concatenate([(x @ w)[4:], (x @ w)[:4]]), (x @ w).max(), w
        close(tuple(step(w, x)[1]), want, 1e-11)


def test_two_axes_of_data_are_one_beside_others() -> None:
    """Under `zero(within=)`: the axis of data is two inside, and code for each device names it as one."""
    tx = jaxdist.zero(optax.adam(0.1, eps=0.1), 3, within=2)

    def each(w: Any, x: Any) -> Any:
        return lax.psum(x, "model") @ w + lax.axis_index("data"), lax.psum(x.sum(), ("data", "model"))

    run = jaxdist.per_device(each, (P(), P("data", None, "model")), (P("data"), P()), check_vma=False)

    def step_of(run: Any) -> Any:
        def step(w: Any, opt: Any, x: Any) -> Any:
            loss, grad = jax.value_and_grad(lambda w: jnp.mean(run(w, x)[0] ** 2))(w)
            updates, opt = tx.update(grad, opt, w)
            return optax.apply_updates(w, updates), opt, (loss, run(w, x))

        return step

    def plain(w: Any, x: Any) -> Any:
        place = jnp.repeat(jnp.arange(4), 4)[:, None, None]
        return (x[..., :2] + x[..., 2:]) @ w + place, x.sum()

    w = np.random.default_rng(5).normal(size=(2, 3))
    want = jax.jit(step_of(plain))(w, tx.init(w), TABLE)
    step = jaxdist.parallel(step_of(run), mesh=on_mesh({"data": 4, "model": 2}), layouts={"w": 1, "opt": 1})
    close(step(w, tx.init(w), TABLE), want)


def test_another_mesh_than_that_of_the_step_is_refused() -> None:
    mesh = on_mesh({"data": 2, "model": 2})
    step = lambda each: jaxdist.parallel(lambda w, x: (w, each(x)), mesh=mesh)
    other = on_mesh({"data": 4, "model": 1})
    each = jax.shard_map(lambda x: x, mesh=other, in_specs=P("data"), out_specs=P("data"))
    with raises(jaxdist.StepError, "'data': 4", "'model': 2"):
        step(each)(W, X)


RING = [(i, (i + 1) % 8) for i in range(8)]
BODIES = {
    "mean": lambda x: x - lax.pmean(x, "data") + 3.0 * lax.axis_index("data"),
    "gather": lambda x: lax.all_gather(x, "data").sum(0) * lax.axis_size("data"),
    "groups": lambda x: jaxdist.allreduce(x, "sum", groups=[[0, 7, 3, 1], [2, 6, 4, 5]]) + jaxdist.broadcast(x, 1),
    "keys": lambda x: x + jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("data")), x.shape),
    "loop": lambda x: lax.scan(
        lambda c, i: (lax.ppermute(c, "data", RING) + lax.axis_index("data") * i, lax.psum(c.sum(), "data")), x,
        jnp.arange(3.0),
    )[0],
    "while": lambda x: lax.while_loop(
        lambda s: lax.psum(s[0], "data") < 24, lambda s: (s[0] + 1, lax.ppermute(s[1], "data", RING)),
        (0, lax.stop_gradient(x)),
    )[1],
    "branch": lambda x: lax.cond(lax.psum(x.sum(), "data") > 0, lambda x: lax.psum(x, "data") * 2.0 + x, jnp.sin, x),
}  # fmt: skip


@pytest.mark.parametrize(("level", "within"), [(0, None), (3, 2)])
def test_bodies_of_all_kinds(level: Any, within: Any) -> None:
    """Within groups the axis of data is two in the program: no type of the user's code may name a mesh where it is one.

    As JAX's own `shard_map` has them, and gradients pass through.
    """
    tx = jaxdist.zero(optax.adam(0.1, eps=0.1), level, within=within)

    def step_of(over: Any) -> Any:
        bodies = {name: over(body, P("data"), P("data")) for name, body in BODIES.items()}
        run = lambda x: {name: body(x) for name, body in bodies.items()}

        def step(w: Any, opt_state: Any, x: Any) -> Any:
            loss, grad = jax.value_and_grad(lambda w: sum(jnp.mean(y**2) for y in run(x @ w).values()))(w)
            updates, opt_state = tx.update(grad, opt_state, w)
            return optax.apply_updates(w, updates), opt_state, (loss, run(x))

        return step

    args = W, tx.init(W), X
    close(decorated(step_of(jaxdist.per_device), 8)(*args), jax.jit(step_of(mapped({"data": 8})))(*args))
