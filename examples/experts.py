"""A mixture of experts that reads digits, in flax linen; the experts are divided over the model axis.

    jaxdist run -n 4 examples/experts.py --model 2

The mixture is written densely for one device: a gate, the best two experts of each place of an image, a capacity, and
products with one-hot arrays that carry the features to the experts and back. `layouts={"experts": 0}` is all that says
that a device holds some of the experts. The loss that keeps them busy alike is over the whole batch. With `--dropless`
an expert takes all rows that choose it (`jax.lax.ragged_dot`), and a device holds a part of the width of every expert.
`--single` trains under `jax.jit`, and the losses are the same.

Shape suffixes: B batch, H height, W width, T places of an image, D features, E experts, C capacity, F features in an
expert, K choices of a place, Q places in a queue: those of all first choices, then of all second ones, R rows.

References: Shazeer et al., arXiv 1701.06538; Lepikhin et al., arXiv 2006.16668 (GShard).
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from digits import arrays
from flax.training.train_state import TrainState
from rich.console import Console

import jaxdist


class Mixture(nn.Module):
    """Each place of an image goes to the experts that its gate prefers, if they have room."""

    experts: int
    width: int
    choices: int = 2
    room: float = 1.25

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        B, T, D = x_BxTxD.shape
        capacity = int(self.room * self.choices * T / self.experts)
        gate_BxTxE = nn.softmax(nn.Dense(self.experts, use_bias=False, name="gate")(x_BxTxD))
        share_BxTxK, choice_BxTxK = jax.lax.top_k(gate_BxTxE, self.choices)
        share_BxQ = (share_BxTxK / share_BxTxK.sum(-1, keepdims=True)).mT.reshape(B, -1)
        chosen_BxQxE = jax.nn.one_hot(choice_BxTxK.mT.reshape(B, -1), self.experts, dtype=x_BxTxD.dtype)
        # How many are before it in the queue of its expert; who has no room gets a row of zeros.
        before_BxQ = jnp.sum((jnp.cumsum(chosen_BxQxE, 1) - 1) * chosen_BxQxE, -1).astype(jnp.int32)
        slot_BxQxC = jax.nn.one_hot(before_BxQ, capacity, dtype=x_BxTxD.dtype)
        sent_BxQxExC = chosen_BxQxE[..., None] * slot_BxQxC[:, :, None]
        by_place = lambda a_BxQxExC: a_BxQxExC.reshape(B, self.choices, T, self.experts, capacity).sum(1)

        make = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        up_ExDxF = self.param("experts_up", make, (self.experts, D, self.width))
        down_ExFxD = self.param("experts_down", make, (self.experts, self.width, D))
        taken_ExBxCxD = jnp.einsum("btec,btd->ebcd", by_place(sent_BxQxExC), x_BxTxD)
        inner_ExBxCxF = nn.gelu(jnp.einsum("ebcd,edf->ebcf", taken_ExBxCxD, up_ExDxF))
        given_ExBxCxD = jnp.einsum("ebcf,efd->ebcd", inner_ExBxCxF, down_ExFxD)
        back_BxTxExC = by_place(sent_BxQxExC * share_BxQ[..., None, None])
        mixed_BxTxD = jnp.einsum("btec,ebcd->btd", back_BxTxExC, given_ExBxCxD)

        first_E = chosen_BxQxE[:, :T].mean((0, 1))  # 1/E each, if all are as busy
        balance = self.experts * jnp.sum(first_E * gate_BxTxE.mean((0, 1)))
        return mixed_BxTxD, {"balance": balance, "dropped": 1 - sent_BxQxExC.sum() / (B * T * self.choices)}


class Dropless(nn.Module):
    """The same, with room for all: places are sorted by their experts, which take as many rows as there are."""

    experts: int
    width: int
    choices: int = 2

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        B, T, D = x_BxTxD.shape
        gate_BxTxE = nn.softmax(nn.Dense(self.experts, use_bias=False, name="gate")(x_BxTxD))
        share_BxTxK, choice_BxTxK = jax.lax.top_k(gate_BxTxE, self.choices)
        order_R = jnp.argsort(choice_BxTxK.reshape(-1), stable=True)  # rows: all choices of all places
        rows_E = jnp.bincount(choice_BxTxK.reshape(-1), length=self.experts)
        taken_RxD = x_BxTxD.reshape(-1, D)[order_R // self.choices]

        make = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        up_ExDxF = self.param("experts_up", make, (self.experts, D, self.width))
        down_ExFxD = self.param("experts_down", make, (self.experts, self.width, D))
        inner_RxF = nn.gelu(jax.lax.ragged_dot(taken_RxD, up_ExDxF, rows_E))
        given_RxD = jax.lax.ragged_dot(inner_RxF, down_ExFxD, rows_E)
        back_BxTxKxD = jnp.zeros_like(given_RxD).at[order_R].set(given_RxD).reshape(B, T, self.choices, D)
        mixed_BxTxD = jnp.einsum("btk,btkd->btd", share_BxTxK / share_BxTxK.sum(-1, keepdims=True), back_BxTxKxD)

        first_E = jax.nn.one_hot(choice_BxTxK[..., 0], self.experts).mean((0, 1))
        balance = self.experts * jnp.sum(first_E * gate_BxTxE.mean((0, 1)))
        return mixed_BxTxD, {"balance": balance, "dropped": jnp.zeros(())}


class Classifier(nn.Module):
    """Features of 7x7 places, a mixture of experts for them, and a layer over all."""

    mixture: type[Mixture] | type[Dropless] = Mixture
    experts: int = 8

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        x_BxHxWxC = nn.gelu(nn.Conv(16, (5, 5), strides=2)(x_BxHxWxC))
        x_BxHxWxC = nn.gelu(nn.Conv(32, (3, 3), strides=2)(x_BxHxWxC))
        x_BxTxD = x_BxHxWxC.reshape(len(x_BxHxWxC), -1, x_BxHxWxC.shape[-1])
        mixed_BxTxD, seen = self.mixture(self.experts, 128)(nn.LayerNorm()(x_BxTxD))
        x_BxTxD = nn.LayerNorm()(x_BxTxD + mixed_BxTxD)
        return nn.Dense(10)(x_BxTxD.reshape(len(x_BxTxD), -1)), seen


def train_step(state: TrainState, batch) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params):
        logits_Bx10, seen = state.apply_fn(params, batch["image"])
        nats_B = optax.softmax_cross_entropy_with_integer_labels(logits_Bx10, batch["label"])
        return nats_B.mean() + 0.01 * seen["balance"], seen

    (loss, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, **seen}


def eval_step(state: TrainState, batch) -> jax.Array:
    logits_Bx10, _ = state.apply_fn(state.params, batch["image"])
    return jnp.sum(logits_Bx10.argmax(-1) == batch["label"])


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="of all devices together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--model", type=int, default=1, help="devices that divide the experts; the others, the batch")
    parser.add_argument("--dropless", action="store_true", help="experts with as many rows as choose them")
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of ZeRO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="the same on one device, under jax.jit")
    args = parser.parse_args()

    ctx = jaxdist.init()
    if args.single and ctx.size > 1:
        raise SystemExit("--single is for one process")
    mesh = {"data": -1, "model": args.model}
    # Experts without a capacity are divided by their width: so all devices have as many rows.
    layouts = {"experts_up": 2, "experts_down": 1} if args.dropless else {"experts": 0}
    jit = jax.jit if args.single else jaxdist.parallel(mesh=mesh, layouts=layouts, donate=True)
    train, evaluate = jit(train_step), jit(eval_step)

    train_set, test_set = arrays(None)
    batches = jaxdist.loader(train_set, args.batch_size, seed=args.seed, mesh=mesh)
    tests = jaxdist.loader(test_set, args.batch_size, shuffle=False, tail="keep", mesh=mesh)
    model = Classifier(Dropless if args.dropless else Mixture)
    params = jax.jit(model.init)(jax.random.key(args.seed), train_set["image"][:1])
    tx = jaxdist.zero(optax.adam(args.lr), args.level)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    console = Console(stderr=True, quiet=not ctx.is_root, log_path=False)
    accuracy = 0.0
    for epoch in range(args.epochs):
        seen = []
        for batch in batches:
            state, metrics = train(state, batch)
            seen.append(metrics)
        accuracy = sum(int(evaluate(state, batch)) for batch in tests) / len(test_set["label"])
        loss, dropped = (sum(float(m[name]) for m in seen) / len(seen) for name in ("loss", "dropped"))
        console.log(f"epoch {epoch + 1} loss {loss:.6f} dropped {dropped:.4f} test_accuracy {accuracy:.4f}")
    devices = 1 if args.single else ctx.num_devices
    if ctx.is_root:
        print(f"final test_accuracy={accuracy:.4f} epochs={args.epochs} devices={devices}")


if __name__ == "__main__":
    main()
