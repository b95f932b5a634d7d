"""CleanRL's updates, which stand in its scripts."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from published import Run, published
from published.samples import BATCH, STEPS, float64, random
from published.source import grab, undecorated

DQN = "cleanrl/cleanrl/dqn_jax.py"
TD3 = "cleanrl/cleanrl/td3_continuous_action_jax.py"
PPO = "cleanrl/cleanrl/ppo_atari_envpool_xla_jax.py"


@published(DQN, "update", "jax.jit; (state, observations, actions, next_observations, rewards, dones)")
def cleanrl_dqn(run: Run) -> Iterator[Any]:
    m = grab(DQN, "Args", "QNetwork", "TrainState", "update")
    m.args, m.q_network = m.Args(), m.QNetwork(action_dim=2)
    params, target = (float64(m.q_network.init(jax.random.PRNGKey(i), np.zeros((1, 4)))) for i in (0, 5))
    tx = run.zero(optax.adam(m.args.learning_rate))
    state = m.TrainState.create(apply_fn=m.q_network.apply, params=params, target_params=target, tx=tx)
    step = run.decorate(undecorated(m.update))
    r = random()
    for _ in range(STEPS):
        batch = (
            r.standard_normal((BATCH, 4)), r.integers(0, 2, (BATCH, 1)), r.standard_normal((BATCH, 4)),
            r.standard_normal(BATCH), r.integers(0, 2, (BATCH,)).astype(float),
        )  # fmt: skip
        loss, values, state = step(state, *run.part(batch))
        yield loss, values, state


def td3(run: Run) -> tuple[Any, list[Any], list[Any]]:
    m = grab(TD3, "Args", "QNetwork", "Actor", "TrainState", "update_critic", "update_actor")
    space = types.SimpleNamespace(low=-np.ones(2), high=np.ones(2), shape=(2,))
    m.args, m.envs = m.Args(), types.SimpleNamespace(single_action_space=space)
    m.actor = m.Actor(action_dim=2, action_scale=jnp.ones((1, 2)), action_bias=jnp.zeros((1, 2)))
    m.qf = m.QNetwork()

    def state(net: Any, key: int, *x: Any) -> Any:
        made = lambda: float64(net.init(jax.random.PRNGKey(key), *x))
        return m.TrainState.create(
            apply_fn=net.apply, params=made(), target_params=made(), tx=run.zero(optax.adam(3e-4))
        )

    o, a = np.zeros((1, 3)), np.zeros((1, 2))
    r = random()
    batches = [
        (r.standard_normal((BATCH, 3)), r.random((BATCH, 2)) * 2 - 1, r.standard_normal((BATCH, 3)),
         r.standard_normal(BATCH), r.integers(0, 2, (BATCH,)).astype(float))
        for _ in range(STEPS)
    ]  # fmt: skip
    return m, [state(m.actor, 0, o), state(m.qf, 1, o, a), state(m.qf, 2, o, a)], [run.part(b) for b in batches]


@published(TD3, "update_critic", "jax.jit; (actor, qf1, qf2, five arrays of the batch, key), the actor read only")
def cleanrl_td3_critic(run: Run) -> Iterator[Any]:
    m, (actor, qf1, qf2), batches = td3(run)
    step, key = run.decorate(undecorated(m.update_critic)), jax.random.PRNGKey(9)
    for batch in batches:
        (qf1, qf2), losses, values, key = step(actor, qf1, qf2, *batch, key)
        yield qf1, qf2, losses, values, key


@published(TD3, "update_actor", "jax.jit; (actor, qf1, qf2, observations), nested results")
def cleanrl_td3_actor(run: Run) -> Iterator[Any]:
    m, (actor, qf1, qf2), batches = td3(run)
    step = run.decorate(undecorated(m.update_actor))
    for batch in batches:
        actor, (qf1, qf2), loss = step(actor, qf1, qf2, batch[0])
        yield actor, qf1, qf2, loss


@published(PPO, "update_ppo", "jax.jit; (state, storage, key); storage is (steps, environments), a permutation of all")
def cleanrl_ppo(run: Run) -> Iterator[Any]:
    m = grab(
        PPO, "Args", "Network", "Critic", "Actor", "AgentParams", "Storage", "linear_schedule", "get_action_and_value2",
        "update_ppo",
    )  # fmt: skip
    m.AgentParams.__contains__ = lambda self, key: False  # today's flax looks for a key in the parameters
    times, environments, shape = 8, 2, (4, 36, 36)
    m.args = args = m.Args(num_envs=environments, num_steps=times, num_minibatches=2, update_epochs=2)
    args.batch_size, args.minibatch_size, args.num_iterations = times * environments, times, 10
    m.envs = types.SimpleNamespace(
        single_observation_space=types.SimpleNamespace(shape=shape),
        single_action_space=types.SimpleNamespace(shape=(), n=3),
    )
    m.network, m.actor, m.critic = m.Network(), m.Actor(action_dim=3), m.Critic()
    x = np.zeros((1, *shape))
    network = m.network.init(jax.random.PRNGKey(0), x)
    hidden = m.network.apply(network, x)
    params = float64(
        m.AgentParams(
            network, m.actor.init(jax.random.PRNGKey(1), hidden), m.critic.init(jax.random.PRNGKey(2), hidden)
        )
    )
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=m.linear_schedule, eps=1e-5)
    tx = run.zero(optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam))
    state = m.TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.replace(opt_state=float64(state.opt_state))
    step, key, r = run.decorate(undecorated(m.update_ppo)), jax.random.PRNGKey(7), random()
    normal = lambda: r.standard_normal((times, environments))
    for _ in range(STEPS):
        storage = m.Storage(
            obs=r.integers(0, 256, (times, environments, *shape)).astype(float), rewards=normal(), values=normal(),
            actions=r.integers(0, 3, (times, environments)).astype(np.int32), logprobs=-1.1 + 0.05 * normal(),
            dones=np.zeros((times, environments)), advantages=normal(), returns=normal(),
        )  # fmt: skip
        state, *losses, key = step(state, run.part(storage), key)
        yield state, losses, key
