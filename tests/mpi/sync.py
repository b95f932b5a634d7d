"""`check_sync`, `check_every` and `check_finite` of several ranks: what each rank is told, by case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.agreement.copies import Copies

ctx = jaxdist.get_context()
TOLD: dict[str, str] = {}
ODD = ctx.rank == 1
tx = jaxdist.zero(optax.adam(0.1), 2)


@jaxdist.data_parallel(check_every=3)
def checked(state: Any, x: Any) -> Any:
    return {"w": state["w"] + 1, "frozen": state["frozen"]}, jnp.mean(x)


@jaxdist.data_parallel
def finite(w: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w)
    jaxdist.check_finite(grads, "grads")
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss


@jaxdist.data_parallel
def each_loss(w: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w)
    jaxdist.check_finite({"losses": (x @ w["a"]) ** 2}, "each")
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss


@jaxdist.data_parallel(check_finite=True)
def in_shards(w: Any, opt_state: Any, x: Any) -> Any:
    grads = jax.grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w)
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state


def replicated(value: Any) -> jax.Array:
    """This process's value, as its part of an array that claims to be the same everywhere."""
    own = jax.device_put(np.asarray(value), jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays(own.shape, NamedSharding(ctx.mesh, P()), [own])


def batch(bad: bool = False) -> Any:
    x = np.ones((2, 3), np.float32)
    x[0, 0] = np.nan if bad else 1
    return x


def case(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
        TOLD[name] = "passed"
    except (RuntimeError, FloatingPointError) as error:
        TOLD[name] = f"{type(error).__name__}: {error}"


def main() -> dict[str, str]:
    ones = np.ones((2, 3), np.float32)
    key = jax.random.key(7)
    sharded = jaxdist.shard({"w": jnp.arange(7.0), "v": jnp.arange(12.0)})
    same = {"w": replicated(ones * np.nan), "key": key, "shards": sharded, "host": ones, "n": 3, "nan": float("nan")}
    case("same", lambda: jaxdist.check_sync(same))
    other = ones.copy()
    other[1, 2] += 1e-6 * ODD
    case("bits", lambda: jaxdist.check_sync(same | {"w": [replicated(ones), replicated(other)]}))
    case("tree", lambda: jaxdist.check_sync({"a": 1} | ({"extra": ones} if ODD else {})))
    gone = jnp.ones(2)
    if ODD:
        gone.delete()
    case("donated", lambda: jaxdist.check_sync([gone]))

    def state(frozen: Any) -> Any:
        """As a step has returned it, and a broken memory may have changed it since."""
        made = {"w": replicated(ones), "frozen": replicated(frozen)}
        ctx.only(Copies).add(made.values())
        return made

    for i in range(1, 4):
        case(f"call {i}", lambda: checked(state(other), batch()))
    case("call 6", lambda: [checked(state(ones), batch()) for _ in range(3)])

    w, _ = finite({"a": jnp.ones(3)}, batch())
    case("gradients", lambda: finite(w, batch(bad=ODD)))
    case("loss", lambda: each_loss(w, batch(bad=ODD)))
    case("kept", lambda: finite(w, batch()))
    w, opt_state = in_shards(w, tx.init(w), batch())
    case("in shards", lambda: in_shards(w, opt_state, batch(bad=ODD)))
    case("in shards, kept", lambda: in_shards(w, opt_state, batch()))

    case("another call", lambda: ctx.barrier() if ODD else jaxdist.check_sync({"a": 1}))
    ctx.barrier()
    return TOLD
