"""PPO on a pole that is balanced on a cart; the environment is written in JAX, and part of the step.

    jaxdist run -n 2 examples/ppo.py --level 1

The batch are the environments: each process has its own, and what a step returns in their place goes into the next.
Minibatches are drawn from all of their steps, and the advantages are normalised over a whole minibatch. `--single`
trains under `jax.jit`. Both are the same up to rounding, which after some steps decides an action (not in float64).

Shape suffixes: B environments, T time, S steps of all environments, M a minibatch.

References: Schulman et al., arXiv 1707.06347; Barto, Sutton and Anderson (1983), as in Gymnasium's CartPole-v1.
"""

import argparse
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from rich.console import Console

import jaxdist

STEPS, MINIBATCHES, PASSES, DISCOUNT, TRACE, CLIP, LIMIT = 64, 4, 4, 0.99, 0.95, 0.2, 500


class Env(NamedTuple):
    """One environment, or (with a leading axis B) all."""

    position: jax.Array  # of the cart, its speed, the pole's angle, its speed
    age: jax.Array  # steps of this episode
    last: jax.Array  # steps of the one before


def reset(key: jax.Array) -> Env:
    return Env(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.zeros((), int), jnp.zeros((), int))


def move(env: Env, action: jax.Array, key: jax.Array) -> tuple[Env, jax.Array]:
    """The next state, which is a new one if this one ended: fallen, out of sight, or after `LIMIT` steps."""
    _, speed, angle, turn = env.position
    force, sin, cos = jnp.where(action == 1, 10.0, -10.0), jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turn**2 * sin) / 1.1
    twist = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pull = push - 0.05 * twist * cos / 1.1
    position = env.position + 0.02 * jnp.stack([speed, pull, turn, twist])
    age = env.age + 1
    done = (jnp.abs(position[0]) > 2.4) | (jnp.abs(position[2]) > 0.2095) | (age >= LIMIT)
    fresh, going = reset(key)._replace(last=age), Env(position, age, env.last)
    return jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, going), done


class Agent(nn.Module):
    """The logits of both actions, and the value."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        policy, value = (nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x)))) for _ in range(2))
        return nn.Dense(2, kernel_init=nn.initializers.normal(0.01))(policy), nn.Dense(1)(value)[..., 0]


def loss_fn(params: Any, apply: Any, minibatch: dict[str, jax.Array]) -> jax.Array:
    logits_Mx2, value_M = apply(params, minibatch["seen"])
    log_all_Mx2 = nn.log_softmax(logits_Mx2)
    log_M = jnp.take_along_axis(log_all_Mx2, minibatch["action"][:, None], axis=1)[:, 0]
    gain_M = (minibatch["advantage"] - minibatch["advantage"].mean()) / (minibatch["advantage"].std() + 1e-8)
    ratio_M = jnp.exp(log_M - minibatch["log"])
    policy = -jnp.minimum(ratio_M * gain_M, jnp.clip(ratio_M, 1 - CLIP, 1 + CLIP) * gain_M).mean()
    entropy = -jnp.sum(jnp.exp(log_all_Mx2) * log_all_Mx2, axis=1).mean()
    return policy + 0.5 * jnp.square(value_M - minibatch["target"]).mean() - 0.01 * entropy


def train_step(state: TrainState, env: Env, key: jax.Array) -> tuple[TrainState, Env, dict[str, jax.Array]]:
    """Plays some steps in each environment, then learns from them."""
    play_key, learn_key = jax.random.split(key)

    def play(env: Env, key: jax.Array):
        act_key, reset_key = jax.random.split(key)
        logits_Bx2, value_B = state.apply_fn(state.params, env.position)
        action_B = jax.random.categorical(act_key, logits_Bx2)
        log_B = jnp.take_along_axis(nn.log_softmax(logits_Bx2), action_B[:, None], axis=1)[:, 0]
        after, done_B = jax.vmap(move)(env, action_B, jax.random.split(reset_key, len(action_B)))
        step = {"seen": env.position, "action": action_B, "log": log_B, "value": value_B, "done": done_B}
        return after, step

    env, steps = jax.lax.scan(play, env, jax.random.split(play_key, STEPS))

    def look_back(carry: tuple[jax.Array, jax.Array], step: dict[str, jax.Array]):
        advantage_B, next_value_B = carry
        on_B = 1.0 - step["done"]
        error_B = 1.0 + DISCOUNT * next_value_B * on_B - step["value"]  # the reward is 1 a step
        advantage_B = error_B + DISCOUNT * TRACE * on_B * advantage_B
        return (advantage_B, step["value"]), advantage_B

    _, last_value_B = state.apply_fn(state.params, env.position)
    _, advantage_TxB = jax.lax.scan(look_back, (jnp.zeros_like(last_value_B), last_value_B), steps, reverse=True)
    steps |= {"advantage": advantage_TxB, "target": advantage_TxB + steps["value"]}
    steps = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)

    def learn(state: TrainState, minibatch: dict[str, jax.Array]):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, minibatch)
        return state.apply_gradients(grads=grads), loss

    def learn_all(state: TrainState, key: jax.Array):
        order_S = jax.random.permutation(key, advantage_TxB.size)
        shuffled = jax.tree.map(lambda x: x[order_S].reshape(MINIBATCHES, -1, *x.shape[1:]), steps)
        return jax.lax.scan(learn, state, shuffled)

    state, losses = jax.lax.scan(learn_all, state, jax.random.split(learn_key, PASSES))
    return state, env, {"loss": losses.mean(), "length": env.last.mean()}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="of 10 steps")
    parser.add_argument("--batch-size", type=int, default=64, help="environments of all devices together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of ZeRO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="the same on one device, under jax.jit")
    args = parser.parse_args()

    ctx = jaxdist.init()
    if ctx.size > 1 and (args.single or args.batch_size % ctx.size):
        raise SystemExit(f"{ctx.size} ranks share --batch-size {args.batch_size} equally; --single is for one process")
    train = jax.jit(train_step) if args.single else jaxdist.data_parallel(train_step, batch_argnums="env")

    key, agent_key, reset_key = jax.random.split(jax.random.key(args.seed), 3)
    agent = Agent()
    params = jax.jit(agent.init)(agent_key, jnp.zeros((1, 4)))
    tx = jaxdist.zero(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(args.lr)), args.level)
    state = TrainState.create(apply_fn=agent.apply, params=params, tx=tx)
    env = jax.vmap(reset)(jax.random.split(reset_key, args.batch_size).reshape(ctx.size, -1)[ctx.rank])

    console = Console(stderr=True, quiet=not ctx.is_root, log_path=False)
    metrics = {}
    for epoch in range(args.epochs):
        for _ in range(10):
            key, step_key = jax.random.split(key)
            state, env, metrics = train(state, env, step_key)
        console.log(f"epoch {epoch + 1} loss {metrics['loss']:.6f} length {metrics['length']:.1f}")
    devices = 1 if args.single else ctx.num_devices
    if ctx.is_root:
        print(f"final length={metrics['length']:.1f} epochs={args.epochs} devices={devices}")


if __name__ == "__main__":
    main()
