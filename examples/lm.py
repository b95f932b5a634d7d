"""A language model from text files: packed rows, a GPT in flax nnx, bfloat16 with a float32 copy, ZeRO or a mesh.

    jaxdist run -n 4 examples/lm.py --text corpus/*.txt

Interrupted, the same command goes on from its last checkpoint, on any number of devices. `--single` trains under
`jax.jit` and prints the same losses. Without `--text` it reads the sources of Python's standard library.

Shape suffixes: B batch, T time, H heads, D width, V vocabulary.
"""

import argparse
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from text import standard_library

import jaxdist

VOCABULARY, END = 257, 256  # bytes, and the end of a document


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array, mask_Bx1xTxT: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norms[0](x_BxTxD)), 3, -1)
        q, k, v = (x.reshape(*x.shape[:2], self.heads, -1) for x in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask_Bx1xTxT)
        x_BxTxD = x_BxTxD + self.out(mixed.reshape(x_BxTxD.shape))
        return x_BxTxD + self.down(nnx.gelu(self.up(self.norms[1](x_BxTxD))))


class LM(nnx.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array, segments_BxT: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        x_BxTxD = self.tokens(tokens_BxT) + self.positions(positions_BxT)
        same = segments_BxT[:, None, :, None] == segments_BxT[:, None, None, :]  # no look at another document
        mask = same & jnp.tri(tokens_BxT.shape[1], dtype=bool)
        for block in self.blocks:
            x_BxTxD = nnx.remat(lambda block, x, mask: block(x, mask))(block, x_BxTxD, mask)
        return self.tokens.attend(self.norm(x_BxTxD)).astype(jnp.float32)


def nats(model: LM, row) -> tuple[jax.Array, jax.Array]:
    """The summed loss of the next tokens that belong to the same document, and their number."""
    tokens, segments, positions = row["tokens"], row["tokens_segment_ids"], row["tokens_positions"]
    logits_BxTxV = model(tokens[:, :-1], segments[:, :-1], positions[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens[:, 1:])
    counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.sum(losses, where=counted), jnp.sum(counted)


def sample(model: LM, start: bytes, length: int, context: int, key: jax.Array) -> str:
    tokens = list(start)
    logits_of = nnx.jit(lambda model, x, n: model(x, jnp.ones_like(x), jnp.arange(context)[None])[0, n])
    for one in jax.random.split(key, length):
        window = tokens[-context:]
        padded = jnp.array([window + [0] * (context - len(window))])
        tokens.append(int(jax.random.categorical(one, logits_of(model, padded, len(window) - 1))))
    return bytes(x for x in tokens if x != END).decode("utf-8", "replace")


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files; the last one is held out")
    parser.add_argument("--run", type=Path, default=Path("lm"), help="folder of tokens, checkpoints and metrics")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="from a checkpoint")
    parser.add_argument("--bf16", action="store_true", help="parameters in bfloat16, with a float32 copy")
    parser.add_argument("--level", type=int, default=1, choices=range(4), help="of ZeRO")
    parser.add_argument("--mesh", help="axes and their sizes, as data=2,model=2")
    parser.add_argument("--single", action="store_true", help="on one device, under jax.jit")
    sizes = {"steps": 300, "every": 100, "batch_size": 16, "context": 128, "layers": 4, "width": 128, "heads": 4}
    for name, default in (sizes | {"sample": 200, "seed": 0}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    ctx = jaxdist.init()
    mesh = {axis: int(size) for axis, size in (word.split("=") for word in args.mesh.split(","))} if args.mesh else None
    files = args.text or standard_library()
    if (args.single and ctx.size > 1) or len(files) < 2:
        raise SystemExit("--single: one process; --text: two files or more")

    def packed(name: str, files: list[Path]):
        texts, encode = jaxdist.data.text_files(files, split=None), lambda document: [*document.encode(), END]
        return jaxdist.data.packed(
            jaxdist.data.tokenize(texts, encode, args.run / name), args.context + 1, seed=args.seed
        )

    sizes = {"batch_size": args.batch_size, "mesh": mesh}
    batches = jaxdist.loader(packed("train", files[:-1]), seed=args.seed, **sizes)
    held_out = jaxdist.loader(packed("held_out", files[-1:]), shuffle=False, tail="keep", **sizes)
    graph, params = nnx.split(LM(args.layers, args.width, args.heads, args.context, nnx.Rngs(args.seed)), nnx.Param)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 20), args.steps, 0.1 * args.lr)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    tx = jaxdist.zero(tx, args.level, precision="bf16" if args.bf16 else None)  # type: ignore[arg-type]
    opt_state = tx.init(params)
    params = optax.tree.cast(params, jnp.bfloat16) if args.bf16 else params
    over = jaxdist.parallel(mesh=mesh, donate=True) if mesh else jaxdist.data_parallel(donate=True)
    jit = jax.jit if args.single else over

    @jit
    def train_step(params, opt_state, row):
        loss_fn = lambda params: jnp.divide(*nats(nnx.merge(graph, params), row))
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    eval_step = jit(lambda params, row: nats(nnx.merge(graph, params), row))

    state = lambda step: {"params": params, "opt_state": opt_state, "data": batches.get_state(), "step": step}
    checkpoints, first = args.run / "checkpoints", 0
    if args.resume and jaxdist.latest_step(checkpoints) is not None:
        saved = jaxdist.restore(checkpoints, state(0))
        params, opt_state, first = saved["params"], saved["opt_state"], saved["step"]
        batches.set_state(saved["data"])
    epochs = itertools.chain.from_iterable(itertools.repeat(batches))
    with jaxdist.run_log(args.run, total=args.steps, tokens_per_step=args.batch_size * args.context) as log:
        for step, row in zip(range(first, args.steps), epochs, strict=False):
            params, opt_state, loss = train_step(params, opt_state, row)
            metrics = {"loss": loss}
            if due := (step + 1) % args.every == 0 or step + 1 == args.steps:
                total, count = jaxdist.evaluate(eval_step, params, held_out)
                metrics["held_out"] = total / count
            log(step, **metrics)
            if due:
                jaxdist.save(checkpoints, state(step + 1), step + 1, wait=False, keep=2)
    total, count = jaxdist.evaluate(eval_step, params, held_out)
    jaxdist.export(args.run / "model.safetensors", params, rename={r"\.value$": ""})
    trained = nnx.merge(graph, jaxdist.unshard(params))
    if ctx.is_root:
        print(sample(trained, b"def ", args.sample, args.context, jax.random.key(args.seed)))
        print(f"final held_out={total / count:.4f} nats/byte steps={args.steps} devices={ctx.num_devices}")


if __name__ == "__main__":
    main()
