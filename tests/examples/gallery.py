"""Some steps of each example of the gallery in float64, under a decorator: losses and final state.

`python gallery.py LEVEL EXPECTED.pickle NAME… 'SCRIPT ARGUMENT…'…` is one rank of a job over MPI, which compares the
steps of these names with one device, and then runs these scripts.
"""

import contextlib
import functools
import importlib
import io
import pickle
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import cnn  # pyright: ignore[reportMissingImports]
import contrastive  # pyright: ignore[reportMissingImports]
import digits  # pyright: ignore[reportMissingImports]
import dpsgd  # pyright: ignore[reportMissingImports]
import experts  # pyright: ignore[reportMissingImports]
import gpt  # pyright: ignore[reportMissingImports]
import ppo  # pyright: ignore[reportMissingImports]
import vae  # pyright: ignore[reportMissingImports]

Decorate = Callable[..., Any]  # of a step, the decorator of its library, and settings of `data_parallel`
Part = Callable[[Any], Any]  # a process's part of a batch

SIZE = 26  # examples in a batch: 4 devices do not divide them


all_scans = functools.cache(digits._load_scans)


def few_scans() -> list[tuple[np.ndarray, np.ndarray]]:
    """In place of `digits._load_scans`: enough for some steps."""
    return [(image[:count], label[:count]) for (image, label), count in zip(all_scans(), (320, 60), strict=True)]


def wide(tree: Any) -> Any:
    """In float64."""
    is_single = lambda x: getattr(x, "dtype", None) == np.float32
    return jax.tree.map(lambda x: x.astype(np.float64) if is_single(x) else x, tree)


def batches(count: int = 3) -> Iterator[dict[str, Any]]:
    train = digits.load(None)[0]
    for i in range(0, count * SIZE, SIZE):
        yield wide({"image": train.image_NxHxWxC[i : i + SIZE], "label": train.label_N[i : i + SIZE]})


def adam(level: int) -> optax.GradientTransformation:
    """With an epsilon that lets no parameter without a gradient follow rounding."""
    return jaxdist.zero(optax.adam(1e-2, eps=1e-3), level)  # type: ignore[arg-type]


def linen(module: Any, model: Any, inputs: Any, level: int, kind: str = "State", **more: Any) -> Any:
    """The state of a model of flax linen."""
    params = wide(model.init(jax.random.key(0), inputs))
    return getattr(module, kind).create(apply_fn=model.apply, params=params, tx=adam(level), **more)


def steps(train: Any, state: Any, each: Iterable[Any]) -> tuple[Any, list[Any]]:
    """The last state, and what the steps return beside it."""
    found = []
    for batch in each:
        state, metrics = train(state, batch)
        found.append(metrics)
    return state, found


def of_cnn(decorate: Decorate, part: Part, level: int) -> Any:
    model = cnn.CNN(nnx.Rngs(0))
    nnx.update(model, wide(nnx.state(model)))
    optimizer = nnx.Optimizer(model, adam(level), wrt=nnx.Param)
    train, evaluate = decorate(cnn.train_step, nnx.jit), decorate(cnn.eval_step, nnx.jit)
    losses = [train(model, optimizer, part(batch)) for batch in batches()]
    accuracy = nnx.metrics.Accuracy()
    model.eval()
    evaluate(model, accuracy, part({**next(batches()), "real": np.arange(SIZE) < SIZE - 3}))
    return losses, nnx.state(model, nnx.Not(nnx.RngKey)), accuracy.compute()


def of_contrastive(decorate: Decorate, part: Part, level: int) -> Any:
    state = linen(contrastive, contrastive.Encoder(), next(batches())["image"], level, key=jax.random.key(1))
    train, evaluate = decorate(contrastive.train_step, jax.jit), decorate(contrastive.eval_step, jax.jit)
    state, found = steps(train, state, (part(batch["image"]) for batch in batches()))
    right = evaluate(state, part({**next(batches()), "real": np.arange(SIZE) < SIZE - 3}))
    return found, state.params, right


def of_vae(decorate: Decorate, part: Part, level: int) -> Any:
    tx = adam(level)
    model = wide(vae.VAE(28 * 28, 4, jax.random.key(0)))
    opt_state = tx.init(eqx.filter(model, eqx.is_array))
    train, evaluate = decorate(vae.make_train_step(tx), eqx.filter_jit), decorate(vae.eval_step, eqx.filter_jit)
    losses = []
    for i, batch in enumerate(batches()):
        image_BxP = batch["image"].reshape(SIZE, -1)
        model, opt_state, loss = train(model, opt_state, part(image_BxP), jax.random.key(i))
        losses.append(loss)
    last = part({"image": next(batches())["image"].reshape(SIZE, -1), "real": np.arange(SIZE) < SIZE - 3})
    return losses, eqx.filter(model, eqx.is_array), evaluate(model, last, jax.random.key(9))


def of_dpsgd(decorate: Decorate, part: Part, level: int) -> Any:
    state = linen(dpsgd, dpsgd.Classifier(), next(batches())["image"], level, key=jax.random.key(1))
    state, losses = steps(decorate(dpsgd.make_train_step(0.5, 1.0), jax.jit), state, map(part, batches()))
    return losses, state.params


def of_experts(decorate: Decorate, part: Part, level: int) -> Any:
    state = linen(experts, experts.Classifier(), next(batches())["image"], level, "TrainState")
    train, evaluate = decorate(experts.train_step, jax.jit), decorate(experts.eval_step, jax.jit)
    state, found = steps(train, state, map(part, batches()))
    return found, state.params, evaluate(state, part(next(batches())))


def attention(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """`jax.nn.dot_product_attention`, which computes its softmax in float32 whatever it is given."""
    assert is_causal
    logits = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    past = np.tril(np.ones(logits.shape[-2:], bool))
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(past, logits, -1e30)), v)


def of_gpt(decorate: Decorate, part: Part, level: int) -> Any:
    model = gpt.GPT(layers=2, heads=2, width=32, context=16, dtype=np.float64, dropout=0.2)  # type: ignore[arg-type]
    state = gpt.make_state(model, gpt.make_optimizer(1e-2, 14, False, level), 0)
    train, evaluate = decorate(gpt.make_train_step(1), jax.jit), decorate(gpt.held_out_loss, jax.jit)
    text = gpt.windows(np.frombuffer(Path(__file__).read_bytes(), np.uint8), 16)
    with mock.patch.object(jax.nn, "dot_product_attention", attention):
        state, found = steps(train, state, (part(text[i * SIZE : (i + 1) * SIZE]) for i in range(3)))
        return found, state.params, evaluate(state, part(text[-SIZE:]))


def of_ppo(decorate: Decorate, part: Part, level: int) -> Any:
    state = linen(ppo, ppo.Agent(), np.zeros((1, 4)), level, "TrainState")
    env = part(jax.vmap(ppo.reset)(jax.random.split(jax.random.key(1), SIZE)))
    train = decorate(ppo.train_step, jax.jit, batch_argnums="env")
    found = []
    for i in range(3):
        state, env, metrics = train(state, env, jax.random.key(i))
        found.append(metrics)
    return found, state.params, env


CASES = {name.removeprefix("of_"): case for name, case in list(globals().items()) if name.startswith("of_")}


@functools.cache
def on_one_device(name: str) -> Any:
    """Under the decorator of its library; computed once."""
    return CASES[name](lambda step, jit, **_: jit(step), lambda batch: batch, 0)


def compare(got: Any, want: Any, what: str) -> None:
    """Leaf by leaf, in float64; those of `nnx.metrics` have float32 alone."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(jaxdist.unshard(got)), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 if b.dtype == np.float32 else 1e-10, err_msg=what)


def script(name: str, *arguments: object) -> tuple[str, str]:
    """What `python NAME.py ARGUMENT…` prints, and what it logs."""
    with (
        mock.patch.object(sys, "argv", [f"{name}.py", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as log,
    ):
        importlib.import_module(name).main()
    return out.getvalue(), log.getvalue()


def main(level: int, expected: str, *words: str) -> None:
    """One rank."""
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator="mpi")
    share = SIZE // ctx.size
    part: Part = lambda batch: jax.tree.map(lambda x: x[ctx.rank * share : (ctx.rank + 1) * share], batch)
    ppo.STEPS = 6
    digits._load_scans = few_scans
    wanted = pickle.loads(Path(expected).read_bytes())
    for word in words:
        name, *arguments = shlex.split(word)
        if arguments:
            sys.argv = [f"{name}.py", *arguments]
            importlib.import_module(name).main()
            continue
        got = CASES[name](lambda step, _, **settings: jaxdist.data_parallel(step, **settings), part, level)
        compare(jax.tree.leaves(got), wanted[name], name)
        print(f"SAME {name}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
