"""The losses of the models in JAX.

Shape suffixes: B batch, T time, D width, H heads, K width of a head, V bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import models
import optax
from jax import lax


def loss_of(model: models.Model) -> Callable[[Any, Any], jax.Array]:
    """``(params, (inputs, targets)) -> mean loss``."""
    match model:
        case models.Mlp():
            forward = mlp
        case models.LeNet():
            forward = lenet
        case models.Gpt(heads=heads):
            forward = functools.partial(gpt, heads=heads)

    def loss(params: Any, batch: Any) -> jax.Array:
        inputs, targets = batch
        logits = forward(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Logits."""
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def lenet(params: Any, x: jax.Array) -> jax.Array:
    """Logits."""
    for layer, padding in zip(params[:2], ("SAME", "VALID"), strict=True):
        x = lax.conv_general_dilated(x, layer["w"], (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + layer["b"])
        b, h, w, c = x.shape
        x = x.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))  # of reduce_window the gradient is slow on CPUs
    x = x.reshape(len(x), -1)
    for layer in params[2:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def gpt(params: Any, tokens_BxT: jax.Array, heads: int) -> jax.Array:
    """Logits. The layers one by one: a scan over them copies each one's weights and gradients."""
    x_BxTxD = params["embed"][tokens_BxT] + params["place"]
    B, T, D = x_BxTxD.shape
    for p in params["layers"]:
        qkv = (norm(x_BxTxD, p["norm1"]) @ p["qkv"]).reshape(B, T, 3, heads, D // heads)
        mixed_BxTxHxK = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x_BxTxD += mixed_BxTxHxK.reshape(B, T, D) @ p["out"]
        x_BxTxD += jax.nn.gelu(norm(x_BxTxD, p["norm2"]) @ p["up"]) @ p["down"]
    return norm(x_BxTxD, params["norm"]) @ params["embed"].T


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm."""
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale
