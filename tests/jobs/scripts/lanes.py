"""SHA-256 of what steps return in lanes: the same on any number of processes."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from harness import oracle
from harness.check import on_host, train_step

import jaxdist

ctx = jaxdist.get_context()
WIDTH = 600  # of products that Eigen may divide among threads, one of them along its inner dimension


def bits(words: list[str], rows: int, steps: int) -> dict[str, str]:
    """Cases, each ``NAME:LEVEL``, or ``NAME:LEVEL:MODEL:inner`` (or ``outer``) over a model axis of so many lanes."""
    found = {}
    for word in words:
        name, level, *model = word.split(":")
        mesh = {"data": -1, "model": int(model[0])} if model else {"data": -1}
        if model and model[1] == "outer":  # then ranks pass parts of which others pass some
            mesh = {"model": int(model[0]), "data": -1}
        if name == "padded":
            found[word] = padded(int(level))
            continue
        case = OWN[name](int(level)) if name in OWN else oracle.idiom(name, rows, int(level))
        got = oracle.run_decorated(case, steps, rows, with_=jaxdist.parallel, mesh=mesh)
        found[word] = digest(got)
    return found


def digest(tree: Any) -> str:
    """Of all bytes of a result."""
    return hashlib.sha256(b"".join(x.tobytes() for x in on_host(tree))).hexdigest()[:16]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def case(name: str, loss: Any, w: Any, tx: Any, *batch: int) -> oracle.Case:
    return oracle.Case(name, train_step(loss, tx), (w, tx.init(w)), lambda i: normal(*batch, seed=i))


def wide(level: int) -> oracle.Case:
    """Layers wider than the batch, a gradient of which the inner dimension is long, and sums of tall columns.

    Bits of the latter depend on the number of threads, on jax 0.10.
    """

    def loss(w: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.repeat(x, 40, 0) @ w["w0"]) @ w["w1"]
        tall = jnp.repeat(x, 840, 0) @ w["w0"][:, :37]
        return jnp.mean(h**2) + jnp.mean(jax.nn.logsumexp(h, axis=1)) + jnp.mean(tall.mean(0) ** 2)

    w = {f"w{i}": normal(WIDTH, WIDTH, seed=i) / 25 for i in range(2)}
    tx = optax.chain(optax.clip_by_global_norm(0.5), jaxdist.zero(optax.adamw(1e-3), level))  # type: ignore[arg-type]
    return case("wide", loss, w, tx, 96, WIDTH)


def matrices(level: int) -> oracle.Case:
    """Muon, whose matrices are worked on by one lane each."""
    w = {f"w{i}": normal(40, 56, seed=i) for i in range(3)}
    tx = jaxdist.zero(optax.contrib.muon(1e-2), level, split="owners")  # type: ignore[arg-type]
    return case("matrices", lambda w, x: jnp.mean(sum(jnp.tanh(x @ one) for one in w.values()) ** 2), w, tx, 96, 40)


def whole(level: int) -> oracle.Case:
    """A step that has no meaning for the examples of one process, with one argument beside them."""

    def step(w: Any, x: Any) -> Any:
        turn = lambda w, x: (w - 0.1 * jnp.tanh(x @ w).mean() * x.mean(0), None)
        return jax.lax.scan(turn, w, x.reshape(8, 3, 5))[0], jnp.max(x @ w)

    return oracle.Case("whole", step, (normal(5),), lambda i: normal(24, 5, seed=i))


def groups(level: int) -> oracle.Case:
    """Sums over all lanes, and over groups of them."""

    def each(x: Any) -> Any:
        sides = [[0, 2], [1, 3]], [[3, 0], [2, 1]]
        return [jax.lax.psum(x.sum(0), "data"), *(jaxdist.allreduce(x.sum(0), groups=one)[None] for one in sides)]

    run = jaxdist.per_device(each, in_specs=jax.P("data"), out_specs=[jax.P(), jax.P("data"), jax.P("data")])
    return oracle.Case(
        "groups", lambda w, x: (w + x.mean(0), run(jnp.tanh(x))), (normal(5),), lambda i: normal(24, 5, seed=i)
    )


def padded(level: int) -> str:
    """Epochs of a loader whose last batch is smaller, and a gather of what its steps return for each example."""
    given = wide(level)
    step, (w, opt) = jaxdist.data_parallel(given.step), given.state
    found, rows, size = [], given.batch(0)[:22], 8
    for batch in jaxdist.loader(rows, size, seed=3, tail="keep"):
        w, opt, loss = step(w, opt, batch)
        found.append(loss)
    each = jaxdist.data_parallel(lambda w, x: (jnp.tanh(x @ w["w0"]).sum(1), x), batch_argnums=1)
    found += [jaxdist.data.gather_for_metrics(each(w, batch)) for batch in jaxdist.loader(rows, size, tail="keep")]
    jaxdist.check_sync((w, opt))
    return digest((jaxdist.unshard((w, opt)), found))


def _oracle(name: str) -> Callable[[int], oracle.Case]:
    return lambda level: oracle.case(name, level)


OWN: dict[str, Callable[[int], oracle.Case]] = {
    "wide": wide, "matrices": matrices, "whole": whole, "groups": groups,
    **{name: _oracle(name) for name in oracle.CASES},
}  # fmt: skip
