"""Handwritten digits with ZeRO and checkpoints."""

# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdist

BATCH, EPOCHS = 96, 20

ctx = jaxdist.init()  # before any JAX computation

digits = load_digits()  # 1797 images of 8 x 8
order = np.random.default_rng(0).permutation(1797)[:1728]  # 18 batches of 96
data = {
    "image": (digits.data[order] / 16).astype(np.float32),
    "label": digits.target[order],
}


def loss_fn(params, batch):
    hidden = batch["image"] @ params["w1"]
    hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 0.01)  # over the batch
    logits = jax.nn.relu(hidden) @ params["w2"]
    right = logits.argmax(-1) == batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), right.sum()


tx = jaxdist.zero(optax.adam(1e-3), level=2)


@jaxdist.data_parallel
def train_step(state, batch):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, right), grads = grad_fn(state["params"], batch)
    updates, opt_state = tx.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": loss, "right": right}


keys = jax.random.split(jax.random.key(0))
params = {
    "w1": 0.1 * jax.random.normal(keys[0], (64, 128)),
    "w2": 0.1 * jax.random.normal(keys[1], (128, 10)),
}
state = {"params": params, "opt_state": tx.init(params)}

batches = jaxdist.loader(data, BATCH, shuffle=False)


def everything():
    return {"state": state, "data": batches.get_state()}


step = jaxdist.latest_step("checkpoints") or 0
if step:
    saved = jaxdist.restore("checkpoints", everything())
    state = saved["state"]
    batches.set_state(saved["data"])

for epoch in range(batches.epoch, EPOCHS):
    for batch in batches:  # this rank's rows
        state, metrics = train_step(state, batch)
        step += 1
        if step % 10 == 0:
            jaxdist.save("checkpoints", everything(), step, keep=2)
    if ctx.is_root:
        print(f"epoch {epoch} loss {metrics['loss']:.6f} right {metrics['right']}")
