"""State that differs by rank, and what `check_sync`, `check_every`, `check_finite` and `save` say of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from calls import W, X, descend, loss_of, whole
from harness.check import close
from harness.errors import raises
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size
ODD = R == 1
MINE = X[R]
ONES = np.ones((2, 3), np.float32)


def as_of_all(value: Any, last: Any = None) -> jax.Array:
    """This process's value (of its last device), as its part of an array that claims to be the same everywhere."""
    *others, device = ctx.local_devices
    own = [jax.device_put(np.asarray(value), d) for d in others]
    own.append(jax.device_put(np.asarray(value if last is None else last), device))
    return jax.make_array_from_single_device_arrays(own[0].shape, NamedSharding(ctx.mesh, P()), own)


def compared() -> None:
    """`check_sync`: what is the same passes, and of what differs every rank hears."""
    shards = jaxdist.shard({"w": jnp.arange(7.0), "v": jnp.arange(12.0)})
    same: dict[str, Any] = {"w": as_of_all(ONES * np.nan), "key": jax.random.key(7), "shards": shards, "host": ONES,
                            "n": 3, "nan": float("nan"), "objects": ["text", None, len]}  # fmt: skip
    jaxdist.check_sync(same)
    for use in (np.asarray, np.from_dlpack, jnp.sum, jax.jit(jnp.sum), jax.grad(jnp.sum), jax.lax.sin, jax.device_put,
                optax.global_norm, lambda x: jax.eval_shape(jnp.sum, x), lambda x: x.sum(), lambda x: 1 << x,
                lambda x: 3 in x):  # fmt: skip
        with raises((ValueError, AttributeError), "(7,)", "several processes", "jaxdist.unshard"):
            use(shards["w"])
    assert shards["w"].aval.shape == (7,)
    other = ONES.copy()
    other[1, 2] += 1e-6 * ODD
    gone = jnp.ones(2)
    if ODD:
        gone.delete()
    rows: list[tuple[Any, tuple[str, ...]]] = [
        (same | {"w": [as_of_all(ONES), as_of_all(other)]}, ("['w'][1]", "float32[2,3]", "rank 0", "rank 1")),
        ({"a": 1} | ({"extra": ONES} if ODD else {}), ("['extra']", "absent", "float32[2,3]", "rank 0", "rank 1")),
        ({"a": 1 if ODD else 1.0}, ("['a']", "int", "float", "rank 1")),
        ({"a": -0.0 if ODD else 0.0}, ("['a']", "float", "rank 1")),
        (np.zeros(3, np.float32 if ODD else np.float64), ("float32[3]", "float64[3]", "rank 1")),
        (jax.random.key(int(ODD)), ("key", "rank 1")),
        ([gone], ("[0]", "donated", "rank 1")),
    ]
    if len(ctx.local_devices) > 1:
        damaged = as_of_all(ONES, other)
        rows.append(({"w": damaged}, ("['w']", "rank 1")))
    if N == 4:  # of a slice two groups have a copy
        part = jaxdist.shard(jnp.arange(8.0), within=2)
        own = part.addressable_data(0) + (R == 2)
        other = jax.make_array_from_single_device_arrays(part.shape, part.sharding, [own])
        rows.append(({"w": other}, ("['w']", "rank 2")))
    for tree, tokens in rows:
        with raises(jaxdist.SyncError, "check_sync", *tokens):
            jaxdist.check_sync(tree)
    with raises(RuntimeError, "check_sync", "barrier", "rank 1"):  # ranks in different calls
        ctx.barrier() if ODD else jaxdist.check_sync({"a": 1})
    ctx.barrier()


def checked_in_steps() -> None:
    """`check_every` compares what comes out; `check_finite` names what is not finite, and where."""

    @jaxdist.data_parallel(check_every=3)
    def checked(state: Any, x: Any) -> Any:
        return {"w": state["w"] + 1, "frozen": state["frozen"]}, jnp.mean(x)

    tx, over = jaxdist.zero(optax.adam(0.1), 2), jaxdist.data_parallel

    def with_grads(w: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w)
        jaxdist.check_finite(grads, "grads")
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss

    def with_losses(w: Any, x: Any) -> Any:
        jaxdist.check_finite({"losses": (x @ w["a"]) ** 2}, "each")
        return w, jnp.mean(x @ w["a"])

    def in_shards(w: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    x, bad = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    bad[0, 0] = np.nan if ODD else 1
    other = ONES + 1e-6 * ODD  # as a broken memory may have changed it
    for _ in range(2):
        checked({"w": as_of_all(ONES), "frozen": as_of_all(ONES)}, x)
    with raises(jaxdist.SyncError, "checked", "call 3", "frozen", "rank 1"):
        checked({"w": as_of_all(ONES), "frozen": as_of_all(other)}, x)
    w: Any = {"a": jnp.ones(3)}
    finite: Any = over(with_grads)
    losses: Any = over(with_losses)
    sharded: Any = over(in_shards, check_finite=True)
    rows: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = [
        (lambda x: finite(w, x), ("with_grads", "grads['a']", "3 NaN")),
        (lambda x: losses(w, x), ("with_losses", "each['losses']", "1 NaN", "rank 1")),
        (lambda x: sharded(w, tx.init(w), x), ("in_shards", "['a']", "NaN")),
    ]
    for call, tokens in rows:
        call(x)
        with raises(FloatingPointError, *tokens):
            call(bad)
        call(x)


def two(p: Any, q: Any, x: Any) -> Any:
    return tuple(w - 0.1 * jax.grad(loss_of)(w, x) for w in (p, q))


def differs(folder: str) -> None:
    """A copy that one rank has changed is refused by a step and by `save`, and the job goes on."""
    step = jaxdist.data_parallel(lambda w, x: (descend(w, x), loss_of(w, x)))
    w, _ = step(W, MINE)
    own = w * (3.0 if ODD else 1.0)
    with raises(ValueError, "w", "rank 0", "rank 1"):
        step(own, MINE)
    if len(ctx.local_devices) > 1:
        with raises(ValueError, "w", "rank 0", "rank 1"):
            step(as_of_all(w.addressable_data(0), w.addressable_data(0) * (3.0 if ODD else 1.0)), MINE)
    with raises(jaxdist.CheckpointError, "leaf w", "rank 0", "rank 1"):
        jaxdist.save(f"{folder}/own", {"w": own}, 1)
    jaxdist.save(f"{folder}/own", {"w": w * 1.0 if ODD else w}, 1)  # the same, though of one rank alone
    close(step(w, MINE), (descend(w, whole(X)), loss_of(w, whole(X))))
    p, q = jaxdist.data_parallel(two)(W, W + 1, MINE)
    with raises(jaxdist.CheckpointError, "leaf p", "rank 1"):
        jaxdist.save(f"{folder}/pairs", {"p": q if ODD else p}, 1)
