"""Pallas kernels, those that JAX ships and two of our own: steps of one device, run by Pallas's interpreter."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention, matmul, megablox
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

# JAX 0.12 says when they are imported that tokamax is to replace those for GPUs.
with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    from jax.experimental.pallas.ops.gpu import attention, decode_attention, layer_norm, paged_attention, rms_norm
    from jax.experimental.pallas.ops.gpu import softmax as gpu_softmax

Array = jax.Array | np.ndarray
Arrays = Mapping[str, Array]
Model = Callable[[Arrays, Arrays], jax.Array]
Step = Callable[[Arrays, Arrays], tuple[jax.Array, jax.Array | Arrays]]

HEADS, DIM, GROUPS = 4, 8, 4
FEATURES = HEADS * DIM


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A ``step(weights, batch(examples))``, in whose jaxpr there are ``kernels`` equations of ``pallas_call``."""

    step: Step
    weights: Arrays
    batch: Callable[[int], Arrays]
    kernels: int
    examples: int = 24


def trained(model: Model) -> Step:
    """The loss of a model and its gradients. Traced without x64, where many kernels mix integers of two widths."""

    def step(w: Arrays, b: Arrays) -> tuple[jax.Array, Arrays]:
        with jax.enable_x64(False):
            return jax.value_and_grad(lambda w: jnp.mean(jnp.sum((model(w, b) - b["y"]) ** 2, axis=-1)))(w)

    return step


def served(model: Model) -> Step:
    """For a kernel without a backward pass: the mean of a model's outputs, and the outputs of each example."""

    def step(w: Arrays, b: Arrays) -> tuple[jax.Array, jax.Array]:
        with jax.enable_x64(False):
            outputs = model(w, b)
            return outputs.mean(), outputs

    return step


# For steps whose kernel has no argument `interpret`. True is the interpreter that this argument means in the others.
interpreted = pltpu.force_tpu_interpret_mode(True)  # pyright: ignore[reportArgumentType]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(seed: int, end: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(end, size=shape, dtype=np.int32)


def sequences(time: int) -> Callable[[int], Arrays]:
    return lambda n: {"x": normal(n, n, time, FEATURES), "y": normal(n + 1, n, time, FEATURES)}


def prompts(n: int) -> Arrays:
    """Sequences, each with a length of its own."""
    return {"x": normal(n, n, 32, FEATURES), "length": 1 + integers(n, 32, n)}


def paged_prompts(n: int) -> Arrays:
    """The last tokens of sequences: those before them are in four pages of four tokens."""
    return {"x": normal(n, n, FEATURES), "pages": integers(n, 8, n, 4), "length": 1 + integers(n + 1, 16, n)}


def rows(n: int) -> Arrays:
    """Single tokens, sorted by their group."""
    return {"x": normal(n, n, FEATURES), "y": normal(n + 1, n, FEATURES), "group": np.sort(integers(n, GROUPS, n))}


def projected(w: Arrays, b: Arrays) -> list[jax.Array]:
    """Queries, keys and values, each [example, time, head, dim]."""
    return [jnp.reshape(b["x"] @ w[name], (*b["x"].shape[:-1], HEADS, DIM)) for name in "qkv"]


def heads_first(w: Arrays, b: Arrays) -> list[jax.Array]:
    return [jnp.swapaxes(x, 1, 2) for x in projected(w, b)]


def merged(w: Arrays, heads: jax.Array) -> jax.Array:
    return heads.reshape(*heads.shape[:-2], FEATURES) @ w["o"]


def mha(w: Arrays, b: Arrays) -> jax.Array:
    sizes = attention.BlockSizes(16, 16, 16, 16, 16, 16)
    return merged(w, attention.mha(*projected(w, b), None, DIM**-0.5, True, sizes, interpret=True))


def decoded(kernel: Callable[..., jax.Array], heads: int | slice) -> Model:
    """Of the last token, to the keys and values of some heads."""

    def model(w: Arrays, b: Arrays) -> jax.Array:
        q, k, v = projected(w, b)
        k, v = k[:, :, heads], v[:, :, heads]
        return merged(w, kernel(q[:, -1], k, v, kv_seq_len=b["length"], k_splits=2, block_k=16, interpret=True))

    return model


def paged(w: Arrays, b: Arrays) -> jax.Array:
    q = jnp.reshape(b["x"] @ w["q"], (-1, HEADS, DIM))
    arrays = q, w["key_pages"], w["value_pages"], b["pages"], b["length"]
    return merged(w, paged_attention.paged_attention(*map(jnp.asarray, arrays), k_splits=2, interpret=True))


def flash(w: Arrays, b: Arrays) -> jax.Array:
    out = flash_attention.flash_attention(*heads_first(w, b), causal=True, sm_scale=DIM**-0.5)
    return merged(w, jnp.swapaxes(out, 1, 2))


def causal(time: int, heads: int) -> splash_attention_mask.MultiHeadMask:
    return splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((time, time))] * heads)


def splash_mha(w: Arrays, b: Arrays) -> jax.Array:
    q, k, v = heads_first(w, b)
    kernel = splash_attention_kernel.make_splash_mha_single_device(causal(q.shape[2], HEADS), interpret=True)
    out = jax.vmap(kernel)(q * DIM**-0.5, k, v)
    assert isinstance(out, jax.Array)  # and not a pair with the residuals
    return merged(w, out.swapaxes(1, 2))


def splash_gqa(w: Arrays, b: Arrays) -> jax.Array:
    """Pairs of heads, each with the keys and values of its first head: the kernel for one pair, vmapped twice."""
    q, k, v = heads_first(w, b)
    kernel = splash_attention_kernel.make_splash_mqa_single_device(causal(q.shape[2], 2), interpret=True)
    pairs = q.reshape(q.shape[0], HEADS // 2, 2, *q.shape[2:]) * DIM**-0.5
    out = jax.vmap(jax.vmap(kernel))(pairs, k[:, ::2], v[:, ::2])
    assert isinstance(out, jax.Array)
    return merged(w, out.reshape(q.shape).swapaxes(1, 2))


def layer_normed(backward: str) -> Model:
    kernel = functools.partial(layer_norm.layer_norm, backward_pass_impl=backward, interpret=True)
    return lambda w, b: kernel(b["x"] @ w["v"], w["scale"], w["bias"])


def rms_normed(backward: str) -> Model:
    kernel = functools.partial(rms_norm.rms_norm, backward_pass_impl=backward, interpret=True)
    return lambda w, b: kernel(b["x"] @ w["v"], w["scale"], w["bias"])


def softmax(w: Arrays, b: Arrays) -> jax.Array:
    return gpu_softmax.softmax(jnp.asarray(b["x"] @ w["v"]), interpret=True)


def product(w: Arrays, b: Arrays) -> jax.Array:
    return matmul.matmul(jnp.asarray(b["x"]), jnp.asarray(w["v"]), block_shape=(8, 16), block_k=16)


def grouped(w: Arrays, b: Arrays) -> jax.Array:
    sizes = jnp.sum(b["group"][:, None] == jnp.arange(GROUPS), axis=0, dtype=jnp.int32)
    return megablox.gmm(b["x"] @ w["v"], w["experts"], sizes, jnp.float32, (8, 16, 16), None, None, False, True)


def fused(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function as a kernel without a grid, whose backward pass is another such kernel."""

    def kernel(g: Callable[..., jax.Array | tuple[jax.Array, ...]], *operands: jax.Array) -> jax.Array:
        shapes, structure = jax.tree.flatten(jax.eval_shape(g, *operands))

        def body(*refs: jax.Ref) -> None:
            results = jax.tree.leaves(g(*(ref[...] for ref in refs[: len(operands)])))
            for ref, result in zip(refs[len(operands) :], results, strict=True):
                ref[...] = result

        return jax.tree.unflatten(structure, pl.pallas_call(body, out_shape=shapes, interpret=True)(*operands))

    run = jax.custom_vjp(lambda *args: kernel(f, *args))
    run.defvjp(
        lambda *args: (kernel(f, *args), args),
        lambda args, cotangent: tuple(kernel(lambda ct, *xs: jax.vjp(f, *xs)[1](ct), cotangent, *args)),
    )
    return run


def bias_gelu(w: Arrays, b: Arrays) -> jax.Array:
    return jax.vmap(fused(lambda row, bias: jax.nn.gelu(row + bias)), (0, None))(b["x"] @ w["v"], w["bias"])


def own_attention(w: Arrays, b: Arrays) -> jax.Array:
    """A kernel for one head of one example, of arrays where the heads come after the time."""
    head = fused(lambda q, k, v: jax.nn.softmax(q @ k.T * DIM**-0.5) @ v)
    return merged(w, jax.vmap(jax.vmap(head, 1, 1))(*projected(w, b)))


PROJECTIONS = {name: normal(seed, FEATURES, FEATURES) / FEATURES**0.5 for seed, name in enumerate("qkvo")}
V, BIAS = {"v": PROJECTIONS["v"]}, {"bias": normal(5, FEATURES)}
NORM = V | BIAS | {"scale": 1 + normal(4, FEATURES)}
EXPERTS = V | {"experts": normal(6, GROUPS, FEATURES, FEATURES) / FEATURES**0.5}
PAGES = PROJECTIONS | {"key_pages": normal(7, 2, 8, 4, DIM), "value_pages": normal(8, 2, 8, 4, DIM)}

KERNELS: dict[str, Kernel] = {
    "gpu attention": Kernel(trained(mha), PROJECTIONS, sequences(32), 3),
    "gpu decode mqa": Kernel(served(decoded(decode_attention.mqa, 0)), PROJECTIONS, prompts, 1),
    "gpu decode gqa": Kernel(served(decoded(decode_attention.gqa, slice(2))), PROJECTIONS, prompts, 1),
    "gpu paged attention": Kernel(served(paged), PAGES, paged_prompts, 1),
    "gpu layer norm": Kernel(trained(layer_normed("triton")), NORM, sequences(4), 3),
    "gpu layer norm, backward by XLA": Kernel(trained(layer_normed("xla")), NORM, sequences(4), 1),
    "gpu rms norm": Kernel(trained(rms_normed("triton")), NORM, sequences(4), 3),
    "gpu rms norm, backward by XLA": Kernel(trained(rms_normed("xla")), NORM, sequences(4), 1),
    "gpu softmax": Kernel(served(softmax), V, sequences(4), 1),
    "tpu flash attention": Kernel(interpreted(trained(flash)), PROJECTIONS, sequences(256), 3),
    "tpu splash mha": Kernel(trained(splash_mha), PROJECTIONS, sequences(256), 3),
    "tpu splash gqa": Kernel(trained(splash_gqa), PROJECTIONS, sequences(256), 3),
    "tpu matmul": Kernel(interpreted(served(product)), V, rows, 1, 192),
    "tpu megablox gmm": Kernel(trained(grouped), EXPERTS, rows, 3, 192),
    "own bias gelu": Kernel(trained(bias_gelu), V | BIAS, rows, 2),
    "own attention": Kernel(trained(own_attention), PROJECTIONS, sequences(8), 2),
}
