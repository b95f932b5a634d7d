"""A program that ranks have compiled to another order of its messages does not run."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from harness import jobs
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.runtime.order import _digests, order_of

_STEP = """
import os, sys, time
if os.environ["RANK"] == "1":
    os.environ["XLA_FLAGS"] += " " + sys.argv[1]
import jax, jax.numpy as jnp, numpy as np, optax
import jaxdist
from jaxdist.runtime import compiler, order
if sys.argv[2] == "unchecked flags":
    compiler.check_same = lambda *args: None
ctx = jaxdist.init(communicator="xla", timeout=60)
tx = jaxdist.zero(optax.adam(1e-3), 3)

@jaxdist.data_parallel
def step(weights, state, x):
    def loss(weights):
        hidden = x
        for w in weights:
            hidden = jnp.tanh(hidden @ w)
        return (hidden**2).mean()
    value, grads = jax.value_and_grad(loss)(weights)
    updates, state = tx.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state, value

weights = [jnp.ones((64, 64)) / 64] * 6
state, x = tx.init(weights), np.full((256, 64), ctx.rank, np.float32)
if sys.argv[2] == "slow first":
    order._SAY_SECONDS = order._PATIENCE = 0.5
    compile_ = jax._src.compiler.backend_compile_and_load
    def slowly(backend, module, *rest):
        if ctx.rank == 0 and "jit_step" in str(module.operation.attributes["sym_name"]):
            time.sleep(3)
        return compile_(backend, module, *rest)
    jax._src.compiler.backend_compile_and_load = slowly
elif sys.argv[2] == "alone":
    order._PATIENCE = order._SAY_SECONDS = 100.0  # more than the test has
    if ctx.rank == 1:
        step.lower(weights, state, x).compile()  # rank 0 waits elsewhere, and does not answer
    ctx.barrier()
    data = jax.make_array_from_process_local_data(
        jax.sharding.NamedSharding(ctx.mesh, jax.sharding.PartitionSpec("data")), np.ones((4, 2), np.float32))
    for late in (0, 1):
        time.sleep(ctx.rank == late)
        both = lambda x: (x.sum(0) + ctx.rank) / x.max(0)  # two collectives; a program of its own on each rank
        jax.block_until_ready(jax.jit(both)(data))
    step(weights, state, x)
    jax.clear_caches()
    jax.block_until_ready(step(weights, state, x))
    if ctx.rank == 1:
        jax.clear_caches()
else:
    for _ in range(2):
        weights, state, value = step(weights, state, x)
jax.block_until_ready(step(weights, state, x))
print("fine", ctx.rank)
"""


@pytest.mark.slow
def test_another_order_is_an_error_before_the_program_runs() -> None:
    """As between hosts with other processors; here by a flag, let through."""
    other = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    results = jobs.spawn_env(2, ["-c", _STEP, other, "unchecked flags"], timeout=120)
    for result in results:
        assert result.returncode != 0
        found = re.search(
            r"compiled to messages in another order on rank 1 .* than on rank 0 .*: number \d+ is "
            r"jit\(step\)\S*collective_(\d+)/.* here and jit\(step\)\S*collective_(\d+)/.* there",
            result.stderr,
        )
        assert found, result.output
        assert found[1] != found[2]
        assert "PJRT_NPROC" in result.stderr
        assert "match expected size" not in result.stderr
        assert "fine" not in result.stdout


@pytest.mark.slow
def test_a_rank_that_compiles_what_the_first_one_has_not_waits_for_nothing() -> None:
    results = jobs.spawn_env(2, ["-c", _STEP, "", "alone"], timeout=90)
    assert [result.stdout for result in results] == ["fine 0\n", "fine 1\n"], results
    assert "waits for rank 0" not in "".join(result.stderr for result in results)


@pytest.mark.slow
def test_a_first_rank_that_takes_long_is_named_and_its_answer_may_come_late() -> None:
    results = jobs.spawn_env(2, ["-c", _STEP, "", "slow first"], {"JAXDIST_COMPILE": "each"}, timeout=90)
    assert [result.stdout for result in results] == ["fine 0\n", "fine 1\n"], results
    assert "has compiled 'jit_step' and waits for rank 0 (" in results[1].stderr
    assert "goes on with 'jit_step'" in results[1].stderr
    assert "jit_step" not in results[0].stderr


def test_the_order_goes_into_loops_and_branches() -> None:
    mesh = Mesh(jax.devices()[:2], ("x",))

    def named(name: str, x: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            return lax.psum(x, "x")

    def f(x: jax.Array) -> jax.Array:
        x = named("first", x) * 2
        x = lax.fori_loop(0, 3, lambda _, x: named("turn", x) + 1, x)
        x = lax.cond(x.sum() > 0, lambda x: named("yes", x), lambda x: named("no", x) + 1, x)
        return named("last", x)

    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    text = run.lower(jnp.ones(3)).compile().as_text()
    assert text
    first, turn, *branches, last = [one.name.split("/")[-2] for one in order_of(text)]
    assert (first, turn, sorted(branches), last) == ("first", "turn", ["no", "yes"], "last")


_TWO = """HloModule step, is_scheduled=true

ENTRY %main.1 (x: f32[4], y: f32[4]) -> (f32[8], f32[8]) {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %a.9 = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, metadata={op_name="step/collective_1/gather" frame=3}
  %a.7 = f32[8]{0} all-gather(%y), channel_id=1, replica_groups={{0,1}}, metadata={op_name="step/collective_2/gather"}
  ROOT %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%a.9, %a.7)
}
"""


def _reordered(text: str) -> str:
    lines = text.splitlines()
    lines[5:7] = reversed(lines[5:7])
    return "\n".join(lines)


def test_equal_messages_are_told_apart_and_other_names_of_the_compiler_are_not() -> None:
    first = order_of(_TWO)
    assert first == [("f32[8]{0} all-gather(), replica_groups={{0,1}}", f"step/collective_{n}/gather") for n in (1, 2)]
    assert order_of(_reordered(_TWO)) == first[::-1]
    renamed = _TWO.replace("%a.9", "%a.2").replace("frame=3", "frame=8")
    assert order_of(renamed) == first


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (_TWO, True),
        (_reordered(_TWO), False),
        (_TWO.replace("step/", "renamed/"), True),
        (_reordered(_TWO.replace("step/", "renamed/")), False),
        (_TWO.replace("collective_2", "collective_7"), True),  # of another version, from JAX's cache: tells nothing
        (_TWO.replace("f32[8]{0} all-gather(%y", "f32[8]{0:T(8)} all-gather(%y"), False),  # other bytes
        (_TWO.replace("replica_groups={{0,1}}", "replica_groups={{1,0}}", 1), False),
    ],
)
def test_which_orders_fit(text: str, same: bool) -> None:
    assert _digests(order_of(text)).fit(_digests(order_of(_TWO))) is same
