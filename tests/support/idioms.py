"""A catalogue of ordinary train steps, each written for one device.

Most couple the examples of a batch, or use an operation that seldom occurs. A test runs each as it is on one device and
decorated on several, and compares. Models are small, everything is float64 and well conditioned: rounding of the batch
doesn't grow, and no decision (an argmax, a sort, a threshold) is near a tie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
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
CLASSES, VOCAB, ACTIONS, TIME = 4, 16, 3, 7
_coupled: set[str] = set()
_divisible: set[str] = set()


def idiom(*, coupled: bool = False, divisible: bool = False) -> Callable[[Idiom], Idiom]:
    """Enter a function in the catalogue under its name."""

    def enter(make: Idiom) -> Idiom:
        name = make.__name__  # type: ignore[attr-defined]
        assert name not in IDIOMS
        IDIOMS[name] = make
        if coupled:
            _coupled.add(name)
        if divisible:
            _divisible.add(name)
        return make

    return enter


def batch(i: int, size: int) -> dict[str, np.ndarray]:
    """Batch `i` of `size` examples, with what any idiom reads; examples late in it are larger, and less masked."""
    rng = np.random.default_rng([i, size])
    ramp = np.linspace(0.0, 1.0, size)
    x = rng.normal(size=(size, 6)) * (0.7 + 0.6 * ramp[:, None])
    scale = np.exp(2 * ramp - 1 + 0.1 * i)[:, None]
    mask = (rng.uniform(size=size) < 0.1 + ramp).astype(np.float64)
    mask[0], mask[-2:] = 0.0, 1.0
    series = np.cumsum(rng.normal(size=(size, 5, 3)) * 0.6, axis=1)
    return {
        "x": x,
        "x2": x + 0.3 * rng.normal(size=x.shape),
        "next_x": 0.8 * x + 0.4 * rng.normal(size=x.shape),
        "y": scale * (np.sin(x[:, :1] + x[:, 1:2]) + 0.2 * rng.normal(size=(size, 1))),
        "label": rng.choice(CLASSES, size=size, p=[0.4, 0.3, 0.2, 0.1]).astype(np.int32),
        "image": rng.normal(size=(size, 8, 8, 2)) * (0.6 + 0.8 * ramp[:, None, None, None]),
        "tokens": rng.integers(0, VOCAB, size=(size, TIME)).astype(np.int32),
        "length": rng.integers(1, TIME + 1, size=size).astype(np.int32),
        "segment": np.cumsum(rng.uniform(size=(size, TIME)) < 0.3, axis=1).astype(np.int32),
        "series": series,
        "mask": mask,
        "weight": rng.uniform(0.2, 2.0, size=size) * (0.5 + ramp),
        "group": (rng.uniform(size=size) < 0.2 + 0.6 * ramp).astype(np.int32),
        "neighbour": rng.integers(0, size, size=(size, 2)).astype(np.int32),
        "action": rng.integers(0, ACTIONS, size=size).astype(np.int32),
        "control": np.tanh(rng.normal(size=(size, 2))),
        "reward": rng.normal(size=size) + np.tanh(x[:, 2]),
        "rewards": rng.normal(size=(size, 5)) + ramp[:, None],
        "done": rng.uniform(size=size) < 0.2,
        "logp": -1.1 + 0.1 * rng.normal(size=size),
        "advantage": rng.normal(size=size) * scale[:, 0] + 0.5,
        "priority": rng.uniform(0.1, 1.0, size=size),
        "seed": rng.integers(0, 2**31, size=size).astype(np.uint32),
        "id": (i * size + np.arange(size)).astype(np.int32),
    }


def _params(seed: int, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Float64 arrays of the shapes: matrices and kernels scaled by their inputs; small vectors."""
    rng = np.random.default_rng(seed)
    fan = lambda shape: int(np.prod(shape[:-1])) if len(shape) > 1 else 25
    return {name: jnp.asarray(rng.normal(size=shape) / np.sqrt(fan(shape))) for name, shape in shapes.items()}


def _mlp_params(seed: int, inputs: int = 6, hidden: int = 8, outputs: int = 1, bias: bool = True) -> dict[str, Any]:
    shapes = {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, outputs)}
    return _params(seed, **shapes, **({"b2": (outputs,)} if bias else {}))


def _mlp(p: Any, x: Any) -> Any:
    out = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]
    return out + p["b2"] if "b2" in p else out


def _unit(x: Any) -> Any:
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def _adam(rate: float = 2e-2) -> optax.GradientTransformation:
    return optax.adam(rate, eps=1e-2)


def _sgd(rate: float = 2e-2) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=0.9)


def _adamw(rate: float = 2e-2) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate, eps=1e-2))


def _axpy(scale: Any, x: Any, y: Any) -> Any:
    """``scale * x + y``, leaf by leaf."""
    return jax.tree.map(lambda a, b: scale * a + b, x, y)


def _dot(x: Any, y: Any) -> Any:
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


_xent = optax.softmax_cross_entropy_with_integer_labels


def _fit(wrap: Wrap, tx: optax.GradientTransformation, params: Any, loss_fn: Callable[..., Any]) -> Any:
    """The step ``(params, optimizer's state, batch)`` of ``loss_fn(params, batch) -> (loss, aux)``."""
    tx = wrap(tx)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, {"loss": loss, **aux}

    return step, (params, tx.init(params))


def _fit_keyed(wrap: Wrap, tx: optax.GradientTransformation, params: Any, loss_fn: Callable[..., Any]) -> Any:
    """The step ``(params, optimizer's state, key, batch)`` of ``loss_fn(params, key, batch) -> (loss, aux)``."""
    tx = wrap(tx)

    def step(params: Any, opt: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, now, batch)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, key, {"loss": loss, **aux}

    return step, (params, tx.init(params), jax.random.key(7))


# Vision


def _conv(x: Any, kernel: Any, stride: int = 1, groups: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def _classify(p: Any, image: Any) -> Any:
    """Logits of a small network with one convolution, which begins at every second pixel."""
    h = jnp.tanh(_conv(image, p["conv"], stride=2) + p["bias"])
    return h.mean(axis=(1, 2)) @ p["head"] + p["out"]


def _classifier(seed: int) -> dict[str, Any]:
    return _params(seed, conv=(3, 3, 2, 5), bias=(5,), head=(5, CLASSES), out=(CLASSES,))


@idiom(coupled=True)
def cnn_batchnorm(wrap: Wrap) -> Any:
    """Convolution, batch norm with running statistics, max pooling; the statistics are state."""
    tx = wrap(_adam())
    params = {**_params(1, conv=(3, 3, 2, 6), shift=(6,), head=(6, CLASSES), out=(CLASSES,)), "scale": jnp.ones(6)}

    def loss_fn(p: Any, stats: Any, batch: Any) -> Any:
        h = _conv(batch["image"], p["conv"])
        mean, var = h.mean(axis=(0, 1, 2)), h.var(axis=(0, 1, 2))
        stats = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        h = jax.nn.relu((h - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["shift"])
        h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = h.mean(axis=(1, 2)) @ p["head"] + p["out"]
        return _xent(logits, batch["label"]).mean(), (stats, logits)

    def step(params: Any, opt: Any, stats: Any, batch: Any) -> Any:
        (loss, (stats, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, batch)
        updates, opt = tx.update(grads, opt, params)
        accuracy = jnp.mean(logits.argmax(axis=-1) == batch["label"])
        return optax.apply_updates(params, updates), opt, stats, {"loss": loss, "accuracy": accuracy}

    return step, (params, tx.init(params), {"mean": jnp.zeros(6), "var": jnp.ones(6)})


@idiom(coupled=True)
def flax_batchnorm_dropout(wrap: Wrap) -> Any:
    """A flax module with BatchNorm, whose statistics are a mutable collection, and Dropout."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.Dense(8, use_bias=False, param_dtype=jnp.float64)(x)
            h = nn.BatchNorm(use_running_average=False, momentum=0.9, param_dtype=jnp.float64)(h)
            h = nn.Dropout(0.2, deterministic=False)(jnp.tanh(h))
            return nn.Dense(1, param_dtype=jnp.float64)(h)

    tx, net = wrap(_adamw()), Net()
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
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, new_stats, key, loss

    return step, (params, tx.init(params), stats, jax.random.key(3))


@idiom()
def depthwise_conv(wrap: Wrap) -> Any:
    """Depthwise and pointwise convolutions with group norm and average pooling."""
    params = _params(2, depth=(3, 3, 1, 8), point=(1, 1, 8, 4), scale=(4,), head=(4, CLASSES))

    def loss_fn(p: Any, batch: Any) -> Any:
        h = _conv(batch["image"], p["depth"], groups=2)
        h = jnp.tanh(_conv(h, p["point"]))
        groups = h.reshape(*h.shape[:3], 2, 2)
        mean = groups.mean(axis=(1, 2, 4), keepdims=True)
        var = groups.var(axis=(1, 2, 4), keepdims=True)
        h = ((groups - mean) * lax.rsqrt(var + 1e-3)).reshape(h.shape) * (1 + p["scale"])
        h = lax.reduce_window(jax.nn.gelu(h), 0.0, lax.add, (1, 4, 4, 1), (1, 4, 4, 1), "VALID") / 16
        losses = _xent(h.mean(axis=(1, 2)) @ p["head"], batch["label"])
        return losses.mean(), {"losses": losses}

    return _fit(wrap, _sgd(), params, loss_fn)


@idiom()
def random_crop_flip(wrap: Wrap) -> Any:
    """A key for each example: crops by dynamic_slice, flips by where."""

    def augment(key: Any, image: Any) -> Any:
        crop, flip = jax.random.split(key)
        top, left = jax.random.randint(crop, (2,), 0, 3)
        image = lax.dynamic_slice(jnp.pad(image, ((1, 1), (1, 1), (0, 0))), (top, left, 0), image.shape)
        return jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        keys = jax.random.split(key, batch["image"].shape[0])
        logits = _classify(p, jax.vmap(augment)(keys, batch["image"]))
        return _xent(logits, batch["label"]).mean(), {}

    return _fit_keyed(wrap, _adam(), _classifier(3), loss_fn)


@idiom()
def random_shift_gather(wrap: Wrap) -> Any:
    """Shifts drawn at once for the whole batch, made by take_along_axis; noise of the images' shape."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        shift, noise = jax.random.split(key)
        image = batch["image"] + 0.1 * jax.random.normal(noise, batch["image"].shape)
        columns = (jnp.arange(8) + jax.random.randint(shift, (image.shape[0], 1), 0, 8)) % 8
        image = jnp.take_along_axis(image, columns[:, None, :, None], axis=2)
        return _xent(_classify(p, image), batch["label"]).mean(), {"columns": columns.sum(axis=0)}

    return _fit_keyed(wrap, _sgd(), _classifier(4), loss_fn)


@idiom()
def per_example_seeds(wrap: Wrap) -> Any:
    """The batch brings seeds, from which each example has a key of its own."""

    def loss_fn(p: Any, batch: Any) -> Any:
        noise = jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (6,)))(batch["seed"])
        return jnp.mean((_mlp(p, batch["x"] + 0.2 * noise) - batch["y"]) ** 2), {"noise": noise[:, 0]}

    return _fit(wrap, _adam(), _mlp_params(5), loss_fn)


@idiom(coupled=True)
def mixup_reverse(wrap: Wrap) -> Any:
    """Mixup with the batch in reverse order."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        mix = jax.random.uniform(key, (), minval=0.2, maxval=0.9)
        logits = _classify(p, mix * batch["image"] + (1 - mix) * batch["image"][::-1])
        losses = mix * _xent(logits, batch["label"]) + (1 - mix) * _xent(logits, batch["label"][::-1])
        return losses.mean(), {"mix": mix}

    return _fit_keyed(wrap, _adam(), _classifier(6), loss_fn)


@idiom(coupled=True)
def mixup_permutation(wrap: Wrap) -> Any:
    """Mixup with a random permutation, and a weight for each example."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        first, second = jax.random.split(key)
        size = batch["x"].shape[0]
        order = jax.random.permutation(first, size)
        mix = jax.random.uniform(second, (size, 1))
        x = mix * batch["x"] + (1 - mix) * batch["x"][order]
        y = mix * batch["y"] + (1 - mix) * jnp.take(batch["y"], order, axis=0)
        return jnp.mean((_mlp(p, x) - y) ** 2), {"order": order}

    return _fit_keyed(wrap, _adamw(), _mlp_params(7), loss_fn)


@idiom(coupled=True)
def cutmix(wrap: Wrap) -> Any:
    """A random box of each image comes from the image before it in the batch."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        top, left = jax.random.randint(key, (2,), 0, 5)
        rows, columns = jnp.arange(8)[:, None], jnp.arange(8)[None]
        box = (rows >= top) & (rows < top + 4) & (columns >= left) & (columns < left + 3)
        image = jnp.where(box[None, :, :, None], jnp.roll(batch["image"], 1, axis=0), batch["image"])
        kept, logits = 1 - box.mean(dtype=jnp.float64), _classify(p, image)
        partner = jnp.roll(batch["label"], 1)
        return jnp.mean(kept * _xent(logits, batch["label"]) + (1 - kept) * _xent(logits, partner)), {"kept": kept}

    return _fit_keyed(wrap, _adam(), _classifier(8), loss_fn)


@idiom()
def label_smoothing(wrap: Wrap) -> Any:
    """Smoothed one-hot labels; the optimizer takes signs of gradients."""

    def loss_fn(p: Any, batch: Any) -> Any:
        targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], CLASSES, dtype=jnp.float64), 0.1)
        logits = _mlp(p, batch["x"])
        hits = jnp.sum(logits.argmax(axis=-1) == batch["label"])
        return optax.softmax_cross_entropy(logits, targets).mean(), {"hits": hits}

    return _fit(wrap, optax.lion(1e-2), _mlp_params(9, outputs=CLASSES), loss_fn)


@idiom()
def conv_transpose_autoencoder(wrap: Wrap) -> Any:
    """Down by a convolution, up by a transposed one."""
    params = _params(10, down=(3, 3, 2, 5), bias=(5,), up=(3, 3, 5, 2))

    def loss_fn(p: Any, batch: Any) -> Any:
        h = jnp.tanh(_conv(batch["image"], p["down"], stride=2) + p["bias"])
        back = lax.conv_transpose(h, p["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        errors = jnp.mean((back - batch["image"]) ** 2, axis=(1, 2, 3))
        return errors.mean(), {"worst": errors.max(), "which": errors.argmax()}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom()
def patches_class_token(wrap: Wrap) -> Any:
    """Images cut into patches, and a learnt token put before each image's."""
    params = _params(11, patch=(8, 8), token=(8,), mix=(8, 8), head=(8, CLASSES))

    def loss_fn(p: Any, batch: Any) -> Any:
        size = batch["image"].shape[0]
        patches = batch["image"].reshape(size, 4, 2, 4, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(size, 16, 8)
        h = jnp.concatenate([jnp.broadcast_to(p["token"], (size, 1, 8)), patches @ p["patch"]], axis=1)
        weights = jax.nn.softmax(jnp.einsum("btd,de,bse->bts", h, p["mix"], h) / 3)
        return _xent((h + weights @ h)[:, 0] @ p["head"], batch["label"]).mean(), {}

    return _fit(wrap, _adamw(), params, loss_fn)


# Language


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
    shapes = {
        "qkv": (8, 24),
        "join": (8, 8),
        "norm1": (8,),
        "norm2": (8,),
        "wide": (8, 12),
        "narrow": (12, 8),
    }
    params = _params(seed, **{name: (*layers, *shape) for name, shape in shapes.items()})
    return {name: 0.8 * value for name, value in params.items()}


_CAUSAL = np.tril(np.ones((TIME - 1, TIME - 1), bool))


@idiom()
def transformer(wrap: Wrap) -> Any:
    """Two layers one after the other, next-token loss of every position."""
    params = {
        **_params(20, embedding=(VOCAB, 8), position=(TIME - 1, 8), head=(8, VOCAB)),
        "layers": [_blocks(21), _blocks(22)],
    }

    def loss_fn(p: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        h = p["embedding"][tokens[:, :-1]] * 2 + p["position"]
        for layer in p["layers"]:
            h = _block(layer, h, _CAUSAL)
        losses = _xent(h @ p["head"], tokens[:, 1:])
        return losses.mean(), {"perplexity": jnp.exp(losses.mean()), "by_position": losses.mean(axis=0)}

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom()
def transformer_scanned(wrap: Wrap) -> Any:
    """Layers by lax.scan, rematerialised, with attention dropout; the embedding is also the output layer."""
    params = {**_params(23, embedding=(VOCAB, 8), position=(TIME - 1, 8)), "layers": _blocks(24, 2)}

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        h = p["embedding"][tokens[:, :-1]] * 2 + p["position"]

        @jax.checkpoint
        def layer(h: Any, params_and_key: Any) -> Any:
            params, key = params_and_key
            keep = jax.random.bernoulli(key, 0.8, (h.shape[0], 2, TIME - 1, TIME - 1)) / 0.8
            return _block(params, h, _CAUSAL, keep), None

        h, _ = lax.scan(layer, h, (p["layers"], jax.random.split(key, 2)))
        return _xent(h @ p["embedding"].T, tokens[:, 1:]).mean(), {}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def masked_lm(wrap: Wrap) -> Any:
    """Random tokens are hidden; the loss is the mean over the hidden ones, wherever they are."""
    params = _params(25, embedding=(VOCAB, 8), own=(8, 8), context=(8, 8), head=(8, VOCAB))

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        hidden = jax.random.bernoulli(key, 0.3, tokens.shape)
        h = p["embedding"][jnp.where(hidden, 0, tokens)]
        h = jnp.tanh(h @ p["own"] + h.mean(axis=1, keepdims=True) @ p["context"])
        losses = _xent(h @ p["head"], tokens)
        return jnp.sum(losses * hidden) / jnp.maximum(jnp.sum(hidden), 1), {"hidden": jnp.sum(hidden)}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def packed_segments(wrap: Wrap) -> Any:
    """Rows hold several sequences: attention and loss stay inside one, positions begin anew."""
    params = {**_params(26, embedding=(VOCAB, 8), position=(TIME, 8), head=(8, VOCAB)), "layer": _blocks(27)}

    def loss_fn(p: Any, batch: Any) -> Any:
        tokens, segment = batch["tokens"], batch["segment"]
        index = jnp.arange(TIME)
        begins = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        position = index - lax.cummax(jnp.where(begins, index, 0), axis=1)
        same = (segment[:, :, None] == segment[:, None]) & (index[:, None] >= index)
        h = _block(p["layer"], p["embedding"][tokens] + p["position"][position], same[:, None])
        losses = _xent(h[:, :-1] @ p["head"], tokens[:, 1:])
        counted = (segment[:, 1:] == segment[:, :-1]).astype(jnp.float64)
        return jnp.sum(losses * counted) / jnp.sum(counted), {"tokens": jnp.sum(counted)}

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom()
def lstm_scan(wrap: Wrap) -> Any:
    """An LSTM by lax.scan over time, from a state of zeros of the batch's size."""
    params = _params(28, x=(3, 20), h=(5, 20), bias=(20,), out=(5, 1))

    def loss_fn(p: Any, batch: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, o, g = jnp.split(x @ p["x"] + h @ p["h"] + p["bias"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((batch["series"].shape[0], 5))
        (last, _), hs = lax.scan(cell, (zeros, zeros), jnp.swapaxes(batch["series"], 0, 1))
        return jnp.mean((last @ p["out"] - batch["y"]) ** 2), {"hidden": hs.mean(axis=(1, 2)), "largest": hs.max()}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom()
def gru_lengths(wrap: Wrap) -> Any:
    """A GRU over tokens, frozen after each row's length; the first example's last state goes out."""
    params = _params(29, embedding=(VOCAB, 5), x=(5, 18), h=(6, 18), out=(6, CLASSES))

    def loss_fn(p: Any, batch: Any) -> Any:
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

    return _fit(wrap, _sgd(), params, loss_fn)


@idiom()
def greedy_decoding(wrap: Wrap) -> Any:
    """Each output's argmax is the next input, in lax.scan; the decoded tokens go out."""
    params = _params(30, start=(6, 8), embedding=(VOCAB, 8), h=(8, 8), out=(8, VOCAB))

    def loss_fn(p: Any, batch: Any) -> Any:
        def decode(carry: Any, target: Any) -> Any:
            h, token = carry
            h = jnp.tanh(h @ p["h"] + p["embedding"][token] * 3)
            logits = h @ p["out"]
            return (h, logits.argmax(axis=-1)), (_xent(logits, target), logits.argmax(axis=-1))

        first = jnp.zeros(batch["x"].shape[0], int)
        _, (losses, decoded) = lax.scan(decode, (batch["x"] @ p["start"], first), batch["tokens"].T)
        return losses.mean(), {"decoded": decoded.T, "right": jnp.mean(batch["tokens"] == decoded.T)}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom()
def scheduled_sampling(wrap: Wrap) -> Any:
    """The next input is the true token or one drawn from the model, by chance, with a key for each time."""
    params = _params(31, embedding=(VOCAB, 5), h=(5, 5), out=(5, VOCAB))

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        tokens = batch["tokens"].T

        def advance(carry: Any, now: Any) -> Any:
            h, token = carry
            key, target = now
            h = jnp.tanh(h @ p["h"] + p["embedding"][token] * 2)
            logits = h @ p["out"]
            draw, choose = jax.random.split(key)
            drawn = jax.random.categorical(draw, logits).astype(jnp.int32)
            truth = jax.random.bernoulli(choose, 0.6, target.shape)
            return (h, jnp.where(truth, target, drawn)), _xent(logits, target)

        carry = jnp.zeros((tokens.shape[1], 5)), tokens[0]
        _, losses = lax.scan(advance, carry, (jax.random.split(key, TIME - 1), tokens[1:]))
        return losses.mean(), {}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom()
def time_major(wrap: Wrap) -> Any:
    """Everything is laid out (time, batch), and flattened so for the loss."""
    params = _params(32, embedding=(VOCAB, 6), w=(6, 6), head=(6, VOCAB))

    def loss_fn(p: Any, batch: Any) -> Any:
        tokens = batch["tokens"].T
        h = jnp.tanh(p["embedding"][tokens] @ p["w"])
        h = jnp.cumsum(h, axis=0) / (1 + jnp.arange(TIME))[:, None, None]
        losses = _xent((h[:-1] @ p["head"]).reshape(-1, VOCAB), tokens[1:].reshape(-1))
        return losses.mean(), {"losses": losses.reshape(TIME - 1, -1), "worst": losses.max()}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def flat_tokens(wrap: Wrap) -> Any:
    """(batch, time) flattened to one axis, a loss weighted by the rows' lengths, and its mean over the valid tokens."""
    params = _params(33, embedding=(VOCAB, 6), previous=(VOCAB, 6), head=(6, VOCAB))

    def loss_fn(p: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        now, before = tokens[:, 1:-1].reshape(-1), tokens[:, :-2].reshape(-1)
        valid = (jnp.arange(TIME - 2) < batch["length"][:, None] - 2).reshape(-1)
        logits = jnp.tanh(p["embedding"][now] + p["previous"][before]) @ p["head"]
        targets = tokens[:, 2:].reshape(-1)
        count = jnp.maximum(valid.sum(), 1)
        hits = jnp.sum((logits.argmax(axis=-1) == targets) & valid)
        return jnp.sum(_xent(logits, targets) * valid) / count, {"accuracy": hits / count, "count": count}

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom()
def sampled_softmax(wrap: Wrap) -> Any:
    """Negatives drawn from the vocabulary, the same for the whole batch; those that are the answer don't count."""
    params = _params(34, embedding=(VOCAB, 8), out=(VOCAB, 8), bias=(VOCAB,))

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        context, answer = batch["tokens"][:, :-1], batch["tokens"][:, -1]
        negatives = jax.random.choice(key, VOCAB, (5,), replace=False)
        h = jnp.tanh(p["embedding"][context].sum(axis=1))
        right = jnp.sum(h * p["out"][answer], axis=-1) + p["bias"][answer]
        wrong = h @ p["out"][negatives].T + p["bias"][negatives]
        wrong = jnp.where(negatives == answer[:, None], -1e9, wrong)
        logits = jnp.concatenate([right[:, None], wrong], axis=1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - right), {"negatives": negatives}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def in_batch_softmax(wrap: Wrap) -> Any:
    """Two towers; the other rows' items are the negatives, corrected for how often each occurs in the batch."""
    params = {"user": _mlp_params(35, outputs=5), "item": _params(36, table=(VOCAB, 5))["table"]}

    def loss_fn(p: Any, batch: Any) -> Any:
        item = batch["tokens"][:, 0]
        same = item[:, None] == item
        logits = _mlp(p["user"], batch["x"]) @ p["item"][item].T - jnp.log(same.mean(axis=1))
        logits = jnp.where(same & ~jnp.eye(item.size, dtype=bool), -1e9, logits)
        rank = jnp.sum(logits > jnp.diag(logits)[:, None], axis=1)
        return _xent(logits, jnp.arange(item.size)).mean(), {"rank": rank, "mrr": jnp.mean(1 / (1 + rank))}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom()
def skipgram_scatter(wrap: Wrap) -> Any:
    """No optimizer: the rows of the tables that the batch names are changed by scatter-add."""
    del wrap
    tables = _params(37, inner=(VOCAB, 5), outer=(VOCAB, 5))

    def step(tables: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        centre, context = batch["tokens"][:, 3], batch["tokens"][:, 4]
        negative = jax.random.randint(now, centre.shape, 0, VOCAB)
        u, v, w = tables["inner"][centre], tables["outer"][context], tables["outer"][negative]
        pull = jax.nn.sigmoid(-jnp.sum(u * v, axis=-1, keepdims=True))
        push = jax.nn.sigmoid(jnp.sum(u * w, axis=-1, keepdims=True))
        inner = tables["inner"].at[centre].add(0.1 * (pull * v - push * w))
        outer = tables["outer"].at[context].add(0.1 * pull * u).at[negative].add(-0.1 * push * u)
        return {"inner": inner, "outer": outer}, key, -jnp.log(1 - pull).mean()

    return step, (tables, jax.random.key(8))


# Contrastive and metric learning


@idiom(coupled=True)
def infonce(wrap: Wrap) -> Any:
    """Every other example's second view is a negative."""
    params = {"query": _mlp_params(40, outputs=5, bias=False), "key": _mlp_params(41, outputs=5, bias=False)}

    def loss_fn(p: Any, batch: Any) -> Any:
        logits = _unit(_mlp(p["query"], batch["x"])) @ _unit(_mlp(p["key"], batch["x2"])).T / 0.3
        right = jnp.arange(logits.shape[0])
        return _xent(logits, right).mean(), {"accuracy": jnp.mean(logits.argmax(axis=1) == right, dtype=jnp.float64)}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def simclr(wrap: Wrap) -> Any:
    """Both views in one batch of twice the size, each example's similarity to itself masked."""

    def loss_fn(p: Any, batch: Any) -> Any:
        z = _unit(_mlp(p, jnp.concatenate([batch["x"], batch["x2"]])))
        size = batch["x"].shape[0]
        logits = jnp.where(jnp.eye(2 * size, dtype=bool), -1e9, z @ z.T / 0.4)
        return _xent(logits, (jnp.arange(2 * size) + size) % (2 * size)).mean(), {"first": logits[0, 1:3]}

    return _fit(wrap, _sgd(), _mlp_params(42, outputs=6, bias=False), loss_fn)


@idiom(coupled=True)
def nt_xent(wrap: Wrap) -> Any:
    """The views of an example are neighbours in the batch of twice the size."""

    def loss_fn(p: Any, batch: Any) -> Any:
        z = jnp.stack([batch["x"], batch["x2"]], axis=1).reshape(-1, 6)
        z = _unit(_mlp(p, z))
        index = jnp.arange(z.shape[0])
        scores = z @ z.T / 0.5
        others = jnp.sum(jnp.exp(scores) * (1 - jnp.eye(index.size)), axis=1)
        losses = jnp.log(others) - scores[index, index ^ 1]
        return losses.mean(), {"losses": losses.reshape(-1, 2).sum(axis=1)}

    return _fit(wrap, _adamw(), _mlp_params(43, outputs=5, bias=False), loss_fn)


@idiom(coupled=True)
def clip_temperature(wrap: Wrap) -> Any:
    """Images against features both ways, with a learnt temperature."""
    image = _params(44, conv=(3, 3, 2, 5), bias=(5,), head=(5, CLASSES))
    params = {"image": {**image, "out": jnp.zeros(CLASSES)}, "other": _mlp_params(45, outputs=CLASSES)}
    params["temperature"] = jnp.full((), 1.0)

    def loss_fn(p: Any, batch: Any) -> Any:
        left, right = _unit(_classify(p["image"], batch["image"])), _unit(_mlp(p["other"], batch["x"]))
        logits = jnp.exp(p["temperature"]) * left @ right.T
        labels = jnp.arange(logits.shape[0])
        loss = (_xent(logits, labels).mean() + _xent(logits.T, labels).mean()) / 2
        return loss, {"largest": logits.max()}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def supervised_contrastive(wrap: Wrap) -> Any:
    """Examples of the same label are positives; those alone with their label don't count."""

    def loss_fn(p: Any, batch: Any) -> Any:
        z, label = _unit(_mlp(p, batch["x"])), batch["label"]
        itself = jnp.eye(label.size, dtype=bool)
        scores = jnp.where(itself, -1e9, z @ z.T / 0.5)
        positive = (label[:, None] == label) & ~itself
        logp = jax.nn.log_softmax(scores)
        each = -jnp.sum(jnp.where(positive, logp, 0.0), axis=1) / jnp.maximum(positive.sum(axis=1), 1)
        paired = positive.any(axis=1)
        return each.sum() / jnp.maximum(paired.sum(), 1), {"paired": paired, "all": paired.all()}

    return _fit(wrap, _adam(), _mlp_params(46, outputs=5, bias=False), loss_fn)


@idiom(coupled=True)
def vicreg(wrap: Wrap) -> Any:
    """Variance, invariance and covariance of two views."""

    def loss_fn(p: Any, batch: Any) -> Any:
        a, b = _mlp(p, batch["x"]), _mlp(p, batch["x2"])
        spread = covariance = 0.0
        for z in (a, b):
            z = z - z.mean(axis=0)
            spread += jnp.mean(jax.nn.relu(2.0 - jnp.sqrt(z.var(axis=0) + 1e-4)))
            cov = z.T @ z / (z.shape[0] - 1)
            covariance += jnp.sum((cov - jnp.diag(jnp.diag(cov))) ** 2) / z.shape[1]
        invariance = jnp.mean((a - b) ** 2)
        return invariance + spread + 0.1 * covariance, {"parts": (invariance, spread, covariance)}

    return _fit(wrap, _adam(), _mlp_params(47, outputs=5, bias=False), loss_fn)


@idiom(coupled=True)
def barlow_twins(wrap: Wrap) -> Any:
    """The cross-correlation of two standardised views is to be the identity."""

    def loss_fn(p: Any, batch: Any) -> Any:
        a, b = _mlp(p, batch["x"]), _mlp(p, batch["x2"])
        a, b = ((z - z.mean(axis=0)) / jnp.sqrt(z.var(axis=0) + 1e-3) for z in (a, b))
        c = a.T @ b / a.shape[0]
        on, off = jnp.diag(c), c - jnp.diag(jnp.diag(c))
        return jnp.sum((1 - on) ** 2) + 0.05 * jnp.sum(off**2), {"correlation": on}

    return _fit(wrap, _sgd(), _mlp_params(48, outputs=6, bias=False), loss_fn)


def _squared_distances(a: Any, b: Any) -> Any:
    return jnp.sum((a[:, None] - b[None]) ** 2, axis=-1)


@idiom(coupled=True)
def triplet_batch_hard(wrap: Wrap) -> Any:
    """The farthest example of the same label and the nearest of another, by max and min over the batch."""

    def loss_fn(p: Any, batch: Any) -> Any:
        z, label = _mlp(p, batch["x"]), batch["label"]
        distance = jnp.sqrt(_squared_distances(z, z) + 1e-3)
        same = label[:, None] == label
        farthest = jnp.max(jnp.where(same, distance, 0.0), axis=1)
        nearest = jnp.min(jnp.where(same, 1e3, distance), axis=1)
        losses = jax.nn.relu(farthest - nearest + 0.5)
        return losses.mean(), {"active": jnp.sum(losses > 0), "nearest": nearest}

    return _fit(wrap, _adam(), _mlp_params(49, outputs=5, bias=False), loss_fn)


@idiom(coupled=True)
def topk_hard_mining(wrap: Wrap) -> Any:
    """Only the third of the examples with the largest losses counts."""

    def loss_fn(p: Any, batch: Any) -> Any:
        losses = _xent(_mlp(p, batch["x"]), batch["label"])
        hardest, which = lax.top_k(losses, losses.size // 3)
        return hardest.mean(), {"which": which}

    return _fit(wrap, _adam(), _mlp_params(50, outputs=CLASSES), loss_fn)


@idiom(coupled=True)
def listwise_ranking(wrap: Wrap) -> Any:
    """The likelihood of the batch's order by reward: argsort, then a cumulative logsumexp."""

    def loss_fn(p: Any, batch: Any) -> Any:
        order = jnp.argsort(-batch["reward"])
        scores = _mlp(p, batch["x"])[order, 0]
        below = lax.cumlogsumexp(scores, reverse=True)
        return jnp.mean(below - scores), {"order": order}

    return _fit(wrap, _adam(), _mlp_params(51, bias=False), loss_fn)


@idiom(coupled=True)
def pairwise_ranking(wrap: Wrap) -> Any:
    """Every pair of examples of different rewards."""

    def loss_fn(p: Any, batch: Any) -> Any:
        scores = _mlp(p, batch["x"])[:, 0]
        better = batch["reward"][:, None] > batch["reward"]
        margin = scores[:, None] - scores
        loss = jnp.sum(jax.nn.softplus(-margin) * better) / jnp.sum(better)
        return loss, {"auc": jnp.sum((margin > 0) & better) / jnp.sum(better)}

    return _fit(wrap, _sgd(), _mlp_params(52, bias=False), loss_fn)


@idiom(coupled=True)
def prototypes(wrap: Wrap) -> Any:
    """Distances to the classes' means within the batch, by segment_sum."""

    def loss_fn(p: Any, batch: Any) -> Any:
        z = _mlp(p, batch["x"])
        count = jax.ops.segment_sum(jnp.ones(z.shape[0]), batch["label"], CLASSES)
        centre = jax.ops.segment_sum(z, batch["label"], CLASSES) / jnp.maximum(count, 1)[:, None]
        logits = jnp.where(count > 0, -_squared_distances(_mlp(p, batch["x2"]), centre), -1e9)
        return _xent(logits, batch["label"]).mean(), {"count": count}

    return _fit(wrap, _adamw(), _mlp_params(53, outputs=5, bias=False), loss_fn)


@idiom(coupled=True)
def nearest_neighbour(wrap: Wrap) -> Any:
    """Each example's two nearest others are pulled towards it; everything else pushed off."""

    def loss_fn(p: Any, batch: Any) -> Any:
        z = _mlp(p, batch["x"])
        distance = _squared_distances(z, z) + 1e6 * jnp.eye(z.shape[0])
        _, index = lax.top_k(-distance, 2)
        near = jnp.mean((z[:, None] - z[index]) ** 2)
        return near + jnp.mean(jnp.exp(-distance)), {"index": index}

    return _fit(wrap, _adam(), _mlp_params(54, outputs=4, bias=False), loss_fn)


@idiom(coupled=True)
def moco_queue(wrap: Wrap) -> Any:
    """Keys of a slow encoder go into a queue that is state; the oldest fall out."""
    tx, fast = wrap(_adam()), _mlp_params(55, outputs=5, bias=False)
    queue = _unit(_params(56, queue=(40, 5))["queue"])

    def step(fast: Any, opt: Any, slow: Any, queue: Any, batch: Any) -> Any:
        slow = _axpy(0.9, slow, jax.tree.map(lambda x: 0.1 * x, fast))
        keys = _unit(_mlp(slow, batch["x2"]))

        def loss_fn(p: Any) -> Any:
            z = _unit(_mlp(p, batch["x"]))
            logits = jnp.concatenate([jnp.sum(z * keys, axis=1, keepdims=True), z @ queue.T], axis=1)
            return -jax.nn.log_softmax(logits / 0.3)[:, 0].mean()

        loss, grads = jax.value_and_grad(loss_fn)(fast)
        updates, opt = tx.update(grads, opt, fast)
        queue = jnp.concatenate([keys, queue])[: queue.shape[0]]
        return optax.apply_updates(fast, updates), opt, slow, queue, loss

    return step, (fast, tx.init(fast), _mlp_params(57, outputs=5, bias=False), queue)


@idiom(coupled=True)
def swav_sinkhorn(wrap: Wrap) -> Any:
    """Soft assignments made even over the batch by a few turns of a lax.fori_loop."""
    params = {"net": _mlp_params(58, outputs=5, bias=False), "prototypes": _params(59, w=(6, 5))["w"]}

    def assign(scores: Any) -> Any:
        q = jnp.exp(scores / 0.5)

        def turn(_: Any, q: Any) -> Any:
            q = q / q.sum(axis=0) / q.shape[1]
            return q / q.sum(axis=1, keepdims=True) / q.shape[0]

        return lax.stop_gradient(lax.fori_loop(0, 3, turn, q / q.sum()) * q.shape[0])

    def loss_fn(p: Any, batch: Any) -> Any:
        centres = _unit(p["prototypes"])
        a, b = (_unit(_mlp(p["net"], batch[name])) @ centres.T for name in ("x", "x2"))
        cross = lambda q, s: -jnp.sum(q * jax.nn.log_softmax(s / 0.3), axis=1)
        return jnp.mean(cross(assign(a), b) + cross(assign(b), a)) / 2, {"used": assign(a).sum(axis=0)}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom()
def byol(wrap: Wrap) -> Any:
    """A predictor of a slowly moving target network's output."""
    tx = wrap(_sgd())
    online = {"net": _mlp_params(60, outputs=5), "head": _params(61, w=(5, 5))["w"]}

    def step(online: Any, opt: Any, target: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            def one_way(a: Any, b: Any) -> Any:
                goal = lax.stop_gradient(_unit(_mlp(target, b)))
                return 2 - 2 * jnp.sum(_unit(_mlp(p["net"], a) @ p["head"]) * goal, axis=1)

            return jnp.mean(one_way(batch["x"], batch["x2"]) + one_way(batch["x2"], batch["x"]))

        loss, grads = jax.value_and_grad(loss_fn)(online)
        updates, opt = tx.update(grads, opt, online)
        online = optax.apply_updates(online, updates)
        return online, opt, optax.incremental_update(online["net"], target, 0.1), loss

    return step, (online, tx.init(online), _mlp_params(62, outputs=5))


@idiom(coupled=True)
def mmd_median_kernel(wrap: Wrap) -> Any:
    """Maximum mean discrepancy of a generator's samples, the kernel's width the median distance."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        fake = _mlp(p, jax.random.normal(key, (batch["x"].shape[0], 4)))
        both = jnp.concatenate([batch["x"], fake])
        distance = _squared_distances(both, both)
        kernel = jnp.exp(-distance / lax.stop_gradient(jnp.median(distance)))
        sign = jnp.where(jnp.arange(both.shape[0]) < fake.shape[0], 1.0, -1.0)
        return sign @ kernel @ sign / fake.shape[0] ** 2, {"width": jnp.median(distance)}

    return _fit_keyed(wrap, _adam(), _mlp_params(63, inputs=4, outputs=6), loss_fn)


@idiom(coupled=True)
def sliced_wasserstein(wrap: Wrap) -> Any:
    """Random projections of samples and data, each sorted over the batch."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        first, second = jax.random.split(key)
        fake = _mlp(p, jax.random.normal(first, (batch["x"].shape[0], 4)))
        directions = _unit(jax.random.normal(second, (5, 6))).T
        return jnp.mean((jnp.sort(fake @ directions, axis=0) - jnp.sort(batch["x"] @ directions, axis=0)) ** 2), {}

    return _fit_keyed(wrap, _adamw(), _mlp_params(64, inputs=4, outputs=6), loss_fn)


# Reinforcement learning


@idiom(coupled=True)
def ppo_advantage_normalised(wrap: Wrap) -> Any:
    """Advantages standardised over the batch, clipped ratios, entropy; the share clipped and the KL go out."""
    params = {"policy": _mlp_params(70, outputs=ACTIONS), "value": _mlp_params(71)}

    def loss_fn(p: Any, batch: Any) -> Any:
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        logp = jax.nn.log_softmax(_mlp(p["policy"], batch["x"]))
        ratio = jnp.exp(jnp.take_along_axis(logp, batch["action"][:, None], axis=1)[:, 0] - batch["logp"])
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        value = jnp.mean((_mlp(p["value"], batch["x"])[:, 0] - batch["reward"]) ** 2)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1).mean()
        clipped = jnp.mean(jnp.abs(ratio - 1) > 0.2, dtype=jnp.float64)
        return value / 2 - gain - 0.01 * entropy, {"clipped": clipped, "kl": jnp.mean(-jnp.log(ratio))}

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom(divisible=True, coupled=True)
def ppo_shuffled_minibatches(wrap: Wrap) -> Any:
    """Two epochs of shuffled minibatches of the batch, each an update of the optimizer, in nested lax.scan."""
    tx, params = wrap(_adam()), _mlp_params(72, outputs=ACTIONS)

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
            updates, opt = tx.update(grads, opt, params)
            return (optax.apply_updates(params, updates), opt), loss

        def epoch(carry: Any, key: Any) -> Any:
            order = jax.random.permutation(key, size).reshape(4, -1)
            parts = {name: batch[name][order] for name in ("x", "action", "advantage", "logp")}
            return lax.scan(minibatch, carry, parts)

        (params, opt), losses = lax.scan(epoch, (params, opt), jax.random.split(now, 2))
        return params, opt, key, losses

    return step, (params, tx.init(params), jax.random.key(9))


@idiom()
def reinforce_baseline(wrap: Wrap) -> Any:
    """Actions drawn from the policy; a running mean of the rewards is state."""
    tx, params = wrap(_sgd()), _mlp_params(73, outputs=ACTIONS)

    def step(params: Any, opt: Any, baseline: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)

        def loss_fn(p: Any) -> Any:
            logits = _mlp(p, batch["x"])
            action = jax.random.categorical(now, logits)
            reward = jnp.cos(action + batch["x"][:, 0]) + batch["reward"]
            return jnp.mean((reward - baseline) * _xent(logits, action)), (reward.mean(), action)

        (loss, (reward, action)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        baseline = 0.9 * baseline + 0.1 * reward
        return optax.apply_updates(params, updates), opt, baseline, key, {"loss": loss, "action": action}

    return step, (params, tx.init(params), jnp.full((), 0.1), jax.random.key(10))


@idiom()
def dqn_target(wrap: Wrap) -> Any:
    """A target network, copied every second step by where on a counter."""
    tx, params = wrap(_adam()), _mlp_params(74, outputs=ACTIONS)

    def step(params: Any, opt: Any, target: Any, count: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            q = jnp.take_along_axis(_mlp(p, batch["x"]), batch["action"][:, None], axis=1)[:, 0]
            best = _mlp(p, batch["next_x"]).argmax(axis=1)
            ahead = _mlp(target, batch["next_x"])[jnp.arange(best.size), best]
            goal = batch["reward"] + 0.9 * jnp.where(batch["done"], 0.0, ahead)
            error = q - lax.stop_gradient(goal)
            return optax.huber_loss(error).mean(), error

        (loss, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        params, count = optax.apply_updates(params, updates), count + 1
        target = jax.tree.map(lambda new, old: jnp.where(count % 2 == 0, new, old), params, target)
        return params, opt, target, count, {"loss": loss, "priority": jnp.abs(error) + 1e-3}

    return step, (params, tx.init(params), _mlp_params(75, outputs=ACTIONS), jnp.zeros((), jnp.int32))


@idiom(coupled=True)
def prioritised_replay(wrap: Wrap) -> Any:
    """Importance weights relative to the largest of the batch; new priorities go out."""

    def loss_fn(p: Any, batch: Any) -> Any:
        weight = (batch["priority"].size * batch["priority"]) ** -0.6
        weight = weight / weight.max()
        error = _mlp(p, batch["x"])[:, 0] - batch["reward"]
        return jnp.mean(weight * error**2), {"priority": jnp.abs(error), "largest": jnp.abs(error).max()}

    return _fit(wrap, _adam(), _mlp_params(76), loss_fn)


@idiom(coupled=True)
def gae_rollout(wrap: Wrap) -> Any:
    """The batch is one rollout: advantages by a reverse lax.scan along the batch."""
    params = {"policy": _mlp_params(77, outputs=ACTIONS), "value": _mlp_params(78)}

    def loss_fn(p: Any, batch: Any) -> Any:
        value, ahead = _mlp(p["value"], batch["x"])[:, 0], _mlp(p["value"], batch["next_x"])[:, 0]
        on = 1.0 - batch["done"]
        delta = batch["reward"] + 0.9 * on * ahead - value

        def back(later: Any, now: Any) -> Any:
            delta, on = now
            later = delta + 0.9 * 0.95 * on * later
            return later, later

        _, advantage = lax.scan(back, jnp.zeros(()), (delta, on), reverse=True)
        advantage = lax.stop_gradient(advantage)
        policy = jnp.mean(advantage * _xent(_mlp(p["policy"], batch["x"]), batch["action"]))
        returns = advantage + lax.stop_gradient(value)
        return policy + jnp.mean((value - returns) ** 2), {"advantage": advantage}

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom()
def gae_environments(wrap: Wrap) -> Any:
    """Each example is a rollout: reverse lax.scan over time under vmap."""

    def returns(rewards: Any, values: Any) -> Any:
        def back(later: Any, now: Any) -> Any:
            reward, value, ahead = now
            later = reward + 0.9 * ahead - value + 0.8 * later
            return later, later + value

        ahead = jnp.append(values[1:], 0.0)
        return lax.scan(back, 0.0, (rewards, values, ahead), reverse=True)[1]

    def loss_fn(p: Any, batch: Any) -> Any:
        values = _mlp(p, batch["series"])[..., 0]
        goal = jax.vmap(returns)(batch["rewards"], lax.stop_gradient(values))
        return jnp.mean((values - goal) ** 2), {"goal": goal}

    return _fit(wrap, _adam(), _mlp_params(79, inputs=3), loss_fn)


@idiom()
def td3_delayed(wrap: Wrap) -> Any:
    """Twin critics each step; the actor and the targets every second one, by lax.cond on a counter."""
    critic_tx, actor_tx = wrap(_adam()), wrap(_adam())
    critic = [_mlp_params(80, inputs=8), _mlp_params(81, inputs=8)]
    actor = _mlp_params(82, outputs=2)
    act = lambda p, x: jnp.tanh(_mlp(p, x))
    judge = lambda p, x, u: _mlp(p, jnp.concatenate([x, u], axis=1))[:, 0]

    def step(nets: Any, opts: Any, targets: Any, key: Any, count: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        noise = jnp.clip(0.2 * jax.random.normal(now, batch["control"].shape), -0.3, 0.3)
        ahead = act(targets["actor"], batch["next_x"]) + noise
        worst = functools.reduce(jnp.minimum, [judge(p, batch["next_x"], ahead) for p in targets["critic"]])
        goal = batch["reward"] + 0.9 * (1 - batch["done"]) * worst

        def critic_loss(critic: Any) -> Any:
            return sum(jnp.mean((judge(p, batch["x"], batch["control"]) - goal) ** 2) for p in critic)

        loss, grads = jax.value_and_grad(critic_loss)(nets["critic"])
        updates, critic_opt = critic_tx.update(grads, opts["critic"], nets["critic"])
        critic: Any = optax.apply_updates(nets["critic"], updates)

        def late(args: Any) -> Any:
            actor, opt, targets = args
            grads = jax.grad(lambda p: -judge(critic[0], batch["x"], act(p, batch["x"])).mean())(actor)
            updates, opt = actor_tx.update(grads, opt, actor)
            actor = optax.apply_updates(actor, updates)
            return actor, opt, optax.incremental_update({"critic": critic, "actor": actor}, targets, 0.2)

        args = nets["actor"], opts["actor"], targets
        actor, actor_opt, targets = lax.cond(count % 2 == 1, late, lambda args: args, args)
        nets, opts = {"critic": critic, "actor": actor}, {"critic": critic_opt, "actor": actor_opt}
        return nets, opts, targets, key, count + 1, loss

    nets = {"critic": critic, "actor": actor}
    opts = {"critic": critic_tx.init(critic), "actor": actor_tx.init(actor)}
    targets = {"critic": [_mlp_params(83, inputs=8), _mlp_params(84, inputs=8)], "actor": _mlp_params(85, outputs=2)}
    return step, (nets, opts, targets, jax.random.key(11), jnp.zeros((), jnp.int32))


@idiom()
def sac_temperature(wrap: Wrap) -> Any:
    """Reparametrised actions, and a temperature that follows the entropy."""
    params = {"actor": _mlp_params(86, outputs=4), "critic": _mlp_params(87, inputs=8), "alpha": jnp.full((), -1.0)}

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        mean, log_std = jnp.split(_mlp(p["actor"], batch["x"]), 2, axis=1)
        log_std = jnp.tanh(log_std)
        noise = jax.random.normal(key, mean.shape)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        logp = jnp.sum(-(noise**2) / 2 - log_std - jnp.log1p(1e-3 - action**2), axis=1)
        q = lambda critic, u: _mlp(critic, jnp.concatenate([batch["x"], u], axis=1))[:, 0]
        alpha = jnp.exp(p["alpha"])
        actor = jnp.mean(lax.stop_gradient(alpha) * logp - q(lax.stop_gradient(p["critic"]), action))
        critic = jnp.mean((q(p["critic"], batch["control"]) - batch["reward"]) ** 2)
        return actor + critic - jnp.mean(alpha * lax.stop_gradient(logp - 2)), {"entropy": -logp.mean()}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def replay_buffer(wrap: Wrap) -> Any:
    """The batch goes into a ring buffer in the state; the step trains on what it draws from that."""
    tx, params = wrap(_adam()), _mlp_params(88)
    memory = {"x": _params(89, x=(100, 6))["x"], "reward": jnp.ones(100), "next": jnp.zeros((), jnp.int32)}

    def step(params: Any, opt: Any, memory: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        size = batch["x"].shape[0]
        places = (memory["next"] + jnp.arange(size)) % 100
        memory = {
            "x": memory["x"].at[places].set(batch["x"]),
            "reward": memory["reward"].at[places].set(batch["reward"]),
            "next": (memory["next"] + size) % 100,
        }
        drawn = jax.random.randint(now, (size,), 0, 100)

        def loss_fn(p: Any) -> Any:
            return jnp.mean((_mlp(p, memory["x"][drawn])[:, 0] - memory["reward"][drawn]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, memory, key, {"loss": loss, "drawn": drawn}

    return step, (params, tx.init(params), memory, jax.random.key(12))


# Generative models


@idiom(coupled=True)
def gan_concatenated(wrap: Wrap) -> Any:
    """Real and fake examples in one batch for the discriminator, which also sees the batch's spread."""
    g_tx, d_tx = wrap(_adam()), wrap(_sgd())
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
        updates, d_opt = d_tx.update(grads, opts[1], d)
        d = optax.apply_updates(d, updates)
        g_loss = lambda g: jax.nn.softplus(-judge(d, jnp.concatenate([batch["x"], _mlp(g, noise)]))[size:]).mean()
        fooled, grads = jax.value_and_grad(g_loss)(g)
        updates, g_opt = g_tx.update(grads, opts[0], g)
        return optax.apply_updates(g, updates), d, (g_opt, d_opt), key, {"losses": [loss, fooled], "real": real}

    return step, (g, d, (g_tx.init(g), d_tx.init(d)), jax.random.key(13))


@idiom()
def vae(wrap: Wrap) -> Any:
    """Noise of the batch's shape, reconstruction and KL summed over features."""
    params = {"encode": _mlp_params(102, outputs=4), "decode": _mlp_params(103, inputs=2, outputs=6)}

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        mean, log_var = jnp.split(_mlp(p["encode"], batch["x"]), 2, axis=1)
        z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
        error = jnp.sum((_mlp(p["decode"], z) - batch["x"]) ** 2, axis=1)
        kl = jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, axis=1) / 2
        return jnp.mean(error + 0.5 * kl), {"kl": kl.mean(), "z": z}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom()
def diffusion(wrap: Wrap) -> Any:
    """A random time and noise for each example; a moving average of the parameters."""
    tx, params = wrap(_adamw()), _mlp_params(104, inputs=8, outputs=6)
    kept = jnp.cumprod(1 - jnp.linspace(0.01, 0.3, 10))

    def step(params: Any, opt: Any, slow: Any, key: Any, batch: Any) -> Any:
        key, for_time, for_noise = jax.random.split(key, 3)
        time = jax.random.randint(for_time, (batch["x"].shape[0],), 0, 10)
        noise = jax.random.normal(for_noise, batch["x"].shape)
        share = kept[time][:, None]
        angle = time[:, None] * 0.3
        noisy = jnp.sqrt(share) * batch["x"] + jnp.sqrt(1 - share) * noise

        def loss_fn(p: Any) -> Any:
            guess = _mlp(p, jnp.concatenate([noisy, jnp.sin(angle), jnp.cos(angle)], axis=1))
            return jnp.mean((guess - noise) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        return params, opt, optax.incremental_update(params, slow, 0.05), key, (loss, jnp.bincount(time, length=10))

    return step, (params, tx.init(params), _mlp_params(105, inputs=8, outputs=6), jax.random.key(14))


@idiom()
def wgan_gradient_penalty(wrap: Wrap) -> Any:
    """The norm of a gradient by the examples, inside the loss whose gradient trains the critic."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        real, fake = batch["x"], batch["x2"][:, ::-1]
        mix = jax.random.uniform(key, (real.shape[0], 1))
        slope = jax.vmap(jax.grad(lambda x: _mlp(p, x)[0]))(mix * real + (1 - mix) * fake)
        norm = jnp.sqrt(jnp.sum(slope**2, axis=1) + 1e-6)
        return _mlp(p, fake).mean() - _mlp(p, real).mean() + jnp.mean((norm - 1) ** 2), {"norm": norm.max()}

    return _fit_keyed(wrap, _adam(), _mlp_params(106, bias=False), loss_fn)


@idiom()
def flow_slogdet(wrap: Wrap) -> Any:
    """A linear layer's log-determinant and a coupling layer."""
    params = {**_mlp_params(107, inputs=3, outputs=6), "rotate": jnp.eye(6) + 0.2 * _params(108, w=(6, 6))["w"]}

    def loss_fn(p: Any, batch: Any) -> Any:
        h = batch["x"] @ p["rotate"]
        left, right = h[:, :3], h[:, 3:]
        shift, log_scale = jnp.split(_mlp(p, left), 2, axis=1)
        log_scale = jnp.tanh(log_scale)
        z = jnp.concatenate([left, right * jnp.exp(log_scale) + shift], axis=1)
        volume = jnp.linalg.slogdet(p["rotate"])[1] + log_scale.sum(axis=1)
        return jnp.mean(jnp.sum(z**2, axis=1) / 2 - volume), {"volume": volume}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def vq_vae_ema(wrap: Wrap) -> Any:
    """The nearest code of each example; codes follow the means of their examples, by segment_sum."""
    tx = wrap(_adam())
    params = {"encode": _mlp_params(109, outputs=3, bias=False), "decode": _mlp_params(110, inputs=3, outputs=6)}
    codes = {"sum": _params(111, w=(5, 3))["w"], "count": jnp.ones(5)}

    def step(params: Any, opt: Any, codes: Any, batch: Any) -> Any:
        table = codes["sum"] / codes["count"][:, None]

        def loss_fn(p: Any) -> Any:
            z = _mlp(p["encode"], batch["x"])
            index = _squared_distances(z, table).argmin(axis=1)
            quantised = z + lax.stop_gradient(table[index] - z)
            commit = jnp.mean((z - table[index]) ** 2)
            return jnp.mean((_mlp(p["decode"], quantised) - batch["x"]) ** 2) + 0.25 * commit, (z, index)

        (loss, (z, index)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        count = jax.ops.segment_sum(jnp.ones_like(z[:, 0]), index, num_segments=5)
        total = jax.ops.segment_sum(z, index, num_segments=5)
        codes = {"sum": 0.9 * codes["sum"] + 0.1 * total, "count": 0.9 * codes["count"] + 0.1 * count}
        share = count / index.size
        perplexity = jnp.exp(-jnp.sum(share * jnp.log(share + 1e-10)))
        return optax.apply_updates(params, updates), opt, codes, {"loss": loss, "perplexity": perplexity}

    return step, (params, tx.init(params), codes)


@idiom()
def energy_langevin(wrap: Wrap) -> Any:
    """Samples of the model by Langevin steps: gradients by the samples inside lax.fori_loop."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        energy = lambda x: _mlp(p, x)[:, 0] + jnp.sum(x**2, axis=1) / 2

        def move(i: Any, x: Any) -> Any:
            noise = jax.random.normal(jax.random.fold_in(key, i), x.shape)
            return x - 0.1 * jax.grad(lambda x: energy(x).sum())(x) + 0.1 * noise

        sample = lax.stop_gradient(lax.fori_loop(0, 4, move, batch["x2"]))
        return energy(batch["x"]).mean() - energy(sample).mean(), {"sample": sample}

    return _fit_keyed(wrap, _adam(), _mlp_params(112, bias=False), loss_fn)


@idiom()
def sliced_score_matching(wrap: Wrap) -> Any:
    """A random direction for each example, and the derivative along it by jvp."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        direction = jax.random.rademacher(key, batch["x"].shape, jnp.float64)
        score, along = jax.jvp(lambda x: _mlp(p, x), (batch["x"],), (direction,))
        return jnp.mean(jnp.sum(along * direction, axis=1) + jnp.sum(score**2, axis=1) / 2), {}

    return _fit_keyed(wrap, _adam(), _mlp_params(113, outputs=6), loss_fn)


# Mixtures of experts


def _experts(seed: int) -> dict[str, Any]:
    return _params(seed, gate=(6, 4), wide=(4, 6, 5), narrow=(4, 5, 1))


@idiom(coupled=True)
def moe_top1_capacity(wrap: Wrap) -> Any:
    """Each example goes to one expert, if there is room: places are counted by cumsum along the batch."""

    def loss_fn(p: Any, batch: Any) -> Any:
        x = batch["x"]
        gates = jax.nn.softmax(x @ p["gate"])
        chosen = jax.nn.one_hot(gates.argmax(axis=1), 4, dtype=jnp.float64)
        place = (jnp.cumsum(chosen, axis=0) * chosen).sum(axis=1).astype(int) - 1
        room = -(-x.shape[0] // 4)
        send = chosen[:, :, None] * jax.nn.one_hot(place, room, dtype=jnp.float64)[:, None]
        h = jnp.tanh(jnp.einsum("bec,bd,edh->ech", send, x, p["wide"]))
        out = jnp.einsum("bec,be,ech,eho->bo", send, gates, h, p["narrow"])
        balance = 4 * jnp.sum(chosen.mean(axis=0) * gates.mean(axis=0))
        aux = {"balance": balance, "dropped": jnp.sum(place >= room), "load": chosen.sum(axis=0)}
        return jnp.mean((out - batch["y"]) ** 2) + 0.1 * balance, aux

    return _fit(wrap, _adam(), _experts(120), loss_fn)


@idiom(coupled=True)
def moe_top2_soft(wrap: Wrap) -> Any:
    """The two best experts with renormalised gates and noise; the loads' variation is a loss."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        logits = batch["x"] @ p["gate"]
        best, index = lax.top_k(logits + 0.1 * jax.random.normal(key, logits.shape), 2)
        gates = jax.nn.softmax(best)
        spread = jnp.zeros_like(logits).at[jnp.arange(index.shape[0])[:, None], index].set(gates)
        h = jnp.tanh(jnp.einsum("bd,edh->beh", batch["x"], p["wide"]))
        out = jnp.einsum("beh,eho,be->bo", h, p["narrow"], spread)
        load = spread.sum(axis=0)
        return jnp.mean((out - batch["y"]) ** 2) + 0.1 * load.var() / load.mean() ** 2, {"index": index}

    return _fit_keyed(wrap, _adamw(), _experts(121), loss_fn)


@idiom(coupled=True)
def moe_expert_choice(wrap: Wrap) -> Any:
    """Each expert takes the examples it scores highest, by top_k over the batch."""

    def loss_fn(p: Any, batch: Any) -> Any:
        x = batch["x"]
        scores = jax.nn.softmax(x @ p["gate"])
        gates, index = lax.top_k(scores.T, x.shape[0] // 2)
        out = jnp.einsum("ech,eho->eco", jnp.tanh(jnp.einsum("ecd,edh->ech", x[index], p["wide"])), p["narrow"])
        out = jnp.zeros((x.shape[0], 1)).at[index.reshape(-1)].add((gates[..., None] * out).reshape(-1, 1))
        return jnp.mean((out - batch["y"]) ** 2), {"taken": jnp.bincount(index.reshape(-1), length=x.shape[0])}

    return _fit(wrap, _sgd(), _experts(122), loss_fn)


# Gradients of single examples, and of steps


def _clipped(grads: Any, limit: float) -> Any:
    """Gradients of one example, scaled to a norm of at most `limit`."""
    norm = optax.global_norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / norm), grads), norm


def _one_loss(p: Any, x: Any, y: Any) -> Any:
    return jnp.sum((_mlp(p, x) - y) ** 2)


@idiom()
def private_vmap(wrap: Wrap) -> Any:
    """Differential privacy: gradients of the examples by vmap, each clipped, summed, and noise."""
    tx, params = wrap(_sgd()), _mlp_params(130)

    def step(params: Any, opt: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        grads = jax.vmap(jax.grad(_one_loss), in_axes=(None, 0, 0))(params, batch["x"], batch["y"])
        grads, norms = jax.vmap(lambda g: _clipped(g, 1.0))(grads)
        leaves, tree = jax.tree.flatten(grads)
        keys = jax.random.split(now, len(leaves))
        leaves = [
            (g.sum(axis=0) + 0.3 * jax.random.normal(k, g.shape[1:])) / g.shape[0]
            for g, k in zip(leaves, keys, strict=True)
        ]
        updates, opt = tx.update(jax.tree.unflatten(tree, leaves), opt, params)
        return optax.apply_updates(params, updates), opt, key, {"norms": norms, "clipped": jnp.sum(norms > 1)}

    return step, (params, tx.init(params), jax.random.key(15))


@idiom()
def private_map(wrap: Wrap) -> Any:
    """The same one example after the other, by lax.map."""
    tx, params = wrap(_adam()), _mlp_params(131)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        one = lambda example: _clipped(jax.grad(_one_loss)(params, *example), 1.5)
        grads, norms = lax.map(one, (batch["x"], batch["y"]))
        updates, opt = tx.update(jax.tree.map(lambda g: g.mean(axis=0), grads), opt, params)
        return optax.apply_updates(params, updates), opt, {"median": jnp.median(norms), "largest": norms.max()}

    return step, (params, tx.init(params))


@idiom()
def maml(wrap: Wrap) -> Any:
    """Each example is a task: an inner gradient step on its first times, the loss on its last."""

    def task(p: Any, series: Any) -> Any:
        loss = lambda p, part: jnp.mean((_mlp(p, part[:, :2]) - part[:, 2:]) ** 2)
        adapted = _axpy(-0.05, jax.grad(loss)(p, series[:3]), p)
        return loss(adapted, series[3:])

    def loss_fn(p: Any, batch: Any) -> Any:
        losses = jax.vmap(task, in_axes=(None, 0))(p, batch["series"])
        return losses.mean(), {"losses": losses}

    return _fit(wrap, _adam(), _mlp_params(132, inputs=2), loss_fn)


@idiom(coupled=True, divisible=True)
def reptile(wrap: Wrap) -> Any:
    """Some steps of descent on quarters of the batch; the parameters move towards where that ends."""
    del wrap
    params = _mlp_params(133)

    def step(params: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), (batch["x"], batch["y"]))

        def descend(p: Any, part: Any) -> Any:
            x, y = part
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, x) - y) ** 2))(p)
            return _axpy(-0.05, grads, p), loss

        end, losses = lax.scan(descend, params, parts)
        return jax.tree.map(lambda p, e: p + 0.5 * (e - p), params, end), losses

    return step, (params,)


@idiom(coupled=True)
def learnt_example_weights(wrap: Wrap) -> Any:
    """Weights of the examples, from the gradient by them of a loss after one step with those weights."""
    tx, params = wrap(_sgd()), _mlp_params(134)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        def weighted(p: Any, weight: Any) -> Any:
            return jnp.sum(weight * jnp.sum((_mlp(p, batch["x"]) - batch["y"]) ** 2, axis=1))

        def after(weight: Any) -> Any:
            ahead = _axpy(-0.1, jax.grad(weighted)(params, weight), params)
            return jnp.sum(batch["mask"][:, None] * (_mlp(ahead, batch["x2"]) - batch["y"]) ** 2)

        even = jnp.full(batch["x"].shape[0], 1 / batch["x"].shape[0])
        weight = jax.nn.softplus(-0.1 * jax.grad(after)(even))
        weight = weight / weight.sum()
        loss, grads = jax.value_and_grad(weighted)(params, weight)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, {"loss": loss, "weight": weight}

    return step, (params, tx.init(params))


@idiom(coupled=True)
def natural_gradient(wrap: Wrap) -> Any:
    """The batch's Fisher matrix of a small model, solved for."""
    tx, params = wrap(_sgd(0.1)), _params(135, w=(6, 1))["w"]

    def step(w: Any, opt: Any, batch: Any) -> Any:
        one = lambda w, x, r: optax.sigmoid_binary_cross_entropy((x @ w)[0], (r > 0).astype(jnp.float64))
        grads = jax.vmap(jax.grad(one), in_axes=(None, 0, 0))(w, batch["x"], batch["reward"])[:, :, 0]
        fisher = grads.T @ grads / grads.shape[0] + 0.3 * jnp.eye(6)
        direction = jnp.linalg.solve(fisher, grads.mean(axis=0))[:, None]
        updates, opt = tx.update(direction, opt, w)
        return optax.apply_updates(w, updates), opt, {"fisher": fisher, "direction": direction}

    return step, (params, tx.init(params))


@idiom(coupled=True)
def newton_cg(wrap: Wrap) -> Any:
    """Conjugate gradients on Hessian-vector products of the batch's loss; no optimizer."""
    del wrap
    params = _mlp_params(136, hidden=5)

    def step(params: Any, batch: Any) -> Any:
        loss_fn = lambda p: jnp.mean(jax.nn.softplus(-_mlp(p, batch["x"])[:, 0] * jnp.tanh(batch["reward"])))
        loss, grads = jax.value_and_grad(loss_fn)(params)

        def product(v: Any) -> Any:
            return _axpy(2.0, v, jax.jvp(jax.grad(loss_fn), (params,), (v,))[1])

        def turn(_: Any, carry: Any) -> Any:
            x, r, d = carry
            hd = product(d)
            size = _dot(r, r) / (_dot(d, hd) + 1e-12)
            x, new = _axpy(size, d, x), _axpy(-size, hd, r)
            return x, new, _axpy(_dot(new, new) / (_dot(r, r) + 1e-12), d, new)

        zeros = jax.tree.map(jnp.zeros_like, params)
        direction, residual, _ = lax.fori_loop(0, 3, turn, (zeros, grads, grads))
        return _axpy(-1.0, direction, params), {"loss": loss, "residual": optax.global_norm(residual)}

    return step, (params,)


# Statistics of the batch


@idiom(coupled=True)
def masked_mean(wrap: Wrap) -> Any:
    """The mean over the examples that a mask lets count, which are spread unevenly."""

    def loss_fn(p: Any, batch: Any) -> Any:
        errors = jnp.sum((_mlp(p, batch["x"]) - batch["y"]) ** 2, axis=1)
        mask = batch["mask"]
        return jnp.sum(errors * mask) / jnp.sum(mask), {"count": mask.sum(), "worst": jnp.max(errors * mask)}

    return _fit(wrap, _adam(), _mlp_params(140), loss_fn)


@idiom(coupled=True)
def weighted_average(wrap: Wrap) -> Any:
    """jnp.average with weights, and a where argument to mean."""

    def loss_fn(p: Any, batch: Any) -> Any:
        losses = _xent(_mlp(p, batch["x"]), batch["label"])
        rare = jnp.mean(losses, where=batch["label"] > 0)
        return jnp.average(losses, weights=batch["weight"]) + 0.3 * rare, {"rare": rare}

    return _fit(wrap, _sgd(), _mlp_params(141, outputs=CLASSES), loss_fn)


@idiom(coupled=True)
def quantile_clipping(wrap: Wrap) -> Any:
    """Losses clipped at a quantile of the batch; deviations measured by the median's."""

    def loss_fn(p: Any, batch: Any) -> Any:
        error = (_mlp(p, batch["x"]) - batch["y"])[:, 0]
        spread = lax.stop_gradient(jnp.median(jnp.abs(error - jnp.median(error))))
        losses = optax.huber_loss(error / (spread + 0.1))
        limit = lax.stop_gradient(jnp.quantile(losses, 0.8))
        return jnp.minimum(losses, limit).mean(), {"limit": limit, "spread": spread}

    return _fit(wrap, _adam(), _mlp_params(142), loss_fn)


@idiom(coupled=True)
def histogram_labels(wrap: Wrap) -> Any:
    """How often each label has come so far adjusts the logits; a histogram of the outputs goes out."""
    tx, params = wrap(_adam()), _mlp_params(143, outputs=CLASSES)

    def step(params: Any, opt: Any, counts: Any, batch: Any) -> Any:
        counts = counts + jnp.bincount(batch["label"], length=CLASSES)

        def loss_fn(p: Any) -> Any:
            logits = _mlp(p, batch["x"]) + jnp.log(counts / counts.sum() + 1e-2)
            return _xent(logits, batch["label"]).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        histogram = jnp.histogram(logits, bins=8, range=(-4.0, 2.0))[0]
        return optax.apply_updates(params, updates), opt, counts, {"loss": loss, "histogram": histogram}

    return step, (params, tx.init(params), jnp.zeros(CLASSES, int))


@idiom(coupled=True)
def running_max_min(wrap: Wrap) -> Any:
    """Features scaled by the range seen so far, this batch's included."""
    tx, params = wrap(_adam()), _mlp_params(144)

    def step(params: Any, opt: Any, seen: Any, batch: Any) -> Any:
        x = batch["x"]
        low, high = jnp.minimum(seen["low"], x.min(axis=0)), jnp.maximum(seen["high"], x.max(axis=0))
        x = 2 * (x - low) / (high - low) - 1
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, x) - batch["y"]) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, {"low": low, "high": high}, loss

    return step, (params, tx.init(params), {"low": jnp.full(6, 1e-3), "high": jnp.full(6, 2e-3)})


@idiom(coupled=True)
def running_moments(wrap: Wrap) -> Any:
    """Mean and variance over all batches so far, combined by counts; they normalise this batch."""
    tx, params = wrap(_sgd()), _mlp_params(145)

    def step(params: Any, opt: Any, seen: Any, batch: Any) -> Any:
        x = batch["x"]
        count = seen["count"] + x.shape[0]
        delta = x.mean(axis=0) - seen["mean"]
        mean = seen["mean"] + delta * x.shape[0] / count
        squares = seen["squares"] + x.var(axis=0) * x.shape[0] + delta**2 * seen["count"] * x.shape[0] / count
        x = (x - mean) / jnp.sqrt(squares / count + 1e-2)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, x) - batch["y"]) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        seen = {"count": count, "mean": mean, "squares": squares}
        return optax.apply_updates(params, updates), opt, seen, loss

    seen = {"count": jnp.zeros((), int), "mean": jnp.zeros(6), "squares": jnp.zeros(6)}
    return step, (params, tx.init(params), seen)


@idiom()
def examples_seen_schedule(wrap: Wrap) -> Any:
    """No optimizer: the rate falls with the examples seen, which the state counts by the batch's shape."""
    del wrap

    def step(params: Any, seen: Any, batch: Any) -> Any:
        seen = seen + batch["x"].shape[0]
        rate = 0.2 / jnp.sqrt(1 + seen / 16)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, batch["x"]) - batch["y"]) ** 2))(params)
        return _axpy(-rate, grads, params), seen, {"loss": loss, "rate": rate, "last": batch["id"].max()}

    return step, (_mlp_params(146), jnp.zeros((), int))


@idiom()
def confusion_matrix(wrap: Wrap) -> Any:
    """Predictions against labels, scatter-added into integer state."""
    tx, params = wrap(_adam()), _mlp_params(147, outputs=CLASSES)

    def step(params: Any, opt: Any, matrix: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            logits = _mlp(p, batch["x"])
            return _xent(logits, batch["label"]).mean(), logits.argmax(axis=1)

        (loss, guess), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        matrix = matrix.at[batch["label"], guess].add(1)
        recall = jnp.diag(matrix) / jnp.maximum(matrix.sum(axis=1), 1)
        return optax.apply_updates(params, updates), opt, matrix, {"loss": loss, "recall": recall}

    return step, (params, tx.init(params), jnp.zeros((CLASSES, CLASSES), jnp.int32))


@idiom(coupled=True)
def class_balanced_weights(wrap: Wrap) -> Any:
    """Each example weighs as much as its label is rare in the batch."""

    def loss_fn(p: Any, batch: Any) -> Any:
        label = batch["label"]
        count = jax.nn.one_hot(label, CLASSES, dtype=jnp.float64).sum(axis=0)
        weight = (label.size / (CLASSES * jnp.maximum(count, 1)))[label]
        return jnp.mean(weight * _xent(_mlp(p, batch["x"]), label)), {"weight": weight}

    return _fit(wrap, _adamw(), _mlp_params(148, outputs=CLASSES), loss_fn)


@idiom(coupled=True)
def whitening_cholesky(wrap: Wrap) -> Any:
    """Features made uncorrelated over the batch by a triangular solve."""
    params = {"net": _mlp_params(149, outputs=3, bias=False), "out": _params(150, w=(3, 1))["w"]}

    def loss_fn(p: Any, batch: Any) -> Any:
        z = _mlp(p["net"], batch["x"])
        z = z - z.mean(axis=0)
        factor = jnp.linalg.cholesky(z.T @ z / z.shape[0] + 0.1 * jnp.eye(3))
        white = jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T
        return jnp.mean((white @ p["out"] - batch["y"]) ** 2), {"factor": factor}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def covariance_eigh(wrap: Wrap) -> Any:
    """A loss of the eigenvalues of the features' covariance."""

    def loss_fn(p: Any, batch: Any) -> Any:
        cov = jnp.cov(_mlp(p, batch["x"]), rowvar=False)
        values, vectors = jnp.linalg.eigh(cov + 0.2 * jnp.eye(3))
        return jnp.sum(jnp.log(values) ** 2), {"values": values, "main": vectors[:, -1] ** 2}

    return _fit(wrap, _adam(), _mlp_params(151, outputs=3, bias=False), loss_fn)


@idiom(coupled=True)
def concordance_loss(wrap: Wrap) -> Any:
    """One minus the concordance correlation, plus the root of the mean squared error."""

    def loss_fn(p: Any, batch: Any) -> Any:
        a, b = _mlp(p, batch["x"])[:, 0], batch["y"][:, 0]
        covariance = jnp.mean((a - a.mean()) * (b - b.mean()))
        ccc = 2 * covariance / (a.var() + b.var() + (a.mean() - b.mean()) ** 2)
        return 1 - ccc + jnp.sqrt(jnp.mean((a - b) ** 2)), {"ccc": ccc}

    return _fit(wrap, _sgd(), _mlp_params(152), loss_fn)


@idiom(coupled=True)
def spearman_double_argsort(wrap: Wrap) -> Any:
    """Ranks by argsort of argsort: of targets as weights, of predictions for a rank correlation."""

    def loss_fn(p: Any, batch: Any) -> Any:
        out, y = _mlp(p, batch["x"])[:, 0], batch["y"][:, 0]
        ranks = lambda v: jnp.argsort(jnp.argsort(v))
        a, b = ranks(out), ranks(y)
        spearman = 1 - 6 * jnp.sum((a - b) ** 2) / (a.size * (a.size**2 - 1))
        return jnp.mean((b + 1) / b.size * (out - y) ** 2), {"ranks": a, "spearman": spearman}

    return _fit(wrap, _adam(), _mlp_params(153), loss_fn)


@idiom(coupled=True)
def ridge_head(wrap: Wrap) -> Any:
    """The last layer is the least squares solution of the batch, differentiated through."""

    def loss_fn(p: Any, batch: Any) -> Any:
        h, other = _mlp(p, batch["x"]), _mlp(p, batch["x2"])
        w = jnp.linalg.solve(h.T @ h + jnp.eye(5), h.T @ batch["y"])
        return jnp.mean((other @ w - batch["y"]) ** 2), {"w": w}

    return _fit(wrap, _adam(), _mlp_params(154, outputs=5), loss_fn)


@idiom(coupled=True)
def group_robust(wrap: Wrap) -> Any:
    """Weights of groups are state and grow with the groups' mean losses."""
    tx, params = wrap(_sgd()), _mlp_params(155)

    def step(params: Any, opt: Any, weights: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            losses = jnp.tanh(jnp.sum((_mlp(p, batch["x"]) - batch["y"]) ** 2, axis=1))
            members = jax.nn.one_hot(batch["group"], 2, dtype=jnp.float64)
            by_group = losses @ members / jnp.maximum(members.sum(axis=0), 1)
            new = jax.nn.softmax(jnp.log(weights) + lax.stop_gradient(by_group))
            return new @ by_group, (new, by_group)

        (loss, (weights, by_group)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, weights, {"loss": loss, "groups": by_group}

    return step, (params, tx.init(params), jnp.full(2, 0.5))


@idiom(coupled=True)
def tilted_loss(wrap: Wrap) -> Any:
    """A logsumexp over the batch between the mean and the largest loss."""

    def loss_fn(p: Any, batch: Any) -> Any:
        losses = _xent(_mlp(p, batch["x"]), batch["label"])
        return jax.nn.logsumexp(2 * losses, b=1 / losses.size) / 2, {"share": jax.nn.softmax(2 * losses)}

    return _fit(wrap, _adam(), _mlp_params(156, outputs=CLASSES), loss_fn)


@idiom(coupled=True)
def curriculum(wrap: Wrap) -> Any:
    """The easiest examples count, more at every step: ranks of losses against a counter."""
    tx, params = wrap(_adam()), _mlp_params(157)

    def step(params: Any, opt: Any, count: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            losses = jnp.sum((_mlp(p, batch["x"]) - batch["y"]) ** 2, axis=1)
            easy = jnp.argsort(jnp.argsort(losses)) < 5 + 3 * count
            return jnp.sum(losses * easy) / easy.sum(), easy

        (loss, easy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, count + 1, {"loss": loss, "easy": easy}

    return step, (params, tx.init(params), jnp.zeros((), jnp.int32))


@idiom(coupled=True)
def scaled_by_largest(wrap: Wrap) -> Any:
    """Features divided by the largest of the batch, targets standardised."""

    def loss_fn(p: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] / jnp.abs(batch["x"]).max() @ p["w1"] + p["b1"])
        h = h / jnp.max(jnp.linalg.norm(h, axis=1))
        y = (batch["y"] - batch["y"].mean()) / batch["y"].std(ddof=1)
        return jnp.mean((h @ p["w2"] + p["b2"] - y) ** 2), {}

    return _fit(wrap, _adam(), _mlp_params(158), loss_fn)


@idiom(coupled=True)
def batch_attention(wrap: Wrap) -> Any:
    """Every example attends to every other of the batch."""
    params = {**_mlp_params(159), **_params(160, query=(6, 4), key=(6, 4), value=(6, 6))}

    def loss_fn(p: Any, batch: Any) -> Any:
        x = batch["x"]
        weights = jax.nn.softmax(x @ p["query"] @ (x @ p["key"]).T / 4 - 1e9 * jnp.eye(x.shape[0]))
        out = _mlp(p, x + weights @ x @ p["value"])
        return jnp.mean((out - batch["y"]) ** 2), {"attended": weights.sum(axis=0)}

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom(coupled=True)
def graph_messages(wrap: Wrap) -> Any:
    """Examples are nodes: messages gathered from neighbours, then scattered back to them."""
    params = _params(161, own=(6, 8), near=(6, 8), far=(8, 8), head=(8, CLASSES))

    def loss_fn(p: Any, batch: Any) -> Any:
        x, ends = batch["x"], batch["neighbour"]
        h = jnp.tanh(x @ p["own"] + x[ends].mean(axis=1) @ p["near"])
        degree = jnp.zeros(x.shape[0]).at[ends].add(1.0)
        got = jax.ops.segment_sum(jnp.repeat(h, 2, axis=0), ends.reshape(-1), x.shape[0])
        h = h + jnp.tanh(got @ p["far"] / jnp.sqrt(1 + degree)[:, None])
        pooled = jax.ops.segment_max(h, batch["group"], 2, indices_are_sorted=False)
        pooled = jnp.where(jnp.isfinite(pooled), pooled, 0.0)
        return _xent((h + pooled[batch["group"]]) @ p["head"], batch["label"]).mean(), {"degree": degree}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom(coupled=True)
def consecutive_differences(wrap: Wrap) -> Any:
    """Neighbours in the batch: slices shifted by one, and a moving average along it."""

    def loss_fn(p: Any, batch: Any) -> Any:
        z = _mlp(p, batch["x"])
        change = z[1:] - z[:-1]
        smooth = jnp.convolve(z[:, 0], jnp.array([0.25, 0.5, 0.25]), mode="same")
        return jnp.mean((change - jnp.diff(batch["y"], axis=0)) ** 2) + jnp.mean((smooth - batch["reward"]) ** 2), {}

    return _fit(wrap, _sgd(), _mlp_params(162), loss_fn)


@idiom(coupled=True)
def train_validation_split(wrap: Wrap) -> Any:
    """The last quarter is kept for validation; the best parameters so far are state."""
    tx, params = wrap(_adam()), _mlp_params(163)

    def step(params: Any, opt: Any, best: Any, batch: Any) -> Any:
        cut = batch["x"].shape[0] - batch["x"].shape[0] // 4
        loss_fn = lambda p, part: jnp.mean((_mlp(p, batch["x"][part]) - jnp.tanh(batch["y"][part])) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(params, slice(cut))
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        validation = loss_fn(params, slice(cut, None))
        better = validation < best["loss"]
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), {"loss": validation, "params": params}, best)
        return params, opt, best, {"loss": loss, "better": better}

    return step, (params, tx.init(params), {"loss": jnp.full((), 1e3), "params": params})


@idiom(coupled=True)
def bootstrap_resample(wrap: Wrap) -> Any:
    """The batch resampled: once evenly, once by weight."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        first, second = jax.random.split(key)
        size = batch["x"].shape[0]
        even = jax.random.randint(first, (size,), 0, size)
        weighted = jax.random.categorical(second, jnp.log(batch["weight"]), shape=(size,))
        x, y = jnp.concatenate([batch["x"][even], batch["x2"][weighted]]), batch["y"][jnp.append(even, weighted)]
        return jnp.mean((_mlp(p, x) - y) ** 2), {"weighted": weighted}

    return _fit_keyed(wrap, _adam(), _mlp_params(164), loss_fn)


@idiom(coupled=True)
def mixture_em(wrap: Wrap) -> Any:
    """No gradients: a turn of expectation and maximisation for a Gaussian mixture."""
    del wrap
    state = {"mean": _params(165, w=(3, 6))["w"], "var": jnp.ones((3, 6)), "weight": jnp.array([0.2, 0.3, 0.5])}

    def step(state: Any, batch: Any) -> Any:
        x = batch["x"][:, None]
        logp = -jnp.sum((x - state["mean"]) ** 2 / state["var"] + jnp.log(state["var"]), axis=2) / 2
        logp = logp + jnp.log(state["weight"])
        share = jax.nn.softmax(logp)
        total = share.sum(axis=0) + 1.0
        mean = (share.T @ batch["x"] + state["mean"]) / total[:, None]
        var = (jnp.einsum("bk,bkd->kd", share, (x - mean) ** 2) + 1.0) / total[:, None]
        return {"mean": mean, "var": var, "weight": total / total.sum()}, jax.nn.logsumexp(logp, axis=1).mean()

    return step, (state,)


@idiom(coupled=True)
def online_scan(wrap: Wrap) -> Any:
    """No batches: lax.scan along the examples, each a descent step that the next one sees."""
    del wrap

    def step(params: Any, batch: Any) -> Any:
        def one(p: Any, example: Any) -> Any:
            loss, grads = jax.value_and_grad(_one_loss)(p, *example)
            return _axpy(-0.02, grads, p), loss

        params, losses = lax.scan(one, params, (batch["x"], jnp.tanh(batch["y"])))
        return params, {"losses": losses, "regret": jnp.cumsum(losses)[-1]}

    return step, (_mlp_params(166, hidden=5),)


# Ways to optimise


@idiom(divisible=True)
def gradient_accumulation(wrap: Wrap) -> Any:
    """The step's own accumulation: lax.scan over quarters of the batch."""
    tx, params = wrap(_adamw()), _mlp_params(170)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        parts = {name: batch[name].reshape(4, -1, *batch[name].shape[1:]) for name in ("x", "y")}

        def one(total: Any, part: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, part["x"]) - part["y"]) ** 2))(params)
            return _axpy(0.25, grads, total), loss

        grads, losses = lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, {"losses": losses, "loss": losses.mean()}

    return step, (params, tx.init(params))


@idiom(divisible=True, coupled=True)
def accumulation_contrastive(wrap: Wrap) -> Any:
    """Parts of every fourth example, each with a contrastive loss of its own and a key folded from its number."""
    tx, params = wrap(_adam()), _mlp_params(171, outputs=5, bias=False)

    def step(params: Any, opt: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        parts = jnp.swapaxes(batch["x"].reshape(-1, 4, 6), 0, 1)

        def loss_fn(p: Any, i: Any, x: Any) -> Any:
            noise = 0.1 * jax.random.normal(jax.random.fold_in(now, i), x.shape)
            logits = _unit(_mlp(p, x)) @ _unit(_mlp(p, x + noise)).T / 0.3
            return _xent(logits, jnp.arange(x.shape[0])).mean()

        def one(i: Any, carry: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, i, parts[i])
            return carry[0] + loss / 4, _axpy(0.25, grads, carry[1])

        loss, grads = lax.fori_loop(0, 4, one, (0.0, jax.tree.map(jnp.zeros_like, params)))
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, key, loss

    return step, (params, tx.init(params), jax.random.key(16))


@idiom(coupled=True)
def sharpness_aware(wrap: Wrap) -> Any:
    """The gradient where the batch's own gradient leads uphill."""
    tx, params = wrap(_sgd()), _mlp_params(172)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        loss_fn = lambda p: jnp.mean((_mlp(p, batch["x"]) - batch["y"]) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        uphill = _axpy(0.1 / optax.global_norm(grads), grads, params)
        updates, opt = tx.update(jax.grad(loss_fn)(uphill), opt, params)
        return optax.apply_updates(params, updates), opt, {"loss": loss, "norm": optax.global_norm(grads)}

    return step, (params, tx.init(params))


@idiom()
def lookahead_ema(wrap: Wrap) -> Any:
    """Slow weights taken over every second step, and a moving average of the parameters with its bias corrected."""
    tx, params = wrap(_adam()), _mlp_params(173)

    def step(params: Any, opt: Any, slow: Any, ema: Any, count: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, batch["x"]) - batch["y"]) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        params, count = optax.apply_updates(params, updates), count + 1
        sync = count % 2 == 0
        slow = jax.tree.map(lambda s, p: jnp.where(sync, s + 0.5 * (p - s), s), slow, params)
        params = jax.tree.map(lambda s, p: jnp.where(sync, s, p), slow, params)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)
        average = jax.tree.map(lambda e: e / (1 - 0.9**count), ema)
        error = jnp.mean((_mlp(average, batch["x"]) - batch["y"]) ** 2)
        return params, opt, slow, ema, count, {"loss": loss, "average": error}

    zeros = jax.tree.map(jnp.zeros_like, params)
    return step, (params, tx.init(params), params, zeros, jnp.zeros((), jnp.int32))


@idiom(divisible=True, coupled=True)
def gradient_noise_scale(wrap: Wrap) -> Any:
    """Norms of the gradients of the halves of the batch and of the whole, averaged in the state."""
    tx, params = wrap(_adam()), _mlp_params(174)

    def step(params: Any, opt: Any, noise: Any, batch: Any) -> Any:
        size = batch["x"].shape[0]
        loss_fn = lambda p, part: jnp.mean((_mlp(p, batch["x"][part]) - batch["y"][part]) ** 2)
        halves = [jax.grad(loss_fn)(params, part) for part in (slice(size // 2), slice(size // 2, None))]
        grads = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
        small, big = sum(_dot(g, g) for g in halves) / 2, _dot(grads, grads)
        noise = {
            "signal": 0.8 * noise["signal"] + 0.2 * (2 * big - small),
            "noise": 0.8 * noise["noise"] + 0.2 * size * (small - big),
        }
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, noise, {"small": small, "big": big}

    return step, (params, tx.init(params), {"signal": jnp.full((), 1.0), "noise": jnp.full((), 1.0)})


@idiom(coupled=True)
def line_search(wrap: Wrap) -> Any:
    """No optimizer: the rate is halved by while_loop until the batch's loss falls enough."""
    del wrap

    def step(params: Any, batch: Any) -> Any:
        loss_fn = lambda p: jnp.mean((_mlp(p, batch["x"]) - batch["y"]) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        square = _dot(grads, grads)
        short = lambda rate: loss_fn(_axpy(-rate, grads, params)) > loss - 0.3 * rate * square
        rate = lax.while_loop(short, lambda rate: rate / 2, jnp.full((), 4.0))
        return _axpy(-rate, grads, params), {"loss": loss, "rate": rate}

    return step, (_mlp_params(175),)


@idiom()
def loss_scaling(wrap: Wrap) -> Any:
    """A scaled loss; the step is skipped by select and the scale lowered where a gradient isn't finite, as at first."""
    tx, params = wrap(_adam()), _mlp_params(176)

    def step(params: Any, opt: Any, scale: Any, good: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            loss = jnp.mean((_mlp(p, batch["x"]) - 1e3 * batch["y"]) ** 2)
            return loss * scale, loss

        grads, loss = jax.grad(loss_fn, has_aux=True)(params)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, new_opt = tx.update(jax.tree.map(lambda g: g / scale, grads), opt, params)
        new_params = optax.apply_updates(params, updates)
        take = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        good = jnp.where(finite, good + 1, 0)
        scale = jnp.where(finite, jnp.where(good % 2 == 0, scale * 2, scale), scale * 2.0**-1000)
        return take(new_params, params), take(new_opt, opt), scale, good, {"loss": loss, "finite": finite}

    return step, (params, tx.init(params), jnp.full((), 2.0**1020), jnp.zeros((), jnp.int32))


@idiom()
def adversarial_examples(wrap: Wrap) -> Any:
    """Projected steps up the loss by the batch itself, from a random start; clean and attacked losses."""

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        x = batch["x"]
        attack_loss = lambda moved: _xent(_mlp(lax.stop_gradient(p), x + moved), batch["label"]).mean()

        def move(_: Any, moved: Any) -> Any:
            return jnp.clip(moved + 0.05 * jnp.sign(jax.grad(attack_loss)(moved)), -0.1, 0.1)

        moved = lax.fori_loop(0, 3, move, jax.random.uniform(key, x.shape, minval=-0.1, maxval=0.1))
        clean = _xent(_mlp(p, x), batch["label"]).mean()
        attacked = _xent(_mlp(p, x + moved), batch["label"]).mean()
        return (clean + attacked) / 2, {"clean": clean, "moved": moved}

    return _fit_keyed(wrap, _sgd(), _mlp_params(177, outputs=CLASSES), loss_fn)


@jax.custom_vjp
def _reverse(x: Any) -> Any:
    return x


_reverse.defvjp(lambda x: (x, None), lambda _, g: (jax.tree.map(lambda a: -0.5 * a, g),))


@idiom()
def gradient_reversal(wrap: Wrap) -> Any:
    """A custom derivative: features are trained against a classifier of the group."""
    params = {
        "net": _mlp_params(178, outputs=5),
        "task": _mlp_params(179, inputs=5),
        "group": _mlp_params(180, inputs=5),
    }

    def loss_fn(p: Any, batch: Any) -> Any:
        h = _mlp(p["net"], batch["x"])
        task = jnp.mean((_mlp(p["task"], h) - batch["y"]) ** 2)
        logits = _mlp(p["group"], _reverse(h))[:, 0]
        return task + optax.sigmoid_binary_cross_entropy(logits, batch["group"]).mean(), {"task": task}

    return _fit(wrap, _adam(), params, loss_fn)


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


@idiom(coupled=True)
def deep_equilibrium(wrap: Wrap) -> Any:
    """A fixed point by while_loop until the whole batch has settled, and its implicit derivative."""
    params = _params(181, inner=(5, 5), x=(6, 5), bias=(5,), out=(5, 1))

    def loss_fn(p: Any, batch: Any) -> Any:
        z = _equilibrium({name: p[name] for name in ("inner", "x", "bias")}, batch["x"])
        return jnp.mean((z @ p["out"] - batch["y"]) ** 2), {"z": z}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom()
def neural_ode(wrap: Wrap) -> Any:
    """Runge-Kutta steps in lax.scan, rematerialised."""

    def loss_fn(p: Any, batch: Any) -> Any:
        @jax.checkpoint
        def advance(x: Any, _: Any) -> Any:
            a = _mlp(p, x)
            b = _mlp(p, x + 0.125 * a)
            c = _mlp(p, x + 0.25 * b)
            return x + (a + 2 * b + 2 * c) / 24, jnp.abs(x).max()

        x, largest = lax.scan(advance, batch["x"], None, length=4)
        return jnp.mean((x - batch["next_x"]) ** 2), {"largest": largest}

    return _fit(wrap, _sgd(), _mlp_params(182, outputs=6), loss_fn)


@idiom()
def fourier_layer(wrap: Wrap) -> Any:
    """Weights on the frequencies of each series, by the real Fourier transform."""
    params = _params(183, real=(3, 3, 5), imaginary=(3, 3, 5), out=(5, 1))

    def loss_fn(p: Any, batch: Any) -> Any:
        spectrum = jnp.fft.rfft(batch["series"], axis=1)
        mixed = jnp.einsum("bfc,fch->bfh", spectrum, lax.complex(p["real"], p["imaginary"]))
        h = jnp.tanh(jnp.fft.irfft(mixed, n=5, axis=1))
        power = jnp.mean(jnp.abs(spectrum) ** 2, axis=(0, 2))
        return jnp.mean((h @ p["out"] - batch["rewards"][:, :, None]) ** 2), {"power": power, "spectrum": spectrum}

    return _fit(wrap, _adam(), params, loss_fn)


@idiom()
def linear_recurrence(wrap: Wrap) -> Any:
    """A state space layer by lax.associative_scan over time."""
    params = _params(184, x=(3, 8), decay=(8,), out=(8, 1))

    def loss_fn(p: Any, batch: Any) -> Any:
        inputs = batch["series"] @ p["x"]
        decay = jnp.broadcast_to(jax.nn.sigmoid(1 + p["decay"]), inputs.shape)
        join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        _, h = lax.associative_scan(join, (decay, inputs), axis=1)
        return jnp.mean((jnp.tanh(h) @ p["out"] - batch["rewards"][:, :, None]) ** 2), {"last": h[:, -1]}

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom()
def random_branch(wrap: Wrap) -> Any:
    """One way to augment for the whole batch by lax.switch on a draw, and one for each example under vmap."""
    ways = [lambda x: x, lambda x: x[..., ::-1], lambda x: jnp.roll(x, 2, axis=-1) * 0.9]

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        way = jax.random.randint(key, (), 0, 3)
        x = lax.switch(way, ways, batch["x"])
        x = x + jax.vmap(lambda i, x: lax.switch(i, ways, x))(batch["action"], batch["x2"])
        return jnp.mean((_mlp(p, x) - batch["y"]) ** 2), {"way": way}

    return _fit_keyed(wrap, _adam(), _mlp_params(185), loss_fn)


@idiom()
def ensemble(wrap: Wrap) -> Any:
    """Members in a leading axis by vmap, each with a random choice of the examples; they disagree in the aux."""
    members = [_mlp_params(186 + i) for i in range(3)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        chosen = jax.random.bernoulli(key, 0.7, (3, batch["x"].shape[0], 1))
        out = jax.vmap(_mlp, in_axes=(0, None))(p, batch["x"])
        return jnp.mean(chosen * (out - batch["y"]) ** 2), {"spread": out.std(axis=0).mean(), "chosen": chosen.sum()}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom()
def spectral_norm(wrap: Wrap) -> Any:
    """A layer divided by its largest singular value, from power iteration on a vector in the state."""
    tx, params = wrap(_sgd()), _mlp_params(190)

    def step(params: Any, opt: Any, u: Any, batch: Any) -> Any:
        v = _unit(params["w1"].T @ u)
        u = _unit(params["w1"] @ v)

        def loss_fn(p: Any) -> Any:
            sigma = lax.stop_gradient(u) @ p["w1"] @ lax.stop_gradient(v)
            return jnp.mean((_mlp({**p, "w1": p["w1"] / sigma}, batch["x"]) - batch["y"]) ** 2), sigma

        (loss, sigma), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, u, {"loss": loss, "sigma": sigma}

    return step, (params, tx.init(params), jnp.full(6, 6**-0.5))


@idiom(coupled=True)
def conflicting_tasks(wrap: Wrap) -> Any:
    """Gradients of two losses of the batch; where they conflict, each loses its part along the other."""
    tx, params = wrap(_adam()), _mlp_params(191, outputs=2)

    def step(params: Any, opt: Any, batch: Any) -> Any:
        first = jax.grad(lambda p: jnp.mean((_mlp(p, batch["x"])[:, :1] - batch["y"]) ** 2))(params)
        second = jax.grad(lambda p: jnp.mean((_mlp(p, batch["x2"])[:, 0] + 3 * batch["y"][:, 0]) ** 2))(params)
        cut = lambda a, b: _axpy(-jnp.minimum(_dot(a, b), 0.0) / _dot(b, b), b, a)
        grads = _axpy(1.0, cut(first, second), cut(second, first))
        updates, opt = tx.update(grads, opt, params)
        return (
            optax.apply_updates(params, updates),
            opt,
            {"dot": _dot(first, second), "conflict": _dot(first, second) < 0},
        )

    return step, (params, tx.init(params))


@idiom()
def tied_autoencoder(wrap: Wrap) -> Any:
    """One matrix encodes and, transposed, decodes; sparsity by the mean activation's absolute value."""
    params = _params(192, w=(6, 16), bias=(16,), back=(6,))

    def loss_fn(p: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ p["w"] + p["bias"])
        return jnp.mean((h @ p["w"].T + p["back"] - batch["x"]) ** 2) + 0.05 * jnp.abs(h).mean(), {
            "active": h.mean(axis=0)
        }

    return _fit(wrap, _adamw(), params, loss_fn)


@idiom()
def quantised_weights(wrap: Wrap) -> Any:
    """Weights rounded to bfloat16's precision for the forward pass, straight through for the gradient."""

    def loss_fn(p: Any, batch: Any) -> Any:
        rounded = jax.tree.map(lambda w: w + lax.stop_gradient(lax.reduce_precision(w, 8, 7) - w), p)
        return jnp.mean((_mlp(rounded, batch["x"]) - batch["y"]) ** 2), {}

    return _fit(wrap, _sgd(), _mlp_params(193), loss_fn)


@idiom()
def equinox_module(wrap: Wrap) -> Any:
    """An equinox network of one example under vmap, with dropout keys for each; its arrays are the state."""
    net = eqx.nn.Sequential(
        [
            eqx.nn.Linear(6, 8, dtype=jnp.float64, key=jax.random.key(17)),
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.Dropout(0.25),
            eqx.nn.Linear(8, 1, dtype=jnp.float64, key=jax.random.key(18)),
        ]
    )
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        net = eqx.combine(p, static)
        keys = jax.random.split(key, batch["x"].shape[0])
        out = jax.vmap(lambda x, key: net(x, key=key))(batch["x"], keys)
        return jnp.mean((out - batch["y"]) ** 2), {"out": out}

    return _fit_keyed(wrap, _adam(), params, loss_fn)


@idiom()
def padded_blocks(wrap: Wrap) -> Any:
    """The batch padded to whole blocks of six, which lax.map works through; the padding is cut off again."""

    def loss_fn(p: Any, batch: Any) -> Any:
        size = batch["x"].shape[0]
        blocks = jnp.pad(batch["x"], ((0, -size % 6), (0, 0))).reshape(-1, 6, 6)
        out = lax.map(lambda x: _mlp(p, x), blocks).reshape(-1, 1)[:size]
        return jnp.mean((out - batch["y"]) ** 2), {"blocks": blocks.shape[0]}

    return _fit(wrap, _adam(), _mlp_params(194), loss_fn)


# What comes out besides the state


@idiom()
def aux_of_all_kinds(wrap: Wrap) -> Any:
    """Floats, integers, booleans and counts of the batch, rows of it, and values that don't depend on it."""

    def loss_fn(p: Any, batch: Any) -> Any:
        logits = _mlp(p, batch["x"])
        losses, guess = _xent(logits, batch["label"]), logits.argmax(axis=1)
        aux = {
            "losses": losses,
            "extremes": (losses.max(), losses.min(), losses.argmax()),
            "guess": guess.astype(jnp.uint8),
            "right": jnp.sum(guess == batch["label"]),
            "all": jnp.all(guess == batch["label"]),
            "any": jnp.any(losses > 2.5),
            "size": losses.size,
            "integers": [batch["label"].sum(), batch["label"].max(), batch["id"].min(), batch["tokens"].sum(axis=0)],
            "first": logits[0],
            "last": batch["tokens"][-1],
            "rows": losses[2:9:3],
            "product": jnp.prod(1 + 0.1 * losses),
            "spread": losses.std(),
            "by_feature": logits.T,
            "parameter": p["b1"].sum(),
            "constant": 3.5,
            "nothing": None,
        }
        return losses.mean(), aux

    return _fit(wrap, _adam(), _mlp_params(195, outputs=CLASSES), loss_fn)


@idiom()
def aux_in_order(wrap: Wrap) -> Any:
    """Sorted, cumulated, reversed and searched values of the batch."""

    def loss_fn(p: Any, batch: Any) -> Any:
        out = _mlp(p, batch["x"])[:, 0]
        errors = (out - batch["y"][:, 0]) ** 2
        aux = {
            "sorted": jnp.sort(errors),
            "order": jnp.argsort(out),
            "sum_so_far": jnp.cumsum(errors),
            "most_so_far": lax.cummax(errors),
            "reversed": out[::-1],
            "pairs": jnp.outer(out, out)[:3],
            "labels": jnp.unique(batch["label"], size=CLASSES, fill_value=-1),
            "done": jnp.nonzero(batch["done"], size=4, fill_value=-1)[0],
            "place": jnp.searchsorted(jnp.sort(out), jnp.array([-0.51, 0.013, 0.57])),
            "median": jnp.median(errors),
            "long": jnp.stack([out, errors]).reshape(-1),
        }
        return errors.mean(), aux

    return _fit(wrap, _sgd(), _mlp_params(196), loss_fn)


COUPLED: frozenset[str] = frozenset(_coupled)
"""The idioms whose new state couples examples beyond sums and means over the batch: an average of what parts
of the batch give by themselves is something else. (In others the aux may, or random numbers have its shape.)"""
DIVISIBLE: frozenset[str] = frozenset(_divisible)
"""The idioms that only work for batches of a multiple of 4 examples."""
