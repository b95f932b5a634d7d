"""A byte-level GPT on text that every machine has: the sources of Python's standard library.

    jaxdist run -n 2 examples/gpt.py --level 2

Interrupted, the same command goes on from its last checkpoint, on any number of devices. `--single` trains under
`jax.jit`, `--mesh data=2,model=2,sequence=2` divides weights and windows as well, and the losses are the same.

Shape suffixes: B batch, T time, V bytes.
"""

import argparse
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from text import read_text, standard_library, windows
from transformer import GPT, MEGATRON, sample

import jaxdist


class State(TrainState):
    """With the key of dropout."""

    key: jax.Array


def nats(state: State, params, windows_BxT: jax.Array, **rngs: jax.Array) -> jax.Array:
    """The loss of each window; with dropout if there is a key for it."""
    logits_BxTxV = state.apply_fn(params, windows_BxT[:, :-1], rngs=rngs)
    targets_BxT = windows_BxT[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT).mean(axis=-1)


def make_optimizer(lr: float, steps: int, bf16: bool, level: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, steps // 20), steps, 0.1 * lr)
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices))
    return jaxdist.zero(tx, level, precision="bf16" if bf16 else None)  # type: ignore[arg-type]


def make_train_step(microbatches: int):
    def train_step(state: State, windows_BxT):
        key, mask_key = jax.random.split(state.key)
        loss_fn = lambda params, windows_BxT: nats(state, params, windows_BxT, dropout=mask_key).mean()
        loss, grads = jaxdist.value_and_grad(loss_fn, microbatches=microbatches)(state.params, windows_BxT)
        return state.apply_gradients(grads=grads, key=key), {"loss": loss, "gradient_norm": optax.global_norm(grads)}

    return train_step


def held_out_loss(state: State, windows_BxT):
    return {"nats": jnp.sum(nats(state, state.params, windows_BxT)), "windows": len(windows_BxT)}


def make_state(model: GPT, tx: optax.GradientTransformation, seed: int) -> State:
    params = jax.jit(model.init)(jax.random.key(seed), np.zeros((1, model.context), np.uint8))
    return State.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(seed + 1))


def planned(layers=4, heads=4, width=128, context=128, batch_size=16, microbatches=1, bf16=False, level=1, **other):
    """For `jaxdist plan examples/gpt.py:planned`: the step and the types of its arguments, of a model of any size."""
    model = GPT(layers, heads, width, context, jnp.bfloat16 if bf16 else jnp.float32, **other)  # dropout, remat
    windows_BxT = jax.ShapeDtypeStruct((batch_size, context + 1), jnp.uint8)
    step = jaxdist.data_parallel(make_train_step(microbatches), donate=True)
    return step, jax.eval_shape(lambda: make_state(model, make_optimizer(3e-3, 400, bf16, level), 0)), windows_BxT


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="files; else the sources of Python's standard library")
    parser.add_argument("--run", type=Path, default=Path("gpt"), help="folder of checkpoints and metrics")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of all devices together")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of the batch, one after the other")
    parser.add_argument("--level", type=int, default=1, choices=range(4), help="of ZeRO")
    parser.add_argument("--mesh", help="axes and their sizes, as data=2,model=2,sequence=2")
    for name, default in {"layers": 4, "heads": 4, "width": 128, "context": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the model")
    parser.add_argument("--bf16", action="store_true", help="parameters in bfloat16, with a float32 copy in shards")
    parser.add_argument("--dropout", type=float, default=0.0, help="the share to drop")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--every", type=int, default=100, help="steps from one evaluation and checkpoint to the next")
    parser.add_argument("--eval-batches", type=int, default=20)
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="the same on one device, under jax.jit")
    args = parser.parse_args()

    ctx = jaxdist.init()
    mesh = {axis.split("=")[0]: int(axis.split("=")[1]) for axis in args.mesh.split(",")} if args.mesh else {}
    if args.single and ctx.size > 1:
        raise SystemExit("--single is for one process")
    over = jaxdist.parallel(mesh=mesh, layouts=MEGATRON, donate=True) if mesh else jaxdist.data_parallel(donate=True)
    jit = jax.jit if args.single else over
    train_step, eval_step = jit(make_train_step(args.microbatches)), jit(held_out_loss)

    train_text, held_out_text = read_text(args.text or standard_library())
    sizes = {"batch_size": args.batch_size, "mesh": mesh or None}
    batches = jaxdist.loader(windows(train_text, args.context), seed=args.seed, **sizes)
    some = windows(held_out_text, args.context)[: args.eval_batches * args.batch_size]
    held_out = jaxdist.loader(some, shuffle=False, tail="keep", **sizes)

    dtype = jnp.bfloat16 if args.bf16 else jnp.float32
    model = GPT(args.layers, args.heads, args.width, args.context, dtype, args.dropout)
    state = make_state(model, make_optimizer(args.lr, args.steps, args.bf16, args.level), args.seed)

    checkpoints = args.run / "checkpoints"
    if first := jaxdist.latest_step(checkpoints) or 0:
        saved = jaxdist.restore(checkpoints, {"train": state, "data": batches.get_state()})
        state = saved["train"]
        batches.set_state(saved["data"])

    def held_out_nats() -> float:
        """Nats a byte on the first batches of the held-out text."""
        sums = jaxdist.evaluate(eval_step, state, held_out)
        return sums["nats"] / sums["windows"]

    epochs = itertools.chain.from_iterable(itertools.repeat(batches))
    sizes = {"examples_per_step": args.batch_size, "tokens_per_step": args.batch_size * args.context}
    with jaxdist.run_log(args.run, total=args.steps, **sizes) as log:
        for done, batch in zip(range(first + 1, args.steps + 1), epochs, strict=False):
            state, metrics = train_step(state, batch)
            if due := done % args.every == 0 or done == args.steps:
                metrics = metrics | {"held_out": held_out_nats()}
            log(done - 1, **metrics)
            if due:
                jaxdist.save(checkpoints, {"train": state, "data": batches.get_state()}, done, wait=False, keep=2)
    last = held_out_nats()
    whole = jaxdist.unshard(state.params)
    if ctx.is_root:
        if args.sample:
            print(sample(model, whole, b"def ", args.sample, args.seed).decode("utf-8", "replace"))
        print(
            f"final held_out={last:.4f} nats/byte steps={args.steps} level={args.level} "
            f"parameters={sum(x.size for x in jax.tree.leaves(whole))} "
            f"devices={1 if args.single else ctx.num_devices} communicator={ctx.communicator}"
        )


if __name__ == "__main__":
    main()
