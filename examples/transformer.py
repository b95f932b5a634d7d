"""The model of gpt.py: a transformer over bytes, its layers in a scan.

Shape suffixes: B batch, T time, D width, H heads, K width of a head, V bytes.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

VOCABULARY = 256
MEGATRON = {"Dense_[03]": 2, "Dense_[12]": 1, "embedding": 0}
"""What the model axis cuts: heads and hidden features (columns of the first matrix, rows of the second; dimension 0 is
the layer), and the vocabulary."""


class Block(nn.Module):
    """One layer, as the body of a scan over all of them."""

    heads: int
    dtype: jnp.dtype
    dropout: float

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, _: None) -> tuple[jax.Array, None]:
        B, T, D = x_BxTxD.shape
        dense = lambda width: nn.Dense(width, use_bias=False, dtype=self.dtype, param_dtype=self.dtype)
        norm = lambda x: nn.RMSNorm(dtype=self.dtype, param_dtype=self.dtype)(x)
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        q, k, v = jnp.split(dense(3 * D)(norm(x_BxTxD)).reshape(B, T, self.heads, -1), 3, axis=-1)
        mixed_BxTxHxK = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x_BxTxD += drop(dense(D)(mixed_BxTxHxK.reshape(B, T, D)))
        return x_BxTxD + drop(dense(D)(nn.gelu(dense(4 * D)(norm(x_BxTxD))))), None


class GPT(nn.Module):
    layers: int
    heads: int
    width: int
    context: int
    dtype: jnp.dtype = jnp.float32
    dropout: float = 0.0
    remat: bool = True

    @nn.compact
    def __call__(self, bytes_BxT: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, param_dtype=self.dtype)
        place = self.param("place", nn.initializers.normal(0.02), (self.context, self.width), self.dtype)
        x_BxTxD = embed(bytes_BxT.astype(jnp.int32)) + place[: bytes_BxT.shape[1]]
        # One layer's activations at a time, and at ZeRO level 3 one layer's parameters.
        layer = nn.remat(Block, prevent_cse=False) if self.remat else Block
        stack = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=self.layers
        )
        x_BxTxD, _ = stack(self.heads, self.dtype, self.dropout, name="layers")(x_BxTxD, None)
        x_BxTxD = nn.RMSNorm(dtype=self.dtype, param_dtype=self.dtype)(x_BxTxD)
        return embed.attend(x_BxTxD).astype(jnp.promote_types(self.dtype, jnp.float32))


def sample(model: GPT, params, prompt: bytes, length: int, seed: int) -> bytes:
    """Goes on with a text, a byte at a time."""

    @jax.jit
    def next_byte(params, text_T, last, key):
        logits_TxV = model.apply(params, text_T[None])[0]
        return jax.random.categorical(key, logits_TxV[last] / 0.8)

    text = list(prompt)
    for key in jax.random.split(jax.random.key(seed), length):
        recent = text[-model.context :]
        padded = jnp.array(recent + [0] * (model.context - len(recent)), jnp.uint8)
        text.append(int(next_byte(params, padded, len(recent) - 1, key)))
    return bytes(text)
