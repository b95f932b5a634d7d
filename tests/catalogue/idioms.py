"""A catalogue of ordinary train steps, each written for one device.

Most couple the examples of a batch, or use an operation that seldom occurs. A test runs each as it is on one device and
decorated on several, and compares. Models are small, everything is float64 and well conditioned: rounding of the batch
doesn't grow, and no decision (an argmax, a sort, a threshold) is near a tie.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]
Step = Callable[..., tuple[Any, ...]]
Idiom = Callable[[Wrap], tuple[Step, tuple[Any, ...]]]

IDIOMS: dict[str, Idiom] = {}
"""Name to a function of `wrap`, which is applied to each optimizer, giving a step ``(*state, batch) -> (*state, aux)``
and its initial state."""
DIVISIBLE = {"ppo_shuffled_minibatches", "gradient_accumulation"}
"""Those that only work for batches of a multiple of 4 examples."""
CLASSES, VOCAB, ACTIONS, TIME = 4, 16, 3, 7


def idiom(make: Idiom) -> Idiom:
    """Enter a function in the catalogue under its name; its state may be of numpy."""
    name = make.__name__  # type: ignore[attr-defined]

    def on_device(wrap: Wrap) -> tuple[Step, tuple[Any, ...]]:
        step, state = make(wrap)
        return step, jax.tree.map(jnp.asarray, state)

    assert name not in IDIOMS
    IDIOMS[name] = on_device
    return make


def fitted(tx: optax.GradientTransformation, params: Any) -> Callable[[Any], Any]:
    """Enter a loss, ``(params, batch) -> (loss, aux)`` or ``(params, key, batch) -> (loss, aux)``, in the catalogue.

    The step's state is the parameters, the optimizer's state and, where the loss takes one, a key.
    """

    def enter(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loss_fn)
        def make(wrap: Wrap) -> Any:
            wrapped = wrap(tx)

            def step(params: Any, opt: Any, batch: Any) -> Any:
                (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
                return *_updated(wrapped, grads, params, opt), {"loss": loss, **aux}

            def keyed(params: Any, opt: Any, key: Any, batch: Any) -> Any:
                key, now = jax.random.split(key)
                (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, now, batch)
                return *_updated(wrapped, grads, params, opt), key, {"loss": loss, **aux}

            if "key" in inspect.signature(loss_fn).parameters:
                return keyed, (params, wrapped.init(params), jax.random.key(7))
            return step, (params, wrapped.init(params))

        idiom(make)
        return loss_fn

    return enter


def _updated(tx: optax.GradientTransformation, grads: Any, params: Any, opt: Any) -> tuple[Any, Any]:
    """The new parameters and the optimizer's new state."""
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def batch(i: int, size: int) -> dict[str, np.ndarray]:
    """Batch `i` of `size` examples, with what any idiom reads; examples late in it are larger, and less masked."""
    rng = np.random.default_rng([i, size])
    ramp = np.linspace(0.0, 1.0, size)
    x = rng.normal(size=(size, 6)) * (0.7 + 0.6 * ramp[:, None])
    scale = np.exp(2 * ramp - 1 + 0.1 * i)[:, None]
    mask = (rng.uniform(size=size) < 0.1 + ramp).astype(np.float64)
    mask[0], mask[-2:] = 0.0, 1.0
    return {
        "x": x,
        "x2": x + 0.3 * rng.normal(size=x.shape),
        "y": scale * (np.sin(x[:, :1] + x[:, 1:2]) + 0.2 * rng.normal(size=(size, 1))),
        "label": rng.choice(CLASSES, size=size, p=[0.4, 0.3, 0.2, 0.1]).astype(np.int32),
        "image": rng.normal(size=(size, 8, 8, 2)) * (0.6 + 0.8 * ramp[:, None, None, None]),
        "tokens": rng.integers(0, VOCAB, size=(size, TIME)).astype(np.int32),
        "length": rng.integers(1, TIME + 1, size=size).astype(np.int32),
        "series": np.cumsum(rng.normal(size=(size, 5, 3)) * 0.6, axis=1),
        "mask": mask,
        "group": (rng.uniform(size=size) < 0.2 + 0.6 * ramp).astype(np.int32),
        "neighbour": rng.integers(0, size, size=(size, 2)).astype(np.int32),
        "action": rng.integers(0, ACTIONS, size=size).astype(np.int32),
        "reward": rng.normal(size=size) + np.tanh(x[:, 2]),
        "rewards": rng.normal(size=(size, 5)) + ramp[:, None],
        "done": rng.uniform(size=size) < 0.2,
        "logp": -1.1 + 0.1 * rng.normal(size=size),
        "advantage": rng.normal(size=size) * scale[:, 0] + 0.5,
        "seed": rng.integers(0, 2**31, size=size).astype(np.uint32),
        "id": (i * size + np.arange(size)).astype(np.int32),
    }


def _params(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Float64 arrays of the shapes, of numpy: matrices and kernels scaled by their inputs; small vectors."""
    rng = np.random.default_rng(seed)
    fan = lambda shape: int(np.prod(shape[:-1])) if len(shape) > 1 else 25
    return {name: rng.normal(size=shape) / np.sqrt(fan(shape)) for name, shape in shapes.items()}


def _mlp_params(seed: int, inputs: int = 6, hidden: int = 8, outputs: int = 1, bias: bool = True) -> dict[str, Any]:
    shapes = {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, outputs)}
    return _params(seed, **shapes, **({"b2": (outputs,)} if bias else {}))


def _mlp(p: Any, x: Any) -> Any:
    out = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]
    return out + p["b2"] if "b2" in p else out


def _unit(x: Any) -> Any:
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


ADAM = optax.adam(2e-2, eps=1e-2)
SGD = optax.sgd(2e-2, momentum=0.9)
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(2e-2, eps=1e-2))


def _axpy(scale: Any, x: Any, y: Any) -> Any:
    """``scale * x + y``, leaf by leaf."""
    return jax.tree.map(lambda a, b: scale * a + b, x, y)


_xent = optax.softmax_cross_entropy_with_integer_labels


@idiom
def cnn_batchnorm(wrap: Wrap) -> Any:
    """Convolution, batch norm with running statistics, max pooling; the statistics are state."""
    tx = wrap(ADAM)
    params = {**_params(1, conv=(3, 3, 2, 6), shift=(6,), head=(6, CLASSES), out=(CLASSES,)), "scale": jnp.ones(6)}

    def loss_fn(p: Any, stats: Any, batch: Any) -> Any:
        h = lax.conv_general_dilated(
            batch["image"], p["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, var = h.mean(axis=(0, 1, 2)), h.var(axis=(0, 1, 2))
        stats = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        h = jax.nn.relu((h - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["shift"])
        h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = h.mean(axis=(1, 2)) @ p["head"] + p["out"]
        return _xent(logits, batch["label"]).mean(), (stats, logits)

    def step(params: Any, opt: Any, stats: Any, batch: Any) -> Any:
        (loss, (stats, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, batch)
        accuracy = jnp.mean(logits.argmax(axis=-1) == batch["label"])
        return *_updated(tx, grads, params, opt), stats, {"loss": loss, "accuracy": accuracy}

    return step, (params, tx.init(params), {"mean": jnp.zeros(6), "var": jnp.ones(6)})


@idiom
def flax_batchnorm_dropout(wrap: Wrap) -> Any:
    """A flax module with BatchNorm, whose statistics are a mutable collection, and Dropout."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.Dense(8, use_bias=False, param_dtype=jnp.float64)(x)
            h = nn.BatchNorm(use_running_average=False, momentum=0.9, param_dtype=jnp.float64)(h)
            h = nn.Dropout(0.2, deterministic=False)(jnp.tanh(h))
            return nn.Dense(1, param_dtype=jnp.float64)(h)

    tx, net = wrap(ADAMW), Net()
    rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = net.init(rngs, jnp.zeros((2, 6)))
    params = variables["params"]
    stats = jax.tree.map(lambda x: x.astype(jnp.float64), variables["batch_stats"])

    def step(params: Any, opt: Any, stats: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)

        def loss_fn(p: Any) -> Any:
            out, updated = net.apply(
                {"params": p, "batch_stats": stats}, batch["x"], rngs={"dropout": now}, mutable=["batch_stats"]
            )
            return jnp.mean((out - batch["y"]) ** 2), updated["batch_stats"]

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return *_updated(tx, grads, params, opt), new_stats, key, loss

    return step, (params, tx.init(params), stats, jax.random.key(3))


@fitted(ADAM, _mlp_params(5))
def per_example_seeds(p: Any, batch: Any) -> Any:
    """The batch brings seeds, from which each example has a key of its own."""
    noise = jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (6,)))(batch["seed"])
    return jnp.mean((_mlp(p, batch["x"] + 0.2 * noise) - batch["y"]) ** 2), {"noise": noise[:, 0]}


@fitted(ADAMW, _mlp_params(7))
def mixup_permutation(p: Any, key: Any, batch: Any) -> Any:
    """Mixup with a random permutation, and a weight for each example."""
    first, second = jax.random.split(key)
    size = batch["x"].shape[0]
    order = jax.random.permutation(first, size)
    mix = jax.random.uniform(second, (size, 1))
    x = mix * batch["x"] + (1 - mix) * batch["x"][order]
    y = mix * batch["y"] + (1 - mix) * jnp.take(batch["y"], order, axis=0)
    return jnp.mean((_mlp(p, x) - y) ** 2), {"order": order}


def _layer_norm(x: Any, scale: Any) -> Any:
    return (x - x.mean(axis=-1, keepdims=True)) * lax.rsqrt(x.var(axis=-1, keepdims=True) + 1e-3) * (1 + scale)


def _attention(p: Any, x: Any, mask: Any, keep: Any = 1.0) -> Any:
    """Two heads of self-attention; `keep` multiplies the attention weights."""
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(*x.shape[:2], 3, 2, 4), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / 2
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)) * keep
    return jnp.einsum("bhqs,bshk->bqhk", weights, v).reshape(x.shape) @ p["join"]


def _block(p: Any, x: Any, mask: Any, keep: Any = 1.0) -> Any:
    x = x + _attention(p, _layer_norm(x, p["norm1"]), mask, keep)
    return x + jax.nn.relu(_layer_norm(x, p["norm2"]) @ p["wide"]) @ p["narrow"]


def _blocks(seed: int, *layers: int) -> dict[str, Any]:
    shapes = {"qkv": (8, 24), "join": (8, 8), "norm1": (8,), "norm2": (8,), "wide": (8, 12), "narrow": (12, 8)}
    params = _params(seed, **{name: (*layers, *shape) for name, shape in shapes.items()})
    return {name: 0.8 * value for name, value in params.items()}


_CAUSAL = np.tril(np.ones((TIME - 1, TIME - 1), bool))


@fitted(
    ADAMW,
    {
        **_params(20, embedding=(VOCAB, 8), position=(TIME - 1, 8), head=(8, VOCAB)),
        "layers": [_blocks(21), _blocks(22)],
    },
)
def transformer(p: Any, batch: Any) -> Any:
    """Two layers one after the other, next-token loss of every position."""
    tokens = batch["tokens"]
    h = p["embedding"][tokens[:, :-1]] * 2 + p["position"]
    for layer in p["layers"]:
        h = _block(layer, h, _CAUSAL)
    losses = _xent(h @ p["head"], tokens[:, 1:])
    return losses.mean(), {"perplexity": jnp.exp(losses.mean()), "by_position": losses.mean(axis=0)}


@fitted(ADAM, {**_params(23, embedding=(VOCAB, 8), position=(TIME - 1, 8)), "layers": _blocks(24, 2)})
def transformer_scanned(p: Any, key: Any, batch: Any) -> Any:
    """Layers by lax.scan, rematerialised, with attention dropout; the embedding is also the output layer."""
    tokens = batch["tokens"]
    h = p["embedding"][tokens[:, :-1]] * 2 + p["position"]

    @jax.checkpoint
    def layer(h: Any, params_and_key: Any) -> Any:
        params, key = params_and_key
        keep = jax.random.bernoulli(key, 0.8, (h.shape[0], 2, TIME - 1, TIME - 1)) / 0.8
        return _block(params, h, _CAUSAL, keep), None

    h, _ = lax.scan(layer, h, (p["layers"], jax.random.split(key, 2)))
    return _xent(h @ p["embedding"].T, tokens[:, 1:]).mean(), {}


@fitted(SGD, _params(29, embedding=(VOCAB, 5), x=(5, 18), h=(6, 18), out=(6, CLASSES)))
def gru_lengths(p: Any, batch: Any) -> Any:
    """A GRU over tokens, frozen after each row's length; the first example's last state goes out."""

    def cell(h: Any, time_and_token: Any) -> Any:
        time, token = time_and_token
        xr, xz, xn = jnp.split(p["embedding"][token] @ p["x"], 3, axis=-1)
        hr, hz, hn = jnp.split(h @ p["h"], 3, axis=-1)
        z = jax.nn.sigmoid(xz + hz)
        new = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h
        return jnp.where((time < batch["length"])[:, None], new, h), None

    h = jnp.zeros((batch["tokens"].shape[0], 6))
    h, _ = lax.scan(cell, h, (jnp.arange(TIME), batch["tokens"].T))
    return _xent(h @ p["out"], batch["label"]).mean(), {"first": h[0], "longest": batch["length"].max()}


@fitted(ADAM, {"user": _mlp_params(35, outputs=5), "item": _params(36, table=(VOCAB, 5))["table"]})
def in_batch_softmax(p: Any, batch: Any) -> Any:
    """Two towers; the other rows' items are the negatives, corrected for how often each occurs in the batch."""
    item = batch["tokens"][:, 0]
    same = item[:, None] == item
    logits = _mlp(p["user"], batch["x"]) @ p["item"][item].T - jnp.log(same.mean(axis=1))
    logits = jnp.where(same & ~jnp.eye(item.size, dtype=bool), -1e9, logits)
    rank = jnp.sum(logits > jnp.diag(logits)[:, None], axis=1)
    return _xent(logits, jnp.arange(item.size)).mean(), {"rank": rank, "mrr": jnp.mean(1 / (1 + rank))}


@fitted(ADAM, {name: _mlp_params(k, outputs=5, bias=False) for k, name in [(40, "query"), (41, "key")]})
def infonce(p: Any, batch: Any) -> Any:
    """Every other example's second view is a negative."""
    logits = _unit(_mlp(p["query"], batch["x"])) @ _unit(_mlp(p["key"], batch["x2"])).T / 0.3
    right = jnp.arange(logits.shape[0])
    return _xent(logits, right).mean(), {"accuracy": jnp.mean(logits.argmax(axis=1) == right, dtype=jnp.float64)}


@fitted(ADAM, _mlp_params(47, outputs=5, bias=False))
def vicreg(p: Any, batch: Any) -> Any:
    """Variance, invariance and covariance of two views."""
    a, b = _mlp(p, batch["x"]), _mlp(p, batch["x2"])
    spread = covariance = 0.0
    for z in (a, b):
        z = z - z.mean(axis=0)
        spread += jnp.mean(jax.nn.relu(2.0 - jnp.sqrt(z.var(axis=0) + 1e-4)))
        cov = z.T @ z / (z.shape[0] - 1)
        covariance += jnp.sum((cov - jnp.diag(jnp.diag(cov))) ** 2) / z.shape[1]
    invariance = jnp.mean((a - b) ** 2)
    return invariance + spread + 0.1 * covariance, {"parts": (invariance, spread, covariance)}


@fitted(SGD, _mlp_params(52, bias=False))
def pairwise_ranking(p: Any, batch: Any) -> Any:
    """Every pair of examples of different rewards."""
    scores = _mlp(p, batch["x"])[:, 0]
    better = batch["reward"][:, None] > batch["reward"]
    margin = scores[:, None] - scores
    loss = jnp.sum(jax.nn.softplus(-margin) * better) / jnp.sum(better)
    return loss, {"auc": jnp.sum((margin > 0) & better) / jnp.sum(better)}


@fitted(ADAM, _mlp_params(51, bias=False))
def listwise_ranking(p: Any, batch: Any) -> Any:
    """The likelihood of the batch's order by reward: argsort, then a cumulative logsumexp."""
    order = jnp.argsort(-batch["reward"])
    scores = _mlp(p, batch["x"])[order, 0]
    below = lax.cumlogsumexp(scores, reverse=True)
    return jnp.mean(below - scores), {"order": order}


@fitted(SGD, _mlp_params(42, outputs=6, bias=False))
def simclr(p: Any, batch: Any) -> Any:
    """Both views in one batch of twice the size, each example's similarity to itself masked."""
    z = _unit(_mlp(p, jnp.concatenate([batch["x"], batch["x2"]])))
    size = batch["x"].shape[0]
    logits = jnp.where(jnp.eye(2 * size, dtype=bool), -1e9, z @ z.T / 0.4)
    return _xent(logits, (jnp.arange(2 * size) + size) % (2 * size)).mean(), {"first": logits[0, 1:3]}


@fitted(ADAM, _mlp_params(50, outputs=CLASSES))
def topk_hard_mining(p: Any, batch: Any) -> Any:
    """Only the third of the examples with the largest losses counts."""
    losses = _xent(_mlp(p, batch["x"]), batch["label"])
    hardest, which = lax.top_k(losses, losses.size // 3)
    return hardest.mean(), {"which": which}


@idiom
def moco_queue(wrap: Wrap) -> Any:
    """Keys of a slow encoder go into a queue that is state; the oldest fall out."""
    tx, fast = wrap(ADAM), _mlp_params(55, outputs=5, bias=False)
    queue = _unit(_params(56, queue=(40, 5))["queue"])

    def step(fast: Any, opt: Any, slow: Any, queue: Any, batch: Any) -> Any:
        slow = _axpy(0.9, slow, jax.tree.map(lambda x: 0.1 * x, fast))
        keys = _unit(_mlp(slow, batch["x2"]))

        def loss_fn(p: Any) -> Any:
            z = _unit(_mlp(p, batch["x"]))
            logits = jnp.concatenate([jnp.sum(z * keys, axis=1, keepdims=True), z @ queue.T], axis=1)
            return -jax.nn.log_softmax(logits / 0.3)[:, 0].mean()

        loss, grads = jax.value_and_grad(loss_fn)(fast)
        queue = jnp.concatenate([keys, queue])[: queue.shape[0]]
        return *_updated(tx, grads, fast, opt), slow, queue, loss

    return step, (fast, tx.init(fast), _mlp_params(57, outputs=5, bias=False), queue)


@idiom
def ppo_shuffled_minibatches(wrap: Wrap) -> Any:
    """Two epochs of shuffled minibatches of the batch, each an update of the optimizer, in nested lax.scan."""
    tx, params = wrap(ADAM), _mlp_params(72, outputs=ACTIONS)

    def step(params: Any, opt: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        size = batch["x"].shape[0]

        def loss_fn(p: Any, part: Any) -> Any:
            advantage = part["advantage"] / (part["advantage"].std() + 1e-3)
            logp = jax.nn.log_softmax(_mlp(p, part["x"]))[jnp.arange(size // 4), part["action"]]
            return -jnp.mean(jnp.exp(logp - part["logp"]) * advantage)

        def minibatch(carry: Any, part: Any) -> Any:
            params, opt = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, part)
            return _updated(tx, grads, params, opt), loss

        def epoch(carry: Any, key: Any) -> Any:
            order = jax.random.permutation(key, size).reshape(4, -1)
            parts = {name: batch[name][order] for name in ("x", "action", "advantage", "logp")}
            return lax.scan(minibatch, carry, parts)

        (params, opt), losses = lax.scan(epoch, (params, opt), jax.random.split(now, 2))
        return params, opt, key, losses

    return step, (params, tx.init(params), jax.random.key(9))


@idiom
def gan_concatenated(wrap: Wrap) -> Any:
    """Real and fake examples in one batch for the discriminator, which also sees the batch's spread."""
    g_tx, d_tx = wrap(ADAM), wrap(SGD)
    g, d = _mlp_params(100, inputs=4, outputs=6), _mlp_params(101, inputs=7)

    def judge(d: Any, x: Any) -> Any:
        halves = x.reshape(2, -1, 6)
        spread = jnp.sqrt(halves.var(axis=1) + 1e-3).mean(axis=1)
        spread = jnp.broadcast_to(spread[:, None, None], (*halves.shape[:2], 1))
        return _mlp(d, jnp.concatenate([halves, spread], axis=2)).reshape(-1)

    def step(g: Any, d: Any, opts: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        size = batch["x"].shape[0]
        noise = jax.random.normal(now, (size, 4))

        def d_loss(d: Any) -> Any:
            logits = judge(d, jnp.concatenate([batch["x"], _mlp(g, noise)]))
            targets = jnp.concatenate([jnp.ones(size), jnp.zeros(size)])
            return optax.sigmoid_binary_cross_entropy(logits, targets).mean(), logits[:size] > 0

        (loss, real), grads = jax.value_and_grad(d_loss, has_aux=True)(d)
        d, d_opt = _updated(d_tx, grads, d, opts[1])
        g_loss = lambda g: jax.nn.softplus(-judge(d, jnp.concatenate([batch["x"], _mlp(g, noise)]))[size:]).mean()
        fooled, grads = jax.value_and_grad(g_loss)(g)
        g, g_opt = _updated(g_tx, grads, g, opts[0])
        return g, d, (g_opt, d_opt), key, {"losses": [loss, fooled], "real": real}

    return step, (g, d, (g_tx.init(g), d_tx.init(d)), jax.random.key(13))


def _experts(seed: int) -> dict[str, Any]:
    return _params(seed, gate=(6, 4), wide=(4, 6, 5), narrow=(4, 5, 1))


@fitted(SGD, _experts(122))
def moe_expert_choice(p: Any, batch: Any) -> Any:
    """Each expert takes the examples it scores highest, by top_k over the batch."""
    x = batch["x"]
    scores = jax.nn.softmax(x @ p["gate"])
    gates, index = lax.top_k(scores.T, x.shape[0] // 2)
    out = jnp.einsum("ech,eho->eco", jnp.tanh(jnp.einsum("ecd,edh->ech", x[index], p["wide"])), p["narrow"])
    out = jnp.zeros((x.shape[0], 1)).at[index.reshape(-1)].add((gates[..., None] * out).reshape(-1, 1))
    return jnp.mean((out - batch["y"]) ** 2), {"taken": jnp.bincount(index.reshape(-1), length=x.shape[0])}


@fitted(SGD, _experts(123))
def moe_ragged(p: Any, batch: Any) -> Any:
    """Examples in the order of their experts, whose products take as many rows as there are."""
    x = batch["x"]
    chosen = jnp.argmax(x @ p["gate"], 1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=4).astype(jnp.int32)
    out = lax.ragged_dot(jnp.tanh(lax.ragged_dot(x[order], p["wide"], sizes)), p["narrow"], sizes)
    return jnp.mean((out - batch["y"][order]) ** 2), {"sizes": sizes}


def _clipped(grads: Any, limit: float) -> Any:
    """Gradients of one example, scaled to a norm of at most `limit`."""
    norm = optax.global_norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / norm), grads), norm


def _one_loss(p: Any, x: Any, y: Any) -> Any:
    return jnp.sum((_mlp(p, x) - y) ** 2)


@idiom
def private_map(wrap: Wrap) -> Any:
    """The same one example after the other, by lax.map."""
    tx, params = wrap(ADAM), _mlp_params(131)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        one = lambda example: _clipped(jax.grad(_one_loss)(params, *example), 1.5)
        grads, norms = lax.map(one, (batch["x"], batch["y"]))
        grads = jax.tree.map(lambda g: g.mean(axis=0), grads)
        return *_updated(tx, grads, params, opt), {"median": jnp.median(norms), "largest": norms.max()}

    return step, (params, tx.init(params))


@fitted(ADAM, _mlp_params(140))
def masked_mean(p: Any, batch: Any) -> Any:
    """The mean over the examples that a mask lets count, which are spread unevenly."""
    errors = jnp.sum((_mlp(p, batch["x"]) - batch["y"]) ** 2, axis=1)
    mask = batch["mask"]
    return jnp.sum(errors * mask) / jnp.sum(mask), {"count": mask.sum(), "worst": jnp.max(errors * mask)}


@fitted(ADAM, _mlp_params(142))
def quantile_clipping(p: Any, batch: Any) -> Any:
    """Losses clipped at a quantile of the batch; deviations measured by the median's."""
    error = (_mlp(p, batch["x"]) - batch["y"])[:, 0]
    spread = lax.stop_gradient(jnp.median(jnp.abs(error - jnp.median(error))))
    losses = optax.huber_loss(error / (spread + 0.1))
    limit = lax.stop_gradient(jnp.quantile(losses, 0.8))
    return jnp.minimum(losses, limit).mean(), {"limit": limit, "spread": spread}


@fitted(ADAM, {"net": _mlp_params(149, outputs=3, bias=False), "out": _params(150, w=(3, 1))["w"]})
def whitening_cholesky(p: Any, batch: Any) -> Any:
    """Features made uncorrelated over the batch by a triangular solve."""
    z = _mlp(p["net"], batch["x"])
    z = z - z.mean(axis=0)
    factor = jnp.linalg.cholesky(z.T @ z / z.shape[0] + 0.1 * jnp.eye(3))
    white = jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T
    return jnp.mean((white @ p["out"] - batch["y"]) ** 2), {"factor": factor}


@fitted(ADAM, _mlp_params(153))
def spearman_double_argsort(p: Any, batch: Any) -> Any:
    """Ranks by argsort of argsort: of targets as weights, of predictions for a rank correlation."""
    out, y = _mlp(p, batch["x"])[:, 0], batch["y"][:, 0]
    ranks = lambda v: jnp.argsort(jnp.argsort(v))
    a, b = ranks(out), ranks(y)
    spearman = 1 - 6 * jnp.sum((a - b) ** 2) / (a.size * (a.size**2 - 1))
    return jnp.mean((b + 1) / b.size * (out - y) ** 2), {"ranks": a, "spearman": spearman}


@fitted(ADAM, _params(161, own=(6, 8), near=(6, 8), far=(8, 8), head=(8, CLASSES)))
def graph_messages(p: Any, batch: Any) -> Any:
    """Examples are nodes: messages gathered from neighbours, then scattered back to them."""
    x, ends = batch["x"], batch["neighbour"]
    h = jnp.tanh(x @ p["own"] + x[ends].mean(axis=1) @ p["near"])
    degree = jnp.zeros(x.shape[0]).at[ends].add(1.0)
    got = jax.ops.segment_sum(jnp.repeat(h, 2, axis=0), ends.reshape(-1), x.shape[0])
    h = h + jnp.tanh(got @ p["far"] / jnp.sqrt(1 + degree)[:, None])
    pooled = jax.ops.segment_max(h, batch["group"], 2, indices_are_sorted=False)
    pooled = jnp.where(jnp.isfinite(pooled), pooled, 0.0)
    return _xent((h + pooled[batch["group"]]) @ p["head"], batch["label"]).mean(), {"degree": degree}


@idiom
def gradient_accumulation(wrap: Wrap) -> Any:
    """The step's own accumulation: lax.scan over quarters of the batch."""
    tx, params = wrap(ADAMW), _mlp_params(170)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        parts = {name: batch[name].reshape(4, -1, *batch[name].shape[1:]) for name in ("x", "y")}

        def one(total: Any, part: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, part["x"]) - part["y"]) ** 2))(params)
            return _axpy(0.25, grads, total), loss

        grads, losses = lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
        return *_updated(tx, grads, params, opt), {"losses": losses, "loss": losses.mean()}

    return step, (params, tx.init(params))


@fitted(SGD, _mlp_params(177, outputs=CLASSES))
def adversarial_examples(p: Any, key: Any, batch: Any) -> Any:
    """Projected steps up the loss by the batch itself, from a random start; clean and attacked losses."""
    x = batch["x"]
    attack_loss = lambda moved: _xent(_mlp(lax.stop_gradient(p), x + moved), batch["label"]).mean()

    def move(_: Any, moved: Any) -> Any:
        return jnp.clip(moved + 0.05 * jnp.sign(jax.grad(attack_loss)(moved)), -0.1, 0.1)

    moved = lax.fori_loop(0, 3, move, jax.random.uniform(key, x.shape, minval=-0.1, maxval=0.1))
    clean = _xent(_mlp(p, x), batch["label"]).mean()
    attacked = _xent(_mlp(p, x + moved), batch["label"]).mean()
    return (clean + attacked) / 2, {"clean": clean, "moved": moved}


@jax.custom_vjp
def _equilibrium(p: Any, x: Any) -> Any:
    return _equilibrium_forward(p, x)[0]


def _turn(p: Any, x: Any, z: Any) -> Any:
    return jnp.tanh(jnp.exp(-(x[:, :1] ** 2)) * z @ p["inner"] + x @ p["x"] + p["bias"])


def _equilibrium_forward(p: Any, x: Any) -> Any:
    apart = lambda both: jnp.max(jnp.abs(both[0] - both[1])) > 1e-3
    start = jnp.zeros((x.shape[0], 5))
    z, _ = lax.while_loop(apart, lambda both: (_turn(p, x, both[0]), both[0]), (_turn(p, x, start), start))
    return z, (p, x, z)


def _equilibrium_backward(kept: Any, g: Any) -> Any:
    p, x, z = kept
    pull = jax.vjp(lambda z: _turn(p, x, z), z)[1]
    u = lax.fori_loop(0, 15, lambda _, u: g + pull(u)[0], g)
    return jax.vjp(lambda p, x: _turn(p, x, z), p, x)[1](u)


_equilibrium.defvjp(_equilibrium_forward, _equilibrium_backward)


@fitted(ADAM, _params(181, inner=(5, 5), x=(6, 5), bias=(5,), out=(5, 1)))
def deep_equilibrium(p: Any, batch: Any) -> Any:
    """A fixed point by while_loop until the whole batch has settled, and its implicit derivative."""
    z = _equilibrium({name: p[name] for name in ("inner", "x", "bias")}, batch["x"])
    return jnp.mean((z @ p["out"] - batch["y"]) ** 2), {"z": z}


@fitted(ADAM, _params(183, real=(3, 3, 5), imaginary=(3, 3, 5), out=(5, 1)))
def fourier_layer(p: Any, batch: Any) -> Any:
    """Weights on the frequencies of each series, by the real Fourier transform."""
    spectrum = jnp.fft.rfft(batch["series"], axis=1)
    mixed = jnp.einsum("bfc,fch->bfh", spectrum, lax.complex(p["real"], p["imaginary"]))
    h = jnp.tanh(jnp.fft.irfft(mixed, n=5, axis=1))
    power = jnp.mean(jnp.abs(spectrum) ** 2, axis=(0, 2))
    return jnp.mean((h @ p["out"] - batch["rewards"][:, :, None]) ** 2), {"power": power, "spectrum": spectrum}


@fitted(ADAM, _params(184, low=(6, 2), high=(2, 6), ring=(6,), scale=(1, 6), rates=(2,), gains=(2, 3), table=(4, 1)))
def built_weights(p: Any, batch: Any) -> Any:
    """Weights made of smaller parameters: of low rank, circulant, scaled, a long kernel, a table of distances."""
    fixed, step = np.cos(np.arange(36.0)).reshape(6, 6), np.arange(6)
    ring = p["ring"][(step[:, None] - step) % 6]
    h = jnp.tanh(batch["x"] @ (fixed + p["low"] @ p["high"])) @ ring @ (fixed * p["scale"] / (1 + p["scale"] ** 2))
    kernel = jnp.exp(-np.arange(5.0)[:, None] * jax.nn.softplus(p["rates"])) @ p["gains"]
    mixed = jnp.fft.rfft(batch["series"], n=10, axis=1) * jnp.fft.rfft(kernel, n=10, axis=0)
    far = jnp.abs(step[:5, None] - step[:5]).clip(0, 3)
    table = p["table"].at[far[0]].add(0.1 * batch["x"].mean(0)[:5, None])
    near = jax.nn.softmax(jnp.einsum("btc,bsc->bts", batch["series"], batch["series"]) + table[far, 0])
    series = jnp.fft.irfft(mixed, n=10, axis=1)[:, :5] + near @ batch["series"]
    return jnp.mean((h - batch["y"]) ** 2) + jnp.mean((series.sum(-1) - batch["rewards"]) ** 2), {"near": near}


@fitted(ADAM, _params(185, map=(6, 3)))
def sinkhorn(p: Any, batch: Any) -> Any:
    """Optimal transport from examples to other examples, whose distances each iteration computes anew."""
    x, y = jnp.tanh(batch["x"] @ p["map"]), jnp.tanh(batch["x2"] @ p["map"])

    def iteration(f: Any, _: None) -> Any:
        cost = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
        g = -jax.nn.logsumexp(f[:, None] - cost, axis=0)
        return -jax.nn.logsumexp(g - cost, axis=1), None

    f, _ = lax.scan(iteration, jnp.zeros(len(x)), None, length=3)
    return jnp.mean(f), {"f": f}


@fitted(ADAM, jax.tree.map(lambda *leaves: np.stack(leaves), *[_mlp_params(186 + i) for i in range(3)]))
def ensemble(p: Any, key: Any, batch: Any) -> Any:
    """Members in a leading axis by vmap, each with a random choice of the examples; they disagree in the aux."""
    chosen = jax.random.bernoulli(key, 0.7, (3, batch["x"].shape[0], 1))
    out = jax.vmap(_mlp, in_axes=(0, None))(p, batch["x"])
    return jnp.mean(chosen * (out - batch["y"]) ** 2), {"spread": out.std(axis=0).mean(), "chosen": chosen.sum()}


@fitted(ADAM, _mlp_params(195, outputs=CLASSES))
def aux_of_all_kinds(p: Any, batch: Any) -> Any:
    """Floats, integers, booleans and counts of the batch, rows of it, and values that don't depend on it."""
    logits = _mlp(p, batch["x"])
    losses, guess = _xent(logits, batch["label"]), logits.argmax(axis=1)
    label = batch["label"]
    aux = {
        "losses": losses, "extremes": (losses.max(), losses.min(), losses.argmax()), "guess": guess.astype(jnp.uint8),
        "right": jnp.sum(guess == label), "all": jnp.all(guess == label), "any": jnp.any(losses > 2.5),
        "size": losses.size, "integers": [label.sum(), label.max(), batch["id"].min(), batch["tokens"].sum(axis=0)],
        "first": logits[0], "last": batch["tokens"][-1], "rows": losses[2:9:3], "product": jnp.prod(1 + 0.1 * losses),
        "spread": losses.std(), "by_feature": logits.T, "parameter": p["b1"].sum(), "constant": 3.5, "nothing": None,
    }  # fmt: skip
    return losses.mean(), aux


@fitted(SGD, _mlp_params(196))
def aux_in_order(p: Any, batch: Any) -> Any:
    """Sorted, cumulated, reversed and searched values of the batch."""
    out = _mlp(p, batch["x"])[:, 0]
    errors = (out - batch["y"][:, 0]) ** 2
    aux = {
        "sorted": jnp.sort(errors), "order": jnp.argsort(out), "sum_so_far": jnp.cumsum(errors),
        "most_so_far": lax.cummax(errors), "reversed": out[::-1], "pairs": jnp.outer(out, out)[:3],
        "labels": jnp.unique(batch["label"], size=CLASSES, fill_value=-1), "median": jnp.median(errors),
        "done": jnp.nonzero(batch["done"], size=4, fill_value=-1)[0], "long": jnp.stack([out, errors]).reshape(-1),
        "place": jnp.searchsorted(jnp.sort(out), jnp.array([-0.51, 0.013, 0.57])),
    }  # fmt: skip
    return errors.mean(), aux
