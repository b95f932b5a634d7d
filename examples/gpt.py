"""A byte-level GPT on text that every machine has: the sources of Python's standard library.

    jaxdist run -n 2 examples/gpt.py --level 2

Interrupted, the same command goes on from its last checkpoint, on any number of devices.

Shape suffixes: B batch, T time, D width, H heads, K width of a head, V bytes.
"""

import argparse
import itertools
import math
import sysconfig
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxdist
from jaxdist.data.loader import Loader

VOCABULARY = 256


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

    @nn.compact
    def __call__(self, bytes_BxT: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, param_dtype=self.dtype)
        place = self.param("place", nn.initializers.normal(0.02), (self.context, self.width), self.dtype)
        x_BxTxD = embed(bytes_BxT.astype(jnp.int32)) + place[: bytes_BxT.shape[1]]
        # One layer's activations at a time, and at ZeRO level 3 one layer's parameters.
        layer = nn.remat(Block, prevent_cse=False)
        stack = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=self.layers
        )
        x_BxTxD, _ = stack(self.heads, self.dtype, self.dropout, name="layers")(x_BxTxD, None)
        x_BxTxD = nn.RMSNorm(dtype=self.dtype, param_dtype=self.dtype)(x_BxTxD)
        return embed.attend(x_BxTxD).astype(jnp.promote_types(self.dtype, jnp.float32))


class State(TrainState):
    """With the key of dropout."""

    key: jax.Array


def nats(state: State, params, windows_BxT: jax.Array, **rngs: jax.Array) -> jax.Array:
    """The loss of each window; with dropout if there is a key for it."""
    logits_BxTxV = state.apply_fn(params, windows_BxT[:, :-1], rngs=rngs)
    targets_BxT = windows_BxT[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT).mean(axis=-1)


def make_optimizer(lr: float, steps: int, clip: float, bf16: bool, level: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, steps // 20), steps, 0.1 * lr)
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    tx = optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )
    return jaxdist.zero(jaxdist.master_weights(tx) if bf16 else tx, level)  # type: ignore[arg-type]


def make_train_step(microbatches: int):
    @jaxdist.data_parallel
    def train_step(state: State, windows_BxT: jax.Array):
        key, mask_key = jax.random.split(state.key)
        loss_fn = lambda params, windows_BxT: nats(state, params, windows_BxT, dropout=mask_key).mean()
        loss, grads = jaxdist.value_and_grad(loss_fn, microbatches=microbatches)(state.params, windows_BxT)
        return state.apply_gradients(grads=grads, key=key), {"loss": loss, "gradient_norm": optax.global_norm(grads)}

    return train_step


@jaxdist.data_parallel(donate=False)
def eval_step(state: State, batch):
    windows_BxT, weight_B = batch
    return {"nats": jnp.sum(nats(state, state.params, windows_BxT) * weight_B), "windows": jnp.sum(weight_B)}


def make_state(model: GPT, tx: optax.GradientTransformation, seed: int) -> State:
    params = jax.jit(model.init)(jax.random.key(seed), np.zeros((1, model.context), np.uint8))
    return State.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(seed + 1))


def planned(layers=4, heads=4, width=128, context=128, batch_size=16, microbatches=1, bf16=False, level=1, dropout=0.0):
    """For `jaxdist plan examples/gpt.py:planned`: the step and the types of its arguments, of a model of any size."""
    model = GPT(layers, heads, width, context, jnp.bfloat16 if bf16 else jnp.float32, dropout)
    tx = make_optimizer(3e-3, 400, 1.0, bf16, level)

    windows_BxT = jax.ShapeDtypeStruct((batch_size, context + 1), jnp.uint8)
    return make_train_step(microbatches), jax.eval_shape(lambda: make_state(model, tx, 0)), windows_BxT


def evaluate(state: State, held_out: Loader, batches: int) -> float:
    """Nats a byte on the first batches of the held-out text."""
    held_out.set_epoch(0)
    sums = [eval_step(state, batch) for batch in itertools.islice(held_out, batches)]
    return float(sum(s["nats"] for s in sums)) / float(sum(s["windows"] for s in sums))


def read_text(files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes held out: every 20th file, or the last 20th of the only one."""
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    if len(texts) < 20:
        whole = np.concatenate(texts)
        return whole[: len(whole) * 19 // 20], whole[len(whole) * 19 // 20 :]
    return np.concatenate([t for i, t in enumerate(texts) if i % 20]), np.concatenate(texts[::20])


def standard_library() -> list[Path]:
    """Python's sources, with the documentation that is in them."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(f for f in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(f.parts))


def windows(text: np.ndarray, context: int) -> np.ndarray:
    """A view of the text as windows of `context` bytes and the one that follows."""
    if len(text) <= context:
        raise SystemExit(f"{len(text)} bytes of text are too few for a window of {context} and the byte after it")
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]


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


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="files; else the sources of Python's standard library")
    parser.add_argument("--run", type=Path, default=Path("gpt"), help="folder of checkpoints and metrics")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of all devices together")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of the batch, one after the other")
    parser.add_argument("--level", type=int, default=1, choices=range(4), help="of ZeRO")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128, help="bytes")
    parser.add_argument("--bf16", action="store_true", help="parameters in bfloat16, with a float32 copy in shards")
    parser.add_argument("--dropout", type=float, default=0.0, help="the share to drop")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-batches", type=int, default=20)
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ctx = jaxdist.init()
    if args.batch_size % ctx.size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide over {ctx.size} processes")

    train_text, held_out_text = read_text(args.text or standard_library())
    batch_size = args.batch_size // ctx.size
    batches = jaxdist.loader(windows(train_text, args.context), batch_size, seed=args.seed)
    held_out = jaxdist.loader(windows(held_out_text, args.context), batch_size, shuffle=False, tail="pad")

    dtype = jnp.bfloat16 if args.bf16 else jnp.float32
    model = GPT(args.layers, args.heads, args.width, args.context, dtype, args.dropout)
    tx = make_optimizer(args.lr, args.steps, args.clip, args.bf16, args.level)
    state = make_state(model, tx, args.seed)
    count = sum(x.size for x in jax.tree.leaves(state.params))

    checkpoints = args.run / "checkpoints"
    first = jaxdist.latest_step(checkpoints) or 0
    if first:
        saved = jaxdist.restore(checkpoints, {"train": state, "data": batches.get_state()})
        state = saved["train"]
        batches.set_state(saved["data"])

    train_step = make_train_step(args.microbatches)
    epochs = itertools.chain.from_iterable(itertools.repeat(batches))
    tokens = args.batch_size * args.context
    held_out_nats = math.nan
    with jaxdist.run_log(args.run, total=args.steps, examples_per_step=args.batch_size, tokens_per_step=tokens) as log:
        for step, batch in zip(range(first, args.steps), epochs, strict=False):
            state, metrics = train_step(state, batch)
            done = step + 1
            if done % args.eval_every == 0 or done == args.steps:
                metrics["held_out"] = held_out_nats = evaluate(state, held_out, args.eval_batches)
            log(step, **metrics)
            if done % args.save_every == 0 or done == args.steps:
                jaxdist.save(checkpoints, {"train": state, "data": batches.get_state()}, done, wait=False, keep=2)

    if first >= args.steps:
        held_out_nats = evaluate(state, held_out, args.eval_batches)
    whole = jaxdist.unshard(state.params)
    if ctx.is_root:
        if args.sample:
            print(sample(model, whole, b"def ", args.sample, args.seed).decode("utf-8", "replace"))
        print(
            f"final held_out={held_out_nats:.4f} nats/byte steps={args.steps} parameters={count} level={args.level} "
            f"devices={ctx.num_devices} communicator={ctx.communicator}"
        )


if __name__ == "__main__":
    main()
