"""The losses of the models in JAX.

Shape suffixes: B batch, T time, D width, H heads, K width of a head, V bytes; of images C channels, Y height, X width.
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
    """Return ``(params, (inputs, targets)) -> mean loss``."""
    match model:
        case models.Mlp():
            forward = mlp
        case models.LeNet(patches=patches):
            forward = functools.partial(lenet, convolution=of_patches if patches else of_xla)
        case models.Gpt(heads=heads):
            forward = functools.partial(gpt, heads=heads)

    def loss(params: Any, batch: Any) -> jax.Array:
        inputs, targets = batch
        logits = forward(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Return logits."""
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def lenet(params: Any, x_BxYxXxC: jax.Array, convolution: Callable[[Any, Any], jax.Array]) -> jax.Array:
    """Return logits."""
    x_CxYxXxB = jnp.pad(x_BxYxXxC.transpose(3, 1, 2, 0), ((0, 0), (2, 2), (2, 2), (0, 0)))
    for layer in params[:2]:
        x_CxYxXxB = jax.nn.relu(convolution(x_CxYxXxB, layer["w"]) + layer["b"][:, None, None, None])
        # Not reduce_window, since its gradient is slow on CPUs.
        C, Y, X, B = x_CxYxXxB.shape
        pairs = x_CxYxXxB.reshape(C, Y // 2, 2, X // 2, 2, B)
        pairs = jnp.maximum(pairs[:, :, 0], pairs[:, :, 1])
        x_CxYxXxB = jnp.maximum(pairs[:, :, :, 0], pairs[:, :, :, 1])
    x = x_CxYxXxB.transpose(3, 1, 2, 0).reshape(x_CxYxXxB.shape[-1], -1)
    for layer in params[2:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def of_xla(x_CxYxXxB: jax.Array, w: jax.Array) -> jax.Array:
    """Convolve without padding."""
    return lax.conv_general_dilated(x_CxYxXxB, w, (1, 1), "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN"))


def of_patches(x_CxYxXxB: jax.Array, w: jax.Array) -> jax.Array:
    """Do the same as one matrix product."""
    height, width, _, out = w.shape
    Y, X = x_CxYxXxB.shape[1] - height + 1, x_CxYxXxB.shape[2] - width + 1
    patches = [x_CxYxXxB[:, i : i + Y, j : j + X] for i in range(height) for j in range(width)]
    columns = jnp.concatenate(patches).reshape(w.size // out, -1)
    return (w.reshape(-1, out).T @ columns).reshape(out, Y, X, -1)


def gpt(params: Any, tokens_BxT: jax.Array, heads: int) -> jax.Array:
    """Return logits. Layers run one by one: a scan would copy their weights and gradients."""
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
