"""Every kind of program that ranks share or must not: `python run_executables.py [PART...]`; prints a line of JSON.

It holds a digest of the bits of each part's results, and the names of the programs that this rank compiled itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src import compiler
from jax.experimental import io_callback

import jaxdist

_compiled: list[str] = []
_original = compiler.backend_compile_and_load


def _count(backend: Any, module: Any, *rest: Any) -> Any:
    _compiled.append(module.operation.attributes["sym_name"].value)
    return _original(backend, module, *rest)


compiler.backend_compile_and_load = _count


def bits(tree: Any) -> str:
    """Of all of a tree's arrays, as this process holds them."""
    hashed = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        hashed.update(np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x).tobytes())
    return hashed.hexdigest()[:16]


def part_of_batch(rows: int) -> np.ndarray:
    """Of this rank."""
    ctx = jaxdist.get_context()
    return np.random.default_rng(ctx.rank).normal(size=(rows, 7)).astype(np.float32)


def local() -> Any:
    """A program of each process alone, on its own device."""
    ctx = jaxdist.get_context()
    x = jax.jit(lambda x: jnp.sin(x) @ x.T)(part_of_batch(5))
    assert x.devices() == {jax.local_devices()[0]}, x.devices()
    return x, jax.jit(lambda x: x + 1)(np.full(3, ctx.rank, np.float32))


def train(level: int) -> Any:
    """A few steps of ZeRO."""
    tx = jaxdist.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), level)  # type: ignore[arg-type]
    key = jax.random.key(0)
    params: Any = {"w": jax.random.normal(key, (7, 33)), "b": jnp.zeros(33), "o": jax.random.normal(key, (33, 3))}

    @jaxdist.data_parallel
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = jnp.tanh(batch @ params["w"] + params["b"])
            return jnp.mean((hidden @ params["o"] - jnp.sin(batch[:, :3])) ** 2) + jnp.max(hidden) * 0.1

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, value = tx.init(params), None
    for _ in range(3):
        params, state, value = step(params, state, part_of_batch(4))
    return jaxdist.unshard((params, state)), value


def callbacks() -> Any:
    """Functions of the process in the program."""
    ctx = jaxdist.get_context()
    seen: list[float] = []

    def note(x: Any) -> None:
        seen.append(float(x))

    @jax.jit
    def own(x: Any) -> Any:
        jax.debug.print("from rank {}", x[0])
        io_callback(note, None, x[0])
        return jax.pure_callback(lambda x: x * (ctx.rank + 1), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        jax.debug.print("w {}", w)
        io_callback(note, None, w)
        return w + jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), w.dtype), batch.mean())

    out = own(np.full(2, ctx.rank, np.float32))
    np.testing.assert_array_equal(out, np.full(2, ctx.rank * (ctx.rank + 1)))
    w = step(np.float32(1), part_of_batch(4))
    jax.effects_barrier()
    assert ctx.rank in seen, seen
    return out, w


def differs() -> Any:
    """A program that is not the same on all ranks, with the same name and types."""
    rank = jaxdist.get_context().rank

    @jax.jit
    def other(x: Any) -> Any:
        return x * (rank + 2)

    out = other(np.ones(3, np.float32))
    np.testing.assert_array_equal(out, np.full(3, rank + 2))
    return out


def shifted() -> Any:
    """To the next rank: an MPI call that names it."""
    ctx = jaxdist.get_context()

    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        def shift(x: Any) -> Any:
            return jax.lax.ppermute(x, "data", [(i, (i + 1) % ctx.size) for i in range(ctx.size)])

        split = jax.sharding.PartitionSpec("data")
        return w, jaxdist.per_device(shift, in_specs=split, out_specs=split)(batch)

    mine = np.full((2, 3), ctx.rank, np.float32)
    _, out = step(np.float32(0), mine)
    np.testing.assert_array_equal(out.addressable_data(0), np.full((2, 3), (ctx.rank - 1) % ctx.size))
    return out


PARTS = {
    "local": local,
    **{f"level {level}": lambda level=level: train(level) for level in range(4)},
    "callbacks": callbacks,
    "differs": differs,
    "shifted": shifted,
}


def main() -> None:
    ctx = jaxdist.init()
    found: dict[str, Any] = {"rank": ctx.rank, "communicator": ctx.communicator, "bits": {}, "compiled": {}}
    for name in sys.argv[1:] or PARTS:
        _compiled.clear()
        found["bits"][name] = bits(PARTS[name]())
        found["compiled"][name] = list(_compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
