"""Attention over a sequence in slices: heads travel in place of keys and values, to the same numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import meshes, parity
from jax import lax

import jaxdist
from jaxdist.placements import heads, options

RNG = np.random.default_rng(0)
PLACES, WIDTH = 32, 16


def array(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[0]))


def einsum(q: Any, k: Any, v: Any) -> Any:
    """Causal, with as many heads of queries as of keys."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


def grouped(q: Any, k: Any, v: Any) -> Any:
    """Two heads of queries for one of keys."""
    q = q.reshape(*q.shape[:2], k.shape[2], 2, q.shape[3])
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
    out = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def layer(attention: Any, params: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
    return x + jnp.einsum("bthk,hkd->btd", attention(q, k, v), params["o"])


def step_of(attention: Any, scanned: bool = False) -> Any:
    def loss(params: Any, x: Any) -> Any:
        if not scanned:
            return jnp.mean(jnp.sin(layer(attention, params, x)))
        once = jax.checkpoint(lambda x, params: (layer(attention, params, x), None))
        return jnp.mean(jnp.sin(lax.scan(once, x, params)[0]))

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments(places: int = PLACES, count: int = 8, keys: int = 8, layers: int = 0) -> tuple[Any, Any]:
    lead = (layers,) if layers else ()
    params = {
        "q": array(*lead, WIDTH, count, 4), "k": array(*lead, WIDTH, keys, 4), "v": array(*lead, WIDTH, keys, 4),
        "o": array(*lead, count, 4, WIDTH),
    }  # fmt: skip
    return params, array(2, places, WIDTH)


def sent(step: Any, args: Any, mesh: dict[str, int]) -> Counter[str]:
    """How many collectives of each kind a device's program has."""
    decorated: Any = jaxdist.parallel(step, mesh=meshes.mesh(mesh), donate=False)
    closed, _ = decorated.program(*args).emitted()
    return Counter(kind for kind, *_ in parity.collectives(closed.jaxpr))


def prefer(monkeypatch: pytest.MonkeyPatch, way: int) -> None:
    """Heads cost so much each."""
    price = lambda placed, *_, **__: way * sum(one.name == heads.NAME for one in placed.strategies)
    monkeypatch.setattr(options, "cost", price)


@pytest.mark.parametrize(
    ("attention", "keys", "layers", "mesh"),
    [
        (einsum, 8, 0, {"sequence": 4}),
        (einsum, 8, 3, {"data": 2, "sequence": 2}),
        (grouped, 4, 0, {"sequence": 2, "model": 2}),
    ],
)
def test_as_on_one_device(
    attention: Any, keys: int, layers: int, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, -1)
    step, args = step_of(attention, bool(layers)), arguments(keys=keys, layers=layers)
    assert sent(step, args, mesh)["all-to-all"]
    got = jaxdist.parallel(step, mesh=meshes.mesh(mesh), donate=False)(*args)
    parity.compare(jaxdist.unshard(got), jax.jit(step)(*args))


def test_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, values and what is made of them change places, and so do their gradients."""
    step, args = step_of(einsum), arguments()
    prefer(monkeypatch, -1)
    found = sent(step, args, {"sequence": 4})
    assert found["all-to-all"] == 8
    assert not found["all-gather"] + found["reduce-scatter"]
    prefer(monkeypatch, 1)
    found = sent(step, args, {"sequence": 4})
    assert found["all-gather"] == 2
    assert not found["all-to-all"]


def test_heads_that_the_devices_do_not_divide_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, -1)
    step, args = step_of(einsum), (arguments(count=6, keys=6)[0], array(3, PLACES, WIDTH))
    assert not sent(step, args, {"sequence": 4})["all-to-all"]


def test_what_takes_less_time_is_taken() -> None:
    """Few messages for a short sequence, few bytes for a long one; and what the other would cost is said."""
    step = step_of(einsum)
    short, long = arguments(), (arguments()[0], jnp.zeros((2, 4096, WIDTH), "f"))
    assert not sent(step, short, {"sequence": 8})["all-to-all"]
    assert sent(step, long, {"sequence": 8})["all-to-all"] == 8
    for args, text in ((short, f"as usual; if {heads.NAME}: +"), (long, f"{heads.NAME}; otherwise: +")):
        decorated = jaxdist.parallel(step, mesh=meshes.mesh({"sequence": 8}), donate=False)
        assert text in str(jaxdist.explain(decorated, *args))
